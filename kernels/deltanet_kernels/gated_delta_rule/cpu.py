"""The chunked gated delta rule in plain PyTorch: the CPU path, differentiable, computed in float32.

Within a chunk of C tokens, with G the inclusive sum of g over the chunk, D_ij = e^{G_i - G_j} for i >= j else
0, and L = tril(beta * D * K K^T, -1), the C rank-one updates of the recurrence are one unit triangular system

    (I + L) V' = W,   W = beta * (V - e^G * (K S))          (values minus what the state already predicts)
    O = scale * (e^G * (Q S) + (D * Q K^T) V')              S <- e^{G_C} S + K^T (e^{G_C - G} * V')

(the UT transform of Yang et al., arXiv 2406.06484, with the gate of arXiv 2412.06464). `erase` changes L and W
only. "undecayed": L has e^{G_{i-1} - G_j} and W e^{G_{i-1}} in row i. "off": L = 0, W = beta V. Only S and V'
of each chunk are kept for the backward, which solves the transposed system instead of differentiating through
the inverse and recomputes everything else. Chunks are processed in blocks: everything that does not depend on S
is computed for all chunks of a block at once, and the loop over chunks contains a few small products.
"""

from itertools import pairwise
from typing import Any

import torch

from deltanet_kernels import checks
from deltanet_kernels.arguments import RuleCall
from deltanet_kernels.common.device import no_autocast
from deltanet_kernels.dispatch import by_arguments
from deltanet_kernels.gated_delta_rule.cpu_backward import backward
from deltanet_kernels.gated_delta_rule.cpu_forward import CHUNK, Sizes, forward
from deltanet_kernels.gated_delta_rule.drop_in import through_plain
from deltanet_kernels.gated_delta_rule.reference import log_decay_and_strength


# Registered as operators so that torch.compile does not trace into them.
@torch.library.custom_op("deltanet_kernels::torch_chunk_forward", mutates_args=())
def _forward_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None,
    scale: float,
    normalize: bool,
    keep: bool,
    erase: str = "decayed",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`forward`; g is the log decay and beta the write strength."""
    with no_autocast(q.device):
        return forward(Sizes.of(q, k, v, scale, normalize, erase), q, k, v, g, beta, state, keep)


@_forward_op.register_fake
def _forward_fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None,
    scale: float,
    normalize: bool,
    keep: bool,
    erase: str = "decayed",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    s = Sizes.of(q, k, v, scale, normalize, erase)
    chunks = (s.T + CHUNK - 1) // CHUNK if keep else 0
    return (
        v.new_empty(s.B, s.T, s.R * s.HV, s.V),
        v.new_empty(s.B, s.HV, s.K, s.V, dtype=s.dtype),
        v.new_empty(chunks * s.N, s.K, s.V, dtype=s.dtype),
        v.new_empty(s.T * s.N if keep else 0, s.V, dtype=s.dtype),
    )


@torch.library.custom_op("deltanet_kernels::torch_chunk_backward", mutates_args=())
def _backward_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    values: torch.Tensor,
    do: torch.Tensor,
    dfinal: torch.Tensor,
    scale: float,
    normalize: bool,
    erase: str,
    gates_only: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v, g, beta and the initial state; see `backward`."""
    with no_autocast(q.device):
        s = Sizes.of(q, k, v, scale, normalize, erase)
        grads, dstate = backward(s, (q, k, v, g, beta), states, values, do, dfinal, gates_only)
    return (*grads, dstate)


