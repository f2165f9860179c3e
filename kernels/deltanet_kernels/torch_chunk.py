"""The gated delta rule by chunks in plain PyTorch: the path of CPU tensors, differentiable, float32 inside.

Inside a chunk of C tokens, with G the inclusive sum of g over the chunk, D_ij = e^{G_i - G_j} for i >= j else
0, and L = tril(beta * D * K K^T, -1), the C rank-one updates of the recurrence are one unit triangular system

    (I + L) V' = W,   W = beta * (V - e^G * (K S))          (values, less what the state already predicts)
    O = scale * (e^G * (Q S) + (D * Q K^T) V')              S <- e^{G_C} S + K^T (e^{G_C - G} * V')

(the UT transform of Yang et al., arXiv 2406.06484, with the gate of arXiv 2412.06464). Only S and V' of each
chunk are kept for the backward, which solves the transposed system instead of differentiating through the
inverse and recomputes everything else. Chunks are worked on in blocks: everything that does not need S is
done for a whole block at once, the loop over chunks holds a few small products.

Shapes inside a block of M chunks: N = batch * states per row, R query heads share one state, so that
q [M, N, R*C, K], k [M, N, C, K], v [M, N, C, V], gates [M, N, C], S [M, N, K, V].
"""

from itertools import pairwise
from typing import Any, NamedTuple

import torch

from deltanet_kernels import checks
from deltanet_kernels.reference import L2_EPS, log_decay_and_strength

CHUNK = 64
# Chunk-and-head matrices per block: enough to amortise the call of an operator, few enough for the cache.
BLOCK_MATRICES = 32
# e^g is 0 below this in float64 too; a finite floor keeps differences of g = -inf defined.
MIN_LOG_DECAY = -1000.0


