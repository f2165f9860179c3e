"""The calls of the rule read at boundaries: their arguments, documented, and their checks."""

from typing import NamedTuple

import torch
from torch import Tensor

from deltanet_kernels import checks
from deltanet_kernels.arguments import RuleCall
from deltanet_kernels.packed_cache.layout import GROUP, PackedKeyValues
from deltanet_kernels.prompt.calls import GateValuesCall
from deltanet_kernels.prompt.checks import check_gate_values


class GroupRuleCall(NamedTuple):
    """The gated delta rule whose queries read the state before their group of 32 tokens, differentiable.

        S_0 = initial_state;  S_{i+1} = S_i after the writes of tokens 32 i ... 32 i + 31 by `chunk_gated_delta_rule`
        o_t = scale * q_t^T S_{t // 32}

    For a state of what has left a window of N groups, pass q[:, 32 N:] and k, v, g, beta[:, : T - 32 N]. Heads are
    grouped as in `chunk_gated_delta_rule`.

    Args:
        q: queries [B, T, HQ, K]; T >= 1, not necessarily a multiple of 32.
        k: keys [B, T, H, K], dtype of q.
        v: values [B, T, HV, V], dtype of q.
        g: log decay per token, <= 0 [B, T, HV]; float32 is recommended.
        beta: write strength [B, T, HV] in [0, 2].
        scale: factor of the output, K**-0.5 by default.
        initial_state: [B, HV, K, V] float32 (float64 with float64 inputs); zeros by default.
        output_final_state: also return the state after the last token.
        use_qk_l2norm_in_kernel: replace q and k by x * rsqrt(sum x^2 + 1e-6).

    Returns:
        o [B, T, max(HQ, HV), V] in the dtype of v, and the final state [B, HV, K, V] float32 or None.

    Raises:
        ValueError: shapes, head counts or devices that do not fit, T = 0.
        TypeError: dtypes that do not fit.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    scale: float | None = None
    initial_state: Tensor | None = None
    output_final_state: bool = False
    use_qk_l2norm_in_kernel: bool = False

    @property
    def rule(self) -> RuleCall:
        """The same arguments of the gated delta rule."""
        return RuleCall(*self)


def check_group_rule(call: GroupRuleCall) -> None:
    """Check the arguments of a call; raises ValueError or TypeError."""
    checks.check_delta_rule(call.rule)


class GroupGatesCall(NamedTuple):
    """The gates of a prompt beside a window of N whole groups: those of what has left it, and those that wait.

        g = -exp(A_log) softplus(a + dt_bias);  beta = limit sigmoid(b)

    both rounded to bfloat16, as they wait. On CUDA this is one kernel. No gradients.

    Args:
        a, b: logits [B, T, H]; A_log, dt_bias: [H].
        groups: N.
        sinks: first tokens, which are never written.
        length: [1] int64: as if the first `length` tokens, at least 1, were all; it is read on the device.
        limit: the greatest beta, 1 or 2.

    Returns:
        g and beta of the first max(T - 32 N, 0) tokens, for `chunk_group_gated_delta_rule` [B, T - 32 N, H] float32, 0
        where a token has not left the window of the last one, or is a sink; and those of the last 32 (N + 1) tokens,
        token n in the place n % (32 (N + 1)) [B, 32 (N + 1), H] bfloat16, 0 where a place has no token.

    Raises:
        ValueError: shapes that do not fit, or gradients are required.
    """

    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor
    groups: int
    sinks: int
    length: Tensor | None = None
    limit: int = 1


def check_group_gates(call: GroupGatesCall) -> None:
    """Check the arguments of a call; raises ValueError or TypeError."""
    check_gate_values(GateValuesCall(call.a, call.b, call.A_log, call.dt_bias, call.limit))
    checks.check_length(call.length, call.a)
    if call.groups < 0:
        raise ValueError(f"groups: got {call.groups}, needs at least 0")


class GroupStepCall(NamedTuple):
    """Reads the state of what has left a window with the next token of each sequence. No gradients.

        o = scale * normalised(rotated(q))^T S

    The window is a packed cache of N groups before that of the token. If the token begins a group, the group that is N
    + 1 before it leaves: first its tokens, but no sinks, are written into S by `chunk_gated_delta_rule`, with the gates
    that waited for them. Then those of the token, g = -exp(A_log) softplus(a + dt_bias) and beta = limit sigmoid(b),
    take their place. `packed_step_` then puts the token into the cache. S, its scales and the gates change in place.

    Args:
        q: the token's queries [B, 1, HQ, D].
        a, b: logits of its gates [B, 1, H]; A_log, dt_bias: [H].
        cache: before the token, with N > 0 groups and key heads that divide the H states.
        g, beta: the gates that wait [B, 32 (N + 1), H] bfloat16, token n in the place n % (32 (N + 1)).
        state: S [B, H, D, D], or with state_scale its numbers int8 in units of the scale of their row.
        state_scale: [B, H, D] float32; with it S is rounded whenever a group has been written.
        sinks: first tokens of a sequence that are never written.
        cos, sin: of a rotary embedding, [B, 1, R] or [1, 1, R] with an even R <= D; None for none.
        scale: factor of the output, D**-0.5 by default.
        limit: the greatest beta, 1 or 2.

    Returns:
        o [B, 1, HQ, D] in the dtype of q.

    Raises:
        ValueError: shapes or head counts that do not fit, or gradients are required.
        TypeError: dtypes that do not fit.
    """

    q: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor
    cache: PackedKeyValues
    g: Tensor
    beta: Tensor
    state: Tensor
    state_scale: Tensor | None = None
    sinks: int = 0
    cos: Tensor | None = None
    sin: Tensor | None = None
    scale: float | None = None
    limit: int = 1

    @property
    def factor(self) -> float:
        """The factor of the output: `scale`, or D**-0.5 by default."""
        return float(self.q.shape[3] ** -0.5) if self.scale is None else float(self.scale)


def check_group_step(call: GroupStepCall) -> None:
    """Check the arguments of a call; raises ValueError or TypeError."""
    q, state, cache = call.q, call.state, call.cache
    (B, HK, groups, D), H = cache.key_scales.shape, state.shape[1]
    if groups < 1 or H % HK or q.dim() != 4 or q.shape[2] % H:
        raise ValueError(
            f"got {q.shape[-2]} query heads, {H} states, {HK} key heads and {groups} groups; each number of heads "
            "needs to divide the one before, and a group to be there"
        )
    checks.require_shape("q", q, (B, 1, q.shape[2], D), "[B, 1, HQ, D] of the cache")
    for name, x in (("a", call.a), ("b", call.b)):
        checks.require_shape(name, x, (B, 1, H), "[B, 1, H]")
    for name, x in (("A_log", call.A_log), ("dt_bias", call.dt_bias)):
        checks.require_shape(name, x, (H,), "[H]")
    for name, x in (("g", call.g), ("beta", call.beta)):
        checks.require_shape(name, x, (B, GROUP * (groups + 1), H), "[B, 32 (N + 1), H]")
        if x.dtype != torch.bfloat16:
            raise TypeError(f"{name}: got dtype {x.dtype}, needs torch.bfloat16")
    checks.require_shape("state", state, (B, H, D, D), "[B, H, D, D]")
    if call.state_scale is not None:
        checks.require_shape("state_scale", call.state_scale, (B, H, D), "[B, H, D]")
    if (state.dtype == torch.int8) != (call.state_scale is not None):
        raise TypeError(f"state: got dtype {state.dtype}, needs torch.int8 with a state_scale and only then")
    checks.check_rotation(call.cos, call.sin, B, 1, D, q.device)
    if call.limit not in (1, 2):
        raise ValueError(f"limit: got {call.limit!r}, needs 1 or 2")
    checks.refuse_gradients("group_gated_delta_step_", "chunk_group_gated_delta_rule", q, call.a, call.b)
