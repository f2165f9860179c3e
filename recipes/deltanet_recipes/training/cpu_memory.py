"""The parts of a stage's memory that differ on a CPU, where layers are not compiled and the whole process counts.

A value is one float32 number per token that a layer saves for its backward pass. The counts are those of tensors that
autograd saves (tests/recipes/test_recipe_memory.py), for Gated DeltaNet with and without a window beside its state;
other mixers are counted like Gated DeltaNet.

D is the hidden size, M that of the MLP, H heads of d in attention, HK key/value heads.
"""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from deltanet_hf.model_sizes import head_size, mlp_size
from deltanet_hf.process_memory import runtime_bytes
from deltanet_kernels.window.cpu import block_size
from deltanet_recipes.training.model_pair import mixers


def process_bytes(student: nn.Module) -> int:
    """Bytes of libraries and tokenizer."""
    return runtime_bytes(student.config)  # type: ignore[arg-type]


def layer_values(student: nn.Module, index: int, row: int) -> int:
    """Values of a decoder layer: 5 D + 4 M for residual stream, norms and MLP, and those of its attention or mixer.

    Of softmax attention, the values are its input (D), q and output (H d each), k and v (HK d each) and the logarithms
    of its sums (H).

    Args:
        row: tokens of a row.
    """
    config: Any = student.config
    mlp = mlp_size(config)
    around = 5 * config.hidden_size + 4 * mlp
    mixer = mixers(student).get(index)
    if mixer is not None:
        return around + mixer_values(student, mixer, row)
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, head_size(config)
    return int(around + config.hidden_size + 2 * dim * (heads + (kv_heads or heads)) + heads)


def mixer_values(student: nn.Module, mixer: Any, row: int) -> int:
    """Values of a mixer: D + (13 + d / 64) H d + 10 H, and those of the window beside its state.

    They are its input, per head 13 d (q, k and v before and after convolution, rotation and offset, values of the
    chunks, output before and after norm, gate and product), the state of every chunk of 64 tokens (d / 64 times d), and
    gates with their logits.
    """
    config: Any = student.config
    dim, heads = head_size(config), int(config.num_attention_heads)
    values = config.hidden_size + (13 + dim / 64) * heads * dim + 10 * heads
    branch = getattr(mixer, "window_branch", None)
    return int(values) if branch is None else int(values) + window_values(branch, row)


def window_values(branch: Any, row: int) -> int:
    """Values of a window: blocks of C queries (`deltanet_kernels/window/cpu.py`) have scores for s + 2 C keys.

    With s sinks, and per query of a block: two float32 scores and a mark of a byte per key and head (of all heads
    together the mark), the copies of the block's keys and values, and the query; then the output. The last block of a
    row is filled up to C queries.
    """
    block = block_size(branch.window, row)
    keys = branch.sinks + 2 * block
    width = branch.heads * branch.head_dim
    copies = 2 * branch.kv_heads * branch.head_dim * keys / block
    per_query = 2 * branch.heads * keys + keys / 4 + copies + width
    return int(per_query * math.ceil(row / block) * block / row + width)
