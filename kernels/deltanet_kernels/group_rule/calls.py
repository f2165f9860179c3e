"""The calls of the rule read at boundaries: their arguments, documented, and their checks."""

from typing import NamedTuple

import torch
from torch import Tensor

from deltanet_kernels import checks
from deltanet_kernels.arguments import RuleCall
from deltanet_kernels.packed_cache.calls import PackedStepCall
from deltanet_kernels.packed_cache.checks import check_packed_row, check_packed_step
from deltanet_kernels.packed_cache.layout import GROUP
from deltanet_kernels.prompt.calls import GateValuesCall, check_gate_values
from deltanet_kernels.window.calls import WindowMixtureCall, check_window_mixture


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
        cu_seqlens: offsets of sequences that fill one row, as for `chunk_gated_delta_rule`; the groups of each count
            from its first token. On CUDA their gradients come from the form in PyTorch.

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
    cu_seqlens: Tensor | None = None

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
        cu_seqlens: offsets [N' + 1] of sequences that fill one row; without `length`.
        longest: the most tokens of such a sequence.

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
    cu_seqlens: Tensor | None = None
    longest: int = 0


def check_group_gates(call: GroupGatesCall) -> None:
    """Check the arguments of a call; raises ValueError or TypeError."""
    check_gate_values(GateValuesCall(call.a, call.b, call.A_log, call.dt_bias, call.limit))
    checks.check_length(call.length, call.a)
    if call.cu_seqlens is not None:
        check_packed_row(call.cu_seqlens, call.longest, call.a)
        if call.length is not None:
            raise ValueError("length: got a tensor beside cu_seqlens, needs None")
    if call.groups < 0:
        raise ValueError(f"groups: got {call.groups}, needs at least 0")


class RoundStateCall(NamedTuple):
    """A state in 8 bits: the numbers of a row in 127 steps of the largest. On CUDA this is one kernel. No gradients.

    Args:
        state: [B, H, K, V] float32 or float64.

    Returns:
        Integers of -127 to 127 [B, H, K, V] int8 and the scale of each row [B, H, K], in the dtype of the state.

    Raises:
        ValueError: gradients are required.
        TypeError: a state of integers.
    """

    state: Tensor


def check_round_state(call: RoundStateCall) -> None:
    """Check the argument of a call; raises ValueError or TypeError."""
    checks.require_float("state", call.state)
    checks.refuse_gradients("round_state", "the state as it is", call.state)


class GroupStepCall(NamedTuple):
    """Puts the next token of each sequence into a packed cache, as `packed_step_`, and mixes what it attends to with
    what it reads from a state of what has left that window. No gradients.

        read = D^-0.5 * normalised(rotated(q))^T S;  o = `window_mixture` of both

    If the token begins a group, the group that is N + 1 before it leaves: first its tokens, but no sinks, are written
    into S by `chunk_gated_delta_rule`, with the gates that waited for them. Those of the token, g = -exp(A_log)
    softplus(a + dt_bias) and beta = max_strength sigmoid(b), take their place. S, its scales, the gates and the cache
    change in place. On CUDA these are four kernels, one more than of `packed_step_`.

    Args:
        a, b: logits of the token's gates [B, 1, H]; A_log, dt_bias: [H].
        token: q, k, v, cache and rotation, of a window of N > 0 whole groups before that of the token, whose key heads
            divide the H states; without pages.
        g, beta: the gates that wait [B, 32 (N + 1), H] bfloat16, token n in the place n % (32 (N + 1)). With
            `state_indices` of the token, rows of g, beta, S and its scales are those of the cache.
        state: S [B, H, D, D], or with state_scale its numbers int8 in units of the scale of their row.
        state_scale: [B, H, D] float32; with it S is rounded whenever a group has been written.
        share_logit: [B, 1, HQ]; far_slope, near_slope: [HQ].
        z, norm_weight, eps: as for `window_mixture`.
        max_strength: the greatest beta, 1 or 2.

    Returns:
        o [B, 1, HQ, D] in the dtype of q.

    Raises:
        ValueError: shapes, head counts or a window that do not fit, or gradients are required.
        TypeError: dtypes that do not fit.
    """

    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor
    token: PackedStepCall
    g: Tensor
    beta: Tensor
    state: Tensor
    state_scale: Tensor | None
    share_logit: Tensor
    far_slope: Tensor
    near_slope: Tensor
    z: Tensor | None = None
    norm_weight: Tensor | None = None
    eps: float = 1e-6
    max_strength: int = 1

    @property
    def places(self) -> int:
        """The tokens that one which begins a group sees, itself and the sinks included."""
        return GROUP * self.token.cache.groups + 1 + self.token.sinks

    def mixture(self, window_output: Tensor, lse: Tensor, read: Tensor) -> WindowMixtureCall:
        """That of the window's and the state's outputs, with the token in the cache."""
        lengths, rows = self.token.cache.lengths, self.token.state_indices
        numbers = (lengths if rows is None else lengths[rows]).unsqueeze(1)
        mixing = window_output, lse, read, self.share_logit, self.far_slope, self.near_slope
        return WindowMixtureCall(*mixing, self.places, None, numbers, self.z, self.norm_weight, self.eps, GROUP)


KEPT = ("g", "beta", "state", "state_scale")
"""Arguments that a step changes beside the cache."""


def check_group_step(call: GroupStepCall) -> None:
    """Check the arguments of a call; raises ValueError or TypeError."""
    token, state = call.token, call.state
    check_packed_step(token)
    q, (rows, HK, groups, D), H = token.q, token.cache.key_scales.shape, state.shape[1]
    if groups < 1 or H % HK or q.shape[2] % H:
        raise ValueError(
            f"got {q.shape[2]} query heads, {H} states, {HK} key heads and {groups} groups; each number of heads "
            "needs to divide the one before, and a group to be there"
        )
    if (token.window, token.edge) != (GROUP * groups + 1, GROUP) or token.pages is not None:
        raise ValueError(
            f"got window={token.window} and edge={token.edge} of {groups} groups, needs {GROUP * groups + 1} and "
            f"{GROUP}, and no pages"
        )
    dims = {"a": "B 1 H", "b": "B 1 H", "A_log": "H", "dt_bias": "H", "g": "R P H", "beta": "R P H"}
    dims |= {"state": "R H D D", "state_scale?": "R H D"}
    sizes = {"B": len(q), "H": H, "R": rows, "P": GROUP * (groups + 1), "D": D}
    dtypes = dict.fromkeys(("g", "beta"), (torch.bfloat16,)) | {"state": (torch.int8, *checks.FLOATS)}
    checks.check_tensors(call, dims, sizes, dtypes=dtypes)
    if (state.dtype == torch.int8) != (call.state_scale is not None):
        raise TypeError(f"state: got dtype {state.dtype}, needs torch.int8 with a state_scale and only then")
    if call.max_strength not in (1, 2):
        raise ValueError(f"max_strength: got {call.max_strength!r}, needs 1 or 2")
    check_window_mixture(call.mixture(q, q.new_empty(q.shape[:3], dtype=torch.float32), q))
    checks.refuse_gradients("group_gated_delta_step_", "chunk_group_gated_delta_rule", call.a, call.b)
