"""The solve of DeltaFormer in PyTorch, block of rows by block of rows, on any device.

With P the strictly lower triangular softmax of keys with keys, U = V - beta (P U) is (I + beta P) U = V. A block of C
rows reads the values before it by one matrix product, and its own by a triangular solve of size C. The backward pass
goes over the blocks in the reverse order and computes P again, so that no more than C rows of it are in memory:

    (I + beta P)^T dV = dU        d beta = -dV . (P U)        dP = -beta dV U^T
"""

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from deltanet_kernels.checks import check_tensors
from deltanet_kernels.signatures import by_arguments

BLOCK = 128  # rows of the softmax that are in memory


class DeltaFormerCall(NamedTuple):
    """One call of the solve; `deltaformer_solve` documents the fields."""

    k: torch.Tensor
    v: torch.Tensor
    beta: torch.Tensor
    scale: float | None = None
    past_k: torch.Tensor | None = None
    past_u: torch.Tensor | None = None
    mask: torch.Tensor | None = None


@by_arguments(DeltaFormerCall)
def deltaformer_solve(call: DeltaFormerCall) -> torch.Tensor:
    """The corrected values of DeltaFormer: u_t = v_t - beta_t sum over s < t of softmax_s(scale k_t . k_s) u_s.

    The first token of a sequence, which sees no other, has u = v. Computed in float32 (float64 for float64 inputs), in
    PyTorch on every device; differentiable in k, v, beta, past_k and past_u, once. Memory is proportional to T, time
    to T (S + T).

    Args:
        k: keys [B, T, H, D]; T >= 1.
        v: values [B, T, H, V].
        beta: strengths [B, T, H], 0 to 1. With the softmax, |u| then grows by at most |v| per token.
        scale: factor of the scores, D**-0.5 by default.
        past_k, past_u: keys [B, S, H, D] and corrected values [B, S, H, V] of the tokens before; both or neither.
        mask: [B or 1, T, S + T] bool, False where a token may not see another; None for all before it. A token never
            sees itself or later ones.

    Returns:
        u [B, T, H, V] in the dtype of v.

    Raises:
        ValueError: shapes that do not fit, or only one of past_k and past_u.
        TypeError: a mask that is not bool.
    """
    _check(call)
    k, v, beta, scale, past_k, past_u, mask = call
    dtype = torch.promote_types(v.dtype, torch.float32)
    factor = k.shape[-1] ** -0.5 if scale is None else scale
    keys = k if past_k is None else torch.cat([past_k, k], dim=1)
    before = v[:, :0] if past_u is None else past_u
    keys, values, before = (x.transpose(1, 2).to(dtype) for x in (keys, v, before))
    strength = beta.transpose(1, 2).to(dtype)
    rows = None if mask is None else mask.unsqueeze(1)
    with torch.autocast(k.device.type, enabled=False):
        u: torch.Tensor = _Solve.apply(keys, values, strength, before, rows, factor)
    return u.transpose(1, 2).to(v.dtype)


def _check(call: DeltaFormerCall) -> None:
    if (call.past_k is None) != (call.past_u is None):
        raise ValueError("past_k, past_u: got one of the two; give both or neither")
    dims = {"k": "B T H D", "v": "B T H V", "beta": "B T H", "past_k?": "B S H D", "past_u?": "B S H V"}
    past = 0 if call.past_k is None else call.past_k.shape[1]
    sizes = check_tensors(call, dims, {"S": past})
    rows = "1" if getattr(call.mask, "shape", ())[:1] == (1,) else "B"
    sizes["S+T"] = past + sizes["T"]
    check_tensors(call, {"k": "B T H D", "mask?": f"{rows} T S+T"}, sizes, dtypes={"mask": (torch.bool,)})


class _Solve(torch.autograd.Function):
    """`deltaformer_solve` with the heads before the tokens: keys [B, H, S + T, D], all others likewise."""

    @staticmethod
    def forward(
        ctx: Any,
        keys: torch.Tensor,
        v: torch.Tensor,
        beta: torch.Tensor,
        past: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float,
    ) -> torch.Tensor:
        first, length = past.shape[2], v.shape[2]
        beta = beta.unsqueeze(-1)
        u = torch.cat([past, torch.empty_like(v)], dim=2)
        read = torch.empty_like(v)  # P U
        norm = torch.empty_like(beta)  # log-sum-exp of the scores
        for start in range(0, length, BLOCK):
            own = slice(start, min(start + BLOCK, length))
            scores = _scores(keys, mask, scale, first, own)
            norm[:, :, own] = scores.logsumexp(-1, keepdim=True)
            weights = _weights(scores, norm[:, :, own])
            far, near = weights[..., : first + start], weights[..., first + start :]
            read[:, :, own] = far @ u[:, :, : first + start]
            rest = v[:, :, own] - beta[:, :, own] * read[:, :, own]
            solved = torch.linalg.solve_triangular(beta[:, :, own] * near, rest, upper=False, unitriangular=True)
            u[:, :, first + own.start : first + own.stop] = solved
            read[:, :, own] += near @ solved
        ctx.save_for_backward(keys, beta, u, read, norm, mask)
        ctx.scale = scale
        return u[:, :, first:].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, du: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        keys, beta, u, read, norm, mask = ctx.saved_tensors
        length = du.shape[2]
        first = u.shape[2] - length
        later = torch.zeros_like(u)  # (beta P)^T dV of the rows that are done
        dkeys, dv = torch.zeros_like(keys), torch.empty_like(du)
        for start in reversed(range(0, length, BLOCK)):
            own = slice(start, min(start + BLOCK, length))
            rows = slice(first + own.start, first + own.stop)
            weights = _weights(_scores(keys, mask, ctx.scale, first, own), norm[:, :, own])
            far, near = weights[..., : rows.start], weights[..., rows.start :]
            rest = du[:, :, own] - later[:, :, rows]
            matrix = (beta[:, :, own] * near).mT
            dv[:, :, own] = torch.linalg.solve_triangular(matrix, rest, upper=True, unitriangular=True)
            pull = beta[:, :, own] * dv[:, :, own]
            later[:, :, : rows.start] += far.mT @ pull
            # dP = -pull U^T, and the gradient of the scores is P (dP - sum over s of P dP).
            dscores = (pull * read[:, :, own]).sum(-1, keepdim=True) - pull @ u[:, :, : rows.stop].mT
            dscores = dscores * weights * ctx.scale
            dkeys[:, :, rows] += dscores @ keys[:, :, : rows.stop]
            dkeys[:, :, : rows.stop] += dscores.mT @ keys[:, :, rows]
        return dkeys, dv, -(dv * read).sum(-1), -later[:, :, :first], None, None


def _scores(keys: torch.Tensor, mask: torch.Tensor | None, scale: float, first: int, own: slice) -> torch.Tensor:
    """Scores [B, H, C, S + own.stop] of the rows `own`, -inf for what they do not see."""
    start, stop = first + own.start, first + own.stop
    scores = keys[:, :, start:stop] @ keys[:, :, :stop].mT * scale
    place = torch.arange(stop, device=keys.device)
    seen = place < place[start:, None]
    if mask is not None:
        seen = seen & mask[:, :, own, :stop]
    return scores.masked_fill(~seen, -torch.inf)


def _weights(scores: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """The softmax; rows that see nothing are 0."""
    return (scores - norm.clamp_min(torch.finfo(norm.dtype).min)).exp()
