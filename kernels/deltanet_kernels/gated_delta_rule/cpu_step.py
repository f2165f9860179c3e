"""A decoding step of a Gated DeltaNet layer composed of operators: the definition of the fused kernel's results.

With PyTorch operators it is the CPU path. With Triton operators it serves states that the fused kernel does not.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional as F

from deltanet_kernels.arguments import ConvCall, GatedNormCall, StepCall
from deltanet_kernels.common.heads import repeated
from deltanet_kernels.common.rotation import rotate
from deltanet_kernels.common.state_indices import on_copies
from deltanet_kernels.gated_delta_rule.cpu_recurrent import torch_recurrent_step_
from deltanet_kernels.reference import torch_causal_conv1d, torch_gated_rms_norm

CHANGED = ("state", "conv_tail")
CLOSED = -1e4  # a gate logit whose sigmoid and softplus are exactly 0


class StepParts(NamedTuple):
    """The operators that make up a step: `causal_conv1d`, the recurrence with its state in place, `gated_rms_norm`."""

    conv: Callable[[ConvCall], tuple[torch.Tensor, torch.Tensor | None]]
    rule_: Callable[..., torch.Tensor]
    norm: Callable[[GatedNormCall], torch.Tensor]


def compose_step_(parts: StepParts, call: StepCall) -> torch.Tensor:
    """`deltanet_kernels.gated_delta_step_` composed of `parts`."""
    if call.state_indices is not None:
        return on_copies(lambda copied: compose_step_(parts, copied), call, CHANGED)
    q, k, v, a, b, state, A_log, dt_bias, conv_weight, conv_tail, z, norm_weight, padding, cos, sin, *_ = call
    k_offset, eps, qk_silu, v_silu = call.k_offset, call.eps, call.qk_silu, call.v_silu
    sigmoid, allow_neg_eigval = call.use_beta_sigmoid_in_kernel, call.allow_neg_eigval
    (B, T), (K, V) = q.shape[:2], state.shape[2:]
    q = q.reshape(B, T, -1)
    k, v = (repeated(x.reshape(B, T, -1), size, call.kv_repeats) for x, size in ((k, K), (v, V)))
    if padding is not None:
        hidden = padding.unsqueeze(-1)
        q, k, v = (x.masked_fill(hidden, 0.0) for x in (q, k, v))
        a = a.masked_fill(hidden, 0.0 if A_log is None else CLOSED)
        b = b.masked_fill(hidden, CLOSED if sigmoid else 0.0)
        z = None if z is None else z.reshape(B, T, -1).masked_fill(hidden, 0.0)
    if conv_weight is not None and conv_tail is not None:
        both = qk_silu and v_silu and cos is None and k_offset is None
        qkv = torch.cat([q, k, v], dim=-1)
        qkv, tail = parts.conv(ConvCall(qkv, conv_weight, None, "silu" if both else None, conv_tail, True))
        assert tail is not None
        conv_tail.copy_(tail)
        q, k, v = qkv.split([q.shape[-1], k.shape[-1], v.shape[-1]], dim=-1)
        qk_silu, v_silu = qk_silu and not both, v_silu and not both
    q, k, v = q.unflatten(-1, (-1, K)), k.unflatten(-1, (-1, K)), v.unflatten(-1, (-1, V))
    if cos is not None and sin is not None:
        q, k = rotate(torch.cat([q, k], dim=2), cos, sin).split([q.shape[2], k.shape[2]], dim=2)
    if k_offset is not None:
        k = k - k_offset.to(k.dtype)
    if qk_silu:
        q, k = F.silu(q), F.silu(k)
    if v_silu:
        v = F.silu(v)
    strength = 2 * b.to(torch.promote_types(b.dtype, torch.float32)).sigmoid() if allow_neg_eigval else b
    o = parts.rule_(
        q, k, v, a, strength, state, call.factor, True, A_log=A_log, dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=sigmoid and not allow_neg_eigval, erase=call.erase,
    )  # fmt: skip
    if z is not None:
        z = z.reshape(o.shape)
    if norm_weight is not None:
        return parts.norm(GatedNormCall(o, z, norm_weight, eps))
    return o if z is None else o * F.silu(z)


_PARTS = StepParts(torch_causal_conv1d, torch_recurrent_step_, torch_gated_rms_norm)


def torch_gated_delta_step_(call: StepCall) -> torch.Tensor:
    """`deltanet_kernels.gated_delta_step_` in PyTorch, float32 inside (float64 for float64 inputs)."""
    return compose_step_(_PARTS, call)