class _Sizes(NamedTuple):
    """Sizes and settings of one call of the core."""

    B: int
    T: int
    H: int
    HQ: int
    HV: int
    K: int
    V: int
    R: int
    scale: float
    normalize: bool
    dtype: torch.dtype

    def blocks(self) -> list[tuple[int, int, int]]:
        """(first token, number of chunks, chunk length) of every block."""
        whole = self.T // CHUNK
        step = max(1, BLOCK_MATRICES // (self.B * self.HV))
        found = [(c * CHUNK, min(step, whole - c), CHUNK) for c in range(0, whole, step)]
        if self.T % CHUNK:
            found.append((whole * CHUNK, 1, self.T % CHUNK))
        return found


class _Prepared(NamedTuple):
    """What a block needs besides the state; shapes in the file's header."""

    q: torch.Tensor
    k: torch.Tensor
    inv_q: torch.Tensor | None  # 1/|q|, 1/|k| per row when normalised
    inv_k: torch.Tensor | None
    beta: torch.Tensor
    gamma: torch.Tensor  # e^G
    rev: torch.Tensor  # e^{G_C - G}
    last: torch.Tensor  # e^{G_C} [M, N, 1, 1]
    decay: torch.Tensor  # D [M, N, C, C]
    gram: torch.Tensor  # D * K K^T [M, N, C, C]
    scores: torch.Tensor  # D * Q K^T [M, N, R*C, C]
    inverse: torch.Tensor  # (I + L)^-1 [M, N, C, C]
    q_in: torch.Tensor  # gamma * q
    k_in: torch.Tensor  # beta * gamma * k
    k_out: torch.Tensor  # rev * k


def _by_chunk(x: torch.Tensor, start: int, M: int, C: int, dtype: torch.dtype) -> torch.Tensor:
    """[B, T, H, *] -> an own, contiguous [M, B, H, C, *] in `dtype`."""
    rows = x[:, start : start + M * C].unflatten(1, (M, C))
    rows = rows.permute(1, 0, 3, 2, 4) if x.dim() == 4 else rows.permute(1, 0, 3, 2)
    out = torch.empty(rows.shape, dtype=dtype, device=x.device)
    return out.copy_(rows)


def _from_chunk(x: torch.Tensor, out: torch.Tensor, start: int, M: int, C: int) -> None:
    """Write [M, B, H, C, *] into out[:, start : start + M*C] of [B, T, H, *]."""
    rows = out[:, start : start + M * C].unflatten(1, (M, C))
    rows.copy_(x.permute(1, 0, 3, 2, 4) if out.dim() == 4 else x.permute(1, 0, 3, 2))


def _repeat_heads(x: torch.Tensor, times: int) -> torch.Tensor:
    """[M, B, H, C, D] -> [M, B, H*times, C, D], each head `times` in a row."""
    return x if times == 1 else x.repeat_interleave(times, dim=2)


def _normalize_(x: torch.Tensor) -> torch.Tensor:
    inv = x.square().sum(-1, keepdim=True).add_(L2_EPS).rsqrt_()
    x.mul_(inv)
    return inv


def _normalize_backward_(dx: torch.Tensor, unit: torch.Tensor, inv: torch.Tensor) -> torch.Tensor:
    """Gradient of the raw rows, from the gradient dx of unit = inv * raw."""
    along = (unit * dx).sum(-1, keepdim=True)
    return dx.addcmul_(unit, along, value=-1.0).mul_(inv)


def _prepare(
    s: _Sizes,
    q: torch.Tensor,
    k: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    start: int,
    M: int,
    C: int,
) -> _Prepared:
    N = s.B * s.HV
    q_ = _by_chunk(q, start, M, C, s.dtype)
    k_ = _by_chunk(k, start, M, C, s.dtype)
    inv_q = _normalize_(q_) if s.normalize else None
    inv_k = _normalize_(k_) if s.normalize else None
    q_ = _repeat_heads(q_, s.HV // s.HQ if s.HQ < s.HV else 1).view(M, N, s.R * C, s.K)
    k_ = _repeat_heads(k_, s.HV // s.H).view(M, N, C, s.K)
    beta_ = _by_chunk(beta, start, M, C, s.dtype).view(M, N, C)

    # Summed in float64: beside a shut gate (g = -200) float32 sums would lose the digits of the open ones.
    G = _by_chunk(g, start, M, C, torch.float64).view(M, N, C).clamp_(min=MIN_LOG_DECAY).cumsum(-1)
    total = G[..., -1:]
    gamma = G.exp().to(s.dtype)
    rev = (total - G).exp_().to(s.dtype)
    last = total.exp().to(s.dtype).unsqueeze(-1)
    future = torch.full((C, C), float("-inf"), dtype=s.dtype, device=q.device).triu_(1)
    decay = (G.unsqueeze(-1) - G.unsqueeze(-2)).to(s.dtype).add_(future).exp_()

    gram = torch.matmul(k_, k_.transpose(-1, -2)).mul_(decay)
    scores = torch.matmul(q_, k_.transpose(-1, -2))
    scores.view(M, N, s.R, C, C).mul_(decay.unsqueeze(2))
    system = gram * beta_.unsqueeze(-1)  # the solver reads the strict lower triangle only
    eye = torch.eye(C, dtype=s.dtype, device=q.device).expand(M, N, C, C)
    inverse = torch.linalg.solve_triangular(system, eye, upper=False, unitriangular=True)
    q_in = (q_.view(M, N, s.R, C, s.K) * gamma[:, :, None, :, None]).view(M, N, s.R * C, s.K)
    k_in = k_ * (beta_ * gamma).unsqueeze(-1)
    k_out = k_ * rev.unsqueeze(-1)
    return _Prepared(
        q_, k_, inv_q, inv_k, beta_, gamma, rev, last, decay, gram, scores, inverse, q_in, k_in, k_out
    )


def _forward(
    s: _Sizes,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Output, final state, and (keep) the states and corrected values of every block."""
    N = s.B * s.HV
    o = torch.empty(s.B, s.T, s.R * s.HV, s.V, dtype=v.dtype, device=v.device)
    if state is None:
        current = torch.zeros(N, s.K, s.V, dtype=s.dtype, device=v.device)
    else:
        current = state.to(s.dtype).reshape(N, s.K, s.V)
    kept: list[torch.Tensor] = []
    for start, M, C in s.blocks():
        p = _prepare(s, q, k, g, beta, start, M, C)
        values = _by_chunk(v, start, M, C, s.dtype).view(M, N, C, s.V).mul_(p.beta.unsqueeze(-1))
        states = torch.empty(M, N, s.K, s.V, dtype=s.dtype, device=v.device)
        states[0] = current
        for m in range(M):
            wanted = values[m].baddbmm_(p.k_in[m], states[m], alpha=-1.0)
            corrected = torch.bmm(p.inverse[m], wanted)
            current = states[m + 1] if m + 1 < M else torch.empty_like(states[m])
            torch.mul(states[m], p.last[m], out=current)
            current.baddbmm_(p.k_out[m].transpose(1, 2), corrected)
            values[m] = corrected
        out = torch.bmm(p.q_in.flatten(0, 1), states.flatten(0, 1))
        out.baddbmm_(p.scores.flatten(0, 1), values.flatten(0, 1), beta=s.scale, alpha=s.scale)
        _from_chunk(out.view(M, s.B, s.HV * s.R, C, s.V), o, start, M, C)
        if keep:
            kept += [states, values]
    return o, current.view(s.B, s.HV, s.K, s.V), kept


class _ChunkGatedDeltaRule(torch.autograd.Function):
    """The core with its backward; gates and beta arrive as log decay and write strength."""

    @staticmethod
    def forward(
        ctx: Any,
        s: _Sizes,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        state: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        o, final, kept = _forward(s, q, k, v, g, beta, state, keep=True)
        ctx.sizes = s
        ctx.state_dtype = None if state is None else state.dtype
        ctx.save_for_backward(q, k, v, g, beta, *kept)
        return o, final

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: torch.Tensor, dfinal: torch.Tensor) -> tuple[Any, ...]:
        with no_autocast(do.device):
            grads, dstate = _backward(ctx.sizes, ctx.saved_tensors, do, dfinal)
        return None, *grads, None if ctx.state_dtype is None else dstate.to(ctx.state_dtype)


def _backward(
    s: _Sizes, saved: tuple[torch.Tensor, ...], do: torch.Tensor, dfinal: torch.Tensor
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Gradients of q, k, v, g, beta, and of the initial state."""
    q, k, v, g, beta, *kept = saved
    N = s.B * s.HV
    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v, g, beta)]
    dstate = dfinal.to(s.dtype).reshape(N, s.K, s.V)
    for index, (start, M, C) in reversed(list(enumerate(s.blocks()))):
        states, values = kept[2 * index], kept[2 * index + 1]
        p = _prepare(s, q, k, g, beta, start, M, C)
        dout = _by_chunk(do, start, M, C, s.dtype).mul_(s.scale).view(M, N, s.R * C, s.V)

        # The loop, last chunk first: dV' = rev * (K dS) + P^T dO;  dW = T^T dV';  dS of the chunk before.
        dvalues = torch.matmul(p.scores.transpose(-1, -2), dout)
        read = torch.matmul(p.q_in.transpose(-1, -2), dout)  # [M, N, K, V]
        dwanted = torch.empty_like(dvalues)
        dstates = torch.empty_like(states)  # gradient of the state after each chunk
        for m in reversed(range(M)):
            dstates[m] = dstate
            dvalues[m].baddbmm_(p.k_out[m], dstate)
            torch.bmm(p.inverse[m].transpose(1, 2), dvalues[m], out=dwanted[m])
            dstate = read[m].addcmul_(dstate, p.last[m])
            dstate.baddbmm_(p.k_in[m].transpose(1, 2), dwanted[m], alpha=-1.0)
        _backward_block(s, p, (start, M, C), v, states, values, dout, dwanted, dstates, grads)
    return grads, dstate.view(s.B, s.HV, s.K, s.V)


def _backward_block(
    s: _Sizes,
    p: _Prepared,
    block: tuple[int, int, int],
    v: torch.Tensor,
    states: torch.Tensor,
    values: torch.Tensor,
    dout: torch.Tensor,
    dwanted: torch.Tensor,
    dstates: torch.Tensor,
    grads: list[torch.Tensor],
) -> None:
    """Everything of a block that needs no loop, written into `grads` (of q, k, v, g, beta)."""
    start, M, C = block
    N = s.B * s.HV
    heads = (M, N, s.R, C)
    dgram = torch.matmul(dwanted, values.transpose(-1, -2)).tril_(-1)  # -dL
    dscores = torch.matmul(dout, values.transpose(-1, -2))
    pair = (dscores * p.scores).view(*heads, C).sum(2)  # gradient of G_i - G_j
    dscores.view(*heads, C).mul_(p.decay.unsqueeze(2))

    dq_in = torch.matmul(dout, states.transpose(-1, -2)).view(*heads, s.K).mul_(p.gamma[:, :, None, :, None])
    dG = (dq_in * p.q.view(*heads, s.K)).sum((2, -1))
    dq = dq_in.view(M, N, s.R * C, s.K).flatten(0, 1)
    dq.baddbmm_(dscores.flatten(0, 1), p.k.flatten(0, 1))

    dk_in = torch.matmul(dwanted, states.transpose(-1, -2))
    predicted = (dk_in * p.k).sum(-1) * p.gamma  # <dW, what the state predicts>
    dk_out = torch.matmul(values, dstates.transpose(-1, -2))
    written = (dk_out * p.k_out).sum(-1)
    dk = dk_out.mul_(p.rev.unsqueeze(-1)).addcmul_(dk_in, (p.beta * p.gamma).unsqueeze(-1), value=-1.0)
    dk = dk.flatten(0, 1).baddbmm_(dscores.transpose(-1, -2).flatten(0, 1), p.q.flatten(0, 1))
    inner = dgram * p.gram
    read = (dwanted * _by_chunk(v, start, M, C, s.dtype).view_as(dwanted)).sum(-1)
    dbeta = read - predicted - inner.sum(-1)
    pair.addcmul_(inner, p.beta.unsqueeze(-1), value=-1.0).tril_(-1)
    dgram.mul_(p.decay).mul_(p.beta.unsqueeze(-1))
    dk.baddbmm_((dgram + dgram.transpose(-1, -2)).flatten(0, 1), p.k.flatten(0, 1), alpha=-1.0)
    dv = dwanted.mul_(p.beta.unsqueeze(-1))

    dG += pair.sum(-1) - pair.sum(-2) - p.beta * predicted - written
    dG[..., -1] += written.sum(-1) + (dstates * states).sum((-1, -2)) * p.last[..., 0, 0]
    dg = dG.flip(-1).cumsum(-1).flip(-1)

    dq = dq.view(M, s.B, -1, C, s.K)
    dk = dk.view(M, s.B, s.HV, C, s.K)
    if s.HQ < s.HV:
        dq = dq.unflatten(2, (s.HQ, -1)).sum(3)
    if s.H < s.HV:
        dk = dk.unflatten(2, (s.H, -1)).sum(3)
    if p.inv_q is not None and p.inv_k is not None:
        unit_q, unit_k = p.q.view(M, s.B, -1, C, s.K), p.k.view(M, s.B, s.HV, C, s.K)
        dq = _normalize_backward_(dq, unit_q[:, :, :: unit_q.shape[2] // s.HQ], p.inv_q)
        dk = _normalize_backward_(dk, unit_k[:, :, :: s.HV // s.H], p.inv_k)
    _from_chunk(dq, grads[0], start, M, C)
    _from_chunk(dk, grads[1], start, M, C)
    _from_chunk(dv.view(M, s.B, s.HV, C, s.V), grads[2], start, M, C)
    _from_chunk(dg.view(M, s.B, s.HV, C), grads[3], start, M, C)
    _from_chunk(dbeta.view(M, s.B, s.HV, C), grads[4], start, M, C)


def no_autocast(device: torch.device) -> torch.autocast:
    """Autocast off: it would turn the float32 products into bfloat16 ones."""
    return torch.autocast(device.type, enabled=False)


def _run(
    s: _Sizes,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = (q, k, v, g, beta, state)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        result: tuple[torch.Tensor, torch.Tensor] = _ChunkGatedDeltaRule.apply(s, *inputs)
        return result
    return _forward(s, *inputs, keep=False)[:2]


def torch_chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The chunked form in plain PyTorch, on any device; float32 inside (float64 for float64 inputs).

    Arguments, results and errors as `deltanet_kernels.chunk_gated_delta_rule`.
    """
    dims = checks.check_delta_rule(
        q, k, v, g, beta, initial_state, cu_seqlens, A_log, dt_bias, use_gate_in_kernel
    )
    dtype = torch.promote_types(q.dtype, torch.float32)
    with no_autocast(q.device):
        g, beta = log_decay_and_strength(g, beta, A_log, dt_bias, use_beta_sigmoid_in_kernel, dtype)
        s = _Sizes(
            dims.B, dims.T, dims.H, dims.HQ, dims.HV, dims.K, dims.V, dims.HO // dims.HV,
            dims.K**-0.5 if scale is None else float(scale), use_qk_l2norm_in_kernel, dtype,
        )  # fmt: skip
        if cu_seqlens is None:
            o, final = _run(s, q, k, v, g, beta, initial_state)
        else:
            o, final = _run_packed(s, q, k, v, g, beta, initial_state, cu_seqlens.tolist())
    return o, final if output_final_state else None


def _run_packed(
    s: _Sizes,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None,
    offsets: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed sequences: those with equally many chunks run as one batch, short rows padded with beta = 0."""
    device = q.device
    if state is None:
        state = torch.zeros(len(offsets) - 1, s.HV, s.K, s.V, dtype=s.dtype, device=device)
    groups: dict[int, list[int]] = {}
    for n, (start, end) in enumerate(pairwise(offsets)):
        groups.setdefault(-(-(end - start) // CHUNK), []).append(n)

    outputs: list[torch.Tensor] = []  # rows of all groups, [rows, HO, V]
    states: list[torch.Tensor] = []
    order: list[int] = []  # sequence of every entry of `states`
    where = torch.full((s.T,), -1, dtype=torch.long)  # row in `outputs` of every token
    rows = 0
    for chunks, members in groups.items():
        order += members
        picked = torch.tensor(members, device=device)
        first_state = state.index_select(0, picked)
        if chunks == 0:
            states.append(first_state)
            continue
        lengths = [offsets[n + 1] - offsets[n] for n in members]
        width = max(lengths)
        length = torch.tensor(lengths).unsqueeze(1)
        begin = torch.tensor([offsets[n] for n in members]).unsqueeze(1)
        column = torch.arange(width)
        index = begin + torch.minimum(column, length - 1)  # [n, width], padding repeats the last token
        valid = column < length
        where[index[valid]] = rows + torch.arange(len(members) * width).view(-1, width)[valid]
        flat, mask = index.flatten().to(device), valid.to(device).unsqueeze(-1)
        q_, k_, v_, g_, beta_ = (
            x[0].index_select(0, flat).unflatten(0, index.shape) for x in (q, k, v, g, beta)
        )
        g_, beta_ = torch.where(mask, g_, 0.0), torch.where(mask, beta_, 0.0)
        o, final = _run(s._replace(B=len(members), T=width), q_, k_, v_, g_, beta_, first_state)
        outputs.append(o.flatten(0, 1))
        states.append(final)
        rows += len(members) * width
    outputs.append(v.new_zeros(1, s.R * s.HV, s.V))
    where[where < 0] = rows
    o = torch.cat(outputs).index_select(0, where.to(device)).unsqueeze(0)
    back = torch.argsort(torch.tensor(order)).to(device)
    return o, torch.cat(states).index_select(0, back)