@_backward_op.register_fake
def _backward_fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    values: torch.Tensor,
    do: torch.Tensor,
    dfinal: torch.Tensor,
    scale: float,
    normalize: bool,
    erase: str,
    gates_only: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    dq, dk, dv = (x.new_empty((0,) if gates_only else x.shape) for x in (q, k, v))
    dg, dbeta = g.new_empty(g.shape), beta.new_empty(beta.shape)
    return dq, dk, dv, dg, dbeta, dfinal.new_empty(dfinal.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, g, beta, state, scale, normalize, _, erase = inputs
    ctx.has_state = state is not None
    ctx.rule = (scale, normalize, erase)
    ctx.save_for_backward(q, k, v, g, beta, *output[2:])


def _autograd(ctx: Any, do: torch.Tensor, dfinal: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    gates_only = not any(ctx.needs_input_grad[:3])
    dq, dk, dv, dg, dbeta, dstate = _backward_op(*ctx.saved_tensors, do, dfinal, *ctx.rule, gates_only)
    inputs = (None, None, None) if gates_only else (dq, dk, dv)
    return (*inputs, dg, dbeta, dstate if ctx.has_state else None, None, None, None, None)


_forward_op.register_autograd(_autograd, setup_context=_setup_context)


def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None,
    scale: float,
    normalize: bool,
    erase: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    needs_grad = any(x is not None and x.requires_grad for x in (q, k, v, g, beta, state))
    keep = needs_grad and torch.is_grad_enabled()
    o, final, _, _ = _forward_op(q, k, v, g, beta, state, scale, normalize, keep, erase)
    return o, final


@by_arguments(RuleCall)
def torch_chunk_gated_delta_rule(call: RuleCall) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The chunked form in plain PyTorch, on any device; float32 inside (float64 for float64 inputs).

    Arguments, results and errors as `deltanet_kernels.chunk_gated_delta_rule`.
    """
    return chunked(call) if checks.check_delta_rule(call, drop_in=True) else through_plain(chunked, call, call.q.dtype)


def chunked(call: RuleCall) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`torch_chunk_gated_delta_rule` for checked arguments."""
    q, k, v, normalize = call.q, call.k, call.v, call.use_qk_l2norm_in_kernel
    dtype = torch.promote_types(q.dtype, torch.float32)
    g, beta = log_decay_and_strength(
        call.g, call.beta, call.A_log, call.dt_bias, call.use_beta_sigmoid_in_kernel, dtype
    )  # fmt: skip
    if call.cu_seqlens is None:
        o, final = _run(q, k, v, g, beta, call.initial_state, call.factor, normalize, call.erase)
    else:
        state = call.initial_state
        if state is None:
            dims = call.dims
            state = torch.zeros(dims.N, dims.HV, dims.K, dims.V, dtype=dtype, device=q.device)
        offsets = call.cu_seqlens.tolist()
        o, final = _run_packed(q, k, v, g, beta, state, call.factor, normalize, call.erase, offsets)
    return o, final if call.output_final_state else None


def _run_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    scale: float,
    normalize: bool,
    erase: str,
    offsets: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed sequences: those with equal numbers of chunks run as one batch, shorter rows padded with beta = 0."""
    device = q.device
    tokens = (q, k, v, g, beta)
    groups: dict[int, list[int]] = {}
    for n, (start, end) in enumerate(pairwise(offsets)):
        groups.setdefault(-(-(end - start) // CHUNK), []).append(n)

    outputs: list[torch.Tensor] = []  # rows of all groups, [rows, HO, V]
    states: list[torch.Tensor] = []
    order: list[int] = []  # sequence of every entry of `states`
    where = torch.full((q.shape[1],), -1, dtype=torch.long)  # row in `outputs` of every token
    rows = 0
    for chunks, members in groups.items():
        order += members
        first_state = state.index_select(0, torch.tensor(members, device=device))
        if chunks == 0:
            states.append(first_state)
            continue
        if len(members) == 1:
            start, end = offsets[members[0]], offsets[members[0] + 1]
            width = end - start
            parts = [x[:, start:end] for x in tokens]
            where[start:end] = rows + torch.arange(width)
        else:
            begin = torch.tensor([[offsets[n]] for n in members])
            length = torch.tensor([[offsets[n + 1]] for n in members]) - begin
            width = int(length.max())
            column = torch.arange(width)
            index = begin + torch.minimum(column, length - 1)  # [n, width]; padding repeats the last token
            valid = column < length
            where[index[valid]] = rows + torch.arange(index.numel()).view_as(index)[valid]
            flat, mask = index.flatten().to(device), valid.to(device).unsqueeze(-1)
            parts = [x[0].index_select(0, flat).unflatten(0, index.shape) for x in tokens]
            parts[3:] = (torch.where(mask, x, 0.0) for x in parts[3:])
        q_, k_, v_, g_, beta_ = parts
        o, final = _run(q_, k_, v_, g_, beta_, first_state, scale, normalize, erase)
        outputs.append(o.flatten(0, 1))
        states.append(final)
        rows += len(members) * width
    outputs.append(v.new_zeros(1, max(q.shape[2], v.shape[2]), v.shape[3]))
    where[where < 0] = rows
    o = torch.cat(outputs).index_select(0, where.to(device)).unsqueeze(0)
    back = torch.argsort(torch.tensor(order)).to(device)
    return o, torch.cat(states).index_select(0, back)
