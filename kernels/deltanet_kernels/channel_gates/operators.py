"""The operators of the delta rule with a decay per key channel: in chunks, and by its recurrence for short inputs.

Both take a `ChannelCall`. Calls of the recurrence that need gradients use the kernels of the chunks.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from deltanet_kernels.channel_gates import cpu
from deltanet_kernels.channel_gates.calls import ChannelCall, check_channel_rule
from deltanet_kernels.dispatch import Operator


def _chunk():
    from deltanet_kernels.channel_gates.chunk import chunk_channel_gated_delta_rule_triton

    return chunk_channel_gated_delta_rule_triton


def _recurrent():
    from deltanet_kernels.channel_gates.recurrent import fused_recurrent_channel_gated_delta_rule_triton

    return fused_recurrent_channel_gated_delta_rule_triton


chunk_channel_gated_delta_rule = Operator(
    "chunk_channel_gated_delta_rule", ChannelCall, check=check_channel_rule, cpu=cpu.chunked, triton=_chunk
)
fused_recurrent_channel_gated_delta_rule = Operator(
    "fused_recurrent_channel_gated_delta_rule", ChannelCall, check=check_channel_rule, cpu=cpu.recurrent,
    triton=_recurrent,
)  # fmt: skip
