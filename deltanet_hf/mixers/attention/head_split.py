"""Cuts a family's attention into narrower attentions, each with some of its key/value heads and their query heads.

Attention adds what its heads give, so a layer is the sum of such parts: the rows of the q, k and v projections and the
columns of the output projection go to the part that has the head. Learned q/k norms over one head are repeated in each
part; a bias of the output projection stays in one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from deltanet_hf.errors import UserError
from deltanet_hf.mixers.attention.routed_config import PartConfig


class NarrowConfig(PartConfig):
    """A family's configuration with other head counts. A later change of the attention function reaches every part."""

    def __init__(self, config: PreTrainedConfig, query_heads: int, kv_heads: int, head_dim: int) -> None:
        self.whole = config
        self.num_attention_heads, self.num_key_value_heads, self.head_dim = query_heads, kv_heads, head_dim


def heads_part(attention: Any) -> bool:
    """Whether a layer can be cut up by heads: no learned q/k norm goes over all heads together (OLMo 2 and 3)."""
    norm = getattr(attention, "q_norm", None)
    return norm is None or norm.weight.numel() == attention.head_dim


def check_heads_part(attention: Any, config: PreTrainedConfig) -> None:
    """Raises UserError unless a layer can be cut up by heads."""
    if not heads_part(attention):
        raise UserError(
            f"model_type {config.model_type}: its q/k norms go over all heads of a layer together, so the heads of one "
            "layer cannot be of different kinds; choose whole layers"
        )


def narrow_attention(
    attention: Any, config: PreTrainedConfig, layer_idx: int, heads: Sequence[int], bias: bool
) -> nn.Module:
    """A new attention of the family, without values, for some of the key/value heads of `attention`.

    Args:
        attention: the complete attention of layer `layer_idx`.
        config: its model's configuration.
        heads: indices of the key/value heads; each brings the query heads that share it.
        bias: whether the part has the bias of the output projection, where there is one.

    Raises:
        UserError: the heads do not part.
    """
    check_heads_part(attention, config)
    groups = int(config.num_attention_heads) // int(config.num_key_value_heads)
    narrow = NarrowConfig(config, groups * len(heads), len(heads), int(attention.head_dim))
    made: Any = type(attention)(narrow, layer_idx)
    if made.o_proj.bias is not None and not bias:
        made.o_proj = nn.Linear(made.o_proj.in_features, made.o_proj.out_features, bias=False)
    return made  # type: ignore[no-any-return]


def narrow_weights(attention: Any, narrow: nn.Module, heads: Sequence[int]) -> dict[str, Tensor]:
    """The weights of `narrow`, made by `narrow_attention` for `heads`, from those of the complete `attention`."""
    config, head_dim = attention.config, int(attention.head_dim)
    kv_heads = int(config.num_key_value_heads)
    groups = int(config.num_attention_heads) // kv_heads
    queries = [head * groups + member for head in heads for member in range(groups)]
    rows = {"q_proj": _rows(queries, head_dim), "k_proj": _rows(heads, head_dim), "v_proj": _rows(heads, head_dim)}
    keys = rows["k_proj"] + groups * kv_heads * head_dim
    rows["qkv_proj"] = torch.cat([rows["q_proj"], keys, keys + kv_heads * head_dim])
    whole, found = attention.state_dict(), {}
    for name in narrow.state_dict():
        module, tensor = name.partition(".")[0], whole[name]
        if name == "o_proj.weight":
            tensor = tensor[:, rows["q_proj"].to(tensor.device)]
        elif name == "sinks":  # one per query head
            tensor = tensor[torch.tensor(queries, device=tensor.device)]
        elif module in rows:
            tensor = tensor[rows[module].to(tensor.device)]
        found[name] = tensor.clone() if tensor is whole[name] else tensor
    return found


def _rows(heads: Sequence[int], head_dim: int) -> Tensor:
    """Indices of the rows of these heads."""
    return (torch.tensor(list(heads))[:, None] * head_dim + torch.arange(head_dim)).flatten()
