"""The elementwise work of a prompt in PyTorch: the definition of the kernels' results, operation by operation."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from deltanet_kernels.arguments import ConvCall
from deltanet_kernels.common.heads import repeated
from deltanet_kernels.common.rotation import rotate
from deltanet_kernels.prompt.calls import GateValuesCall, PromptInputs, PromptInputsCall
from deltanet_kernels.reference import torch_causal_conv1d


def torch_prompt_inputs(call: PromptInputsCall) -> PromptInputs:
    """`deltanet_kernels.prompt_inputs` in PyTorch, with every result between two operations rounded to its dtype."""
    kv = (repeated(x, call.head_dim, call.kv_repeats) for x in (call.k, call.v))
    parts, ends = [call.q, *kv], []
    if call.conv_weight is not None:
        sizes = [x.shape[2] for x in parts]
        tails = [None] * 3 if call.conv_tail is None else call.conv_tail.split(sizes, dim=1)
        for n, (weight, tail) in enumerate(zip(call.conv_weight.split(sizes), tails, strict=True)):
            parts[n], end = torch_causal_conv1d(ConvCall(parts[n], weight, None, None, tail, call.output_tail))
            ends += [] if end is None else [end]
    q, k, v = (x.unflatten(-1, (-1, call.head_dim)) for x in parts)
    window: list[torch.Tensor] = []
    if call.window_heads:
        window = [call.q, call.k[..., -call.window_heads * call.head_dim :]]
        window = [x.unflatten(-1, (-1, call.head_dim)) for x in window]
    if call.cos is not None and call.sin is not None:
        q, k, *window = (rotate(x, call.cos, call.sin) for x in (q, k, *window))
    if call.k_offset is not None:
        k = (k.unflatten(2, (-1, len(call.k_offset))) - call.k_offset.to(k.dtype)).flatten(2, 3)
    if call.qk_silu:
        q, k = F.silu(q), F.silu(k)
    if call.v_silu:
        v = F.silu(v)
    window_q, window_k = window or (None, None)
    return PromptInputs(q, k, v, window_q, window_k, torch.cat(ends, dim=1) if ends else None)


def torch_gate_values(call: GateValuesCall) -> tuple[torch.Tensor, torch.Tensor]:
    """`deltanet_kernels.gate_values` in PyTorch."""
    a, b, A_log, dt_bias, limit = call
    return -A_log.float().exp() * F.softplus(a.float() + dt_bias.float()), b.float().sigmoid() * limit
