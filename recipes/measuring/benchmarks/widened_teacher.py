"""Writes a small Llama checkpoint in a larger shape: the same function, by matrices that are zero elsewhere.

    python -m measuring.benchmarks.widened_teacher SmolLM2-135M-Instruct FOLDER 8B

Weights of a large shape at random know nothing that a selection of layers could measure. These answer as the small
model does, so `select`, `convert` and training can be timed on a shape without its checkpoint. The vocabulary and the
tokenizer stay those of the small model; layers that it does not have add nothing to the residual stream.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from deltanet_convert.storage.safetensors_folder import Checkpoint
from deltanet_convert.storage.shard_writer import ShardWriter, plan_layout
from deltanet_convert.teacher_model import meta_model, output_specs
from deltanet_hf.errors import UserError
from deltanet_hf.evaluation.speed.random_models import SHAPES
from deltanet_hf.exit_codes import run_command

SHARD_SIZE = 2 * 10**9  # bytes


def write_widened(source: Path, folder: Path, shape: dict[str, Any]) -> None:
    """Write the Llama checkpoint in `source` in a larger shape into `folder`.

    Args:
        shape: sizes of the configuration (`SHAPES`); its vocabulary is not used.

    Raises:
        UserError: the shape cannot hold the model.
    """
    small = LlamaConfig.from_pretrained(source)
    sizes = {"head_dim": shape["hidden_size"] // shape["num_attention_heads"]} | shape
    wide = LlamaConfig(**small.to_dict() | sizes | {"vocab_size": small.vocab_size})
    wide.rms_norm_eps = small.rms_norm_eps * small.hidden_size / wide.hidden_size
    places = _Places(small, wide)
    checkpoint = Checkpoint.open(source)
    dtype = checkpoint.dtype("model.embed_tokens.weight")
    specs = output_specs(meta_model(LlamaForCausalLM, wide, dtype), dtype, ())
    folder.mkdir(parents=True)
    writer = ShardWriter(folder, plan_layout(specs, SHARD_SIZE))
    writer.prepare()
    for spec in specs:
        name = spec.name
        stored = "model.embed_tokens.weight" if name == "lm_head.weight" and name not in checkpoint else name
        values = torch.zeros(spec.shape)
        if stored in checkpoint:
            places.put(name, checkpoint.read(stored, torch.float32), values)
        writer.write(name, [values.to(dtype)])
    writer.finish()
    wide.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


class _Places:
    """Where the numbers of each weight go, and what they are multiplied by."""

    def __init__(self, small: Any, wide: Any) -> None:
        group, room = (c.num_attention_heads // c.num_key_value_heads for c in (small, wide))
        stretch, rest = divmod(wide.head_dim, small.head_dim)
        fits = (
            small.hidden_size <= wide.hidden_size
            and small.intermediate_size <= wide.intermediate_size
            and small.num_hidden_layers <= wide.num_hidden_layers
            and small.num_key_value_heads <= wide.num_key_value_heads
            and group <= room
            and not rest
        )
        if not fits or small.attention_bias or small.mlp_bias or small.rope_parameters["rope_type"] != "default":
            raise UserError("the shape does not hold this model: every size must be as large, heads a multiple")
        # Channel i turns with channel i + half by theta^(-2i / size); a larger head has these angles further apart.
        half, channel = small.head_dim // 2, torch.arange(small.head_dim)
        channel = channel % half * stretch + channel // half * (wide.head_dim // 2)
        queries = [k * room + j for k in range(small.num_key_value_heads) for j in range(group)]
        words, hidden, mlp = map(torch.arange, (small.vocab_size, small.hidden_size, small.intermediate_size))
        q, k = (
            torch.cat([head * wide.head_dim + channel for head in heads])
            for heads in (queries, range(small.num_key_value_heads))
        )
        self._norm = math.sqrt(small.hidden_size / wide.hidden_size)
        self._of: dict[str, tuple[Tensor, Tensor, float]] = {  # rows, columns, factor
            "embed_tokens": (words, hidden, 1.0), "lm_head": (words, hidden, 1.0),
            "q_proj": (q, hidden, math.sqrt(stretch)), "k_proj": (k, hidden, 1.0), "v_proj": (k, hidden, 1.0),
            "o_proj": (hidden, q, 1.0), "gate_proj": (mlp, hidden, 1.0), "up_proj": (mlp, hidden, 1.0),
            "down_proj": (hidden, mlp, 1.0),
        }  # fmt: skip

    def put(self, name: str, values: Tensor, into: Tensor) -> None:
        """Put the small weight `values` into its places of the large one."""
        if values.dim() == 1:
            into[: len(values)] = values * self._norm
            return
        rows, columns, factor = self._of[name.split(".")[-2]]
        into[rows[:, None], columns] = values * factor


def main() -> None:
    """The command of the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="folder of a small Llama checkpoint")
    parser.add_argument("folder", type=Path, help="folder to write")
    parser.add_argument("shape", choices=SHAPES)
    options = parser.parse_args()
    run_command(lambda: write_widened(options.source, options.folder, SHAPES[options.shape]))


if __name__ == "__main__":
    main()
