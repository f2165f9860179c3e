"""The linear systems of the Mesa layer, (H_t + diag(Lambda)) x_t = q_t for all tokens at once, by conjugate gradients.

The matrices are never formed. Within a chunk with the matrix H before it, the keys k_s and the weights
w_ts = beta_s e^{g_{s+1} + ... + g_t} for s <= t,

    (H_t + diag(Lambda)) x = e^{G_t} H x + sum_s w_ts k_s (k_s . x) + Lambda * x

which is the chunk form of linear attention with the keys as values, so one product serves all tokens.

With y_t = (H_t + diag(Lambda))^{-1} dx_t, the gradient of q_t is y_t, and that of the matrix is -y_t x_t^T. The
backward therefore solves once more with the same matrices instead of differentiating through the steps.

Shapes: N chunks and states, C tokens, rows = R*C queries, K key size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deltanet_kernels.common.device import no_autocast

STEPS = 16  # with ridges of at least 0.25 the residual is then below 1e-5 of q
RESIDUAL = 4.0  # a row is solved once its residual is below this many roundings of its right side


class MesaSystem(NamedTuple):
    """The matrices of the rows; without `keys`, e^{G} = 1 and `state` is complete."""

    state: Tensor  # H [N, K, K]
    ridge: Tensor  # [N, 1, K]
    keys: Tensor | None = None  # [N, C, K]
    weight: Tensor | None = None  # w [N, rows, C]
    decay: Tensor | None = None  # e^{G} [N, rows, 1]

    def times(self, x: Tensor) -> Tensor:
        """Each row of x [N, rows, K] times its matrix."""
        y = x @ self.state.mT
        if self.keys is not None:
            assert self.decay is not None
            assert self.weight is not None
            y = self.decay * y + ((x @ self.keys.mT) * self.weight) @ self.keys
        return y + self.ridge * x

    def diagonal(self) -> Tensor:
        """[N, rows, K] (rows = 1 without keys)."""
        found = self.state.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)
        if self.keys is not None:
            assert self.decay is not None
            assert self.weight is not None
            found = self.decay * found + self.weight @ self.keys.square()
        return found + self.ridge


@torch.no_grad()
def conjugate_gradients(system: MesaSystem, right: Tensor, steps: int) -> Tensor:
    """x [N, rows, K] with system x = right, after `steps` steps; rows stop one by one as they are solved.

    The floor of the residual is relative to the right side: an absolute one would stall small queries.
    """
    tiny = torch.finfo(right.dtype).tiny
    floor = (RESIDUAL * torch.finfo(right.dtype).eps) ** 2 * right.square().sum(-1, keepdim=True)
    x = right / system.diagonal()
    residual = right - system.times(x)
    direction, size = residual, residual.square().sum(-1, keepdim=True)
    watched = (
        not x.is_cuda and not torch.compiler.is_compiling()
    )  # elsewhere a look at the residuals would wait for them
    for _ in range(steps):
        going = size > floor
        if watched and not bool(going.any()):
            break
        image = system.times(direction)
        length = torch.where(going, size / (direction * image).sum(-1, keepdim=True).clamp_min(tiny), 0.0)
        x = torch.addcmul(x, length, direction)
        residual = torch.addcmul(residual, length, image, value=-1)
        before, size = size, residual.square().sum(-1, keepdim=True)
        direction = torch.addcmul(residual, torch.where(going, size / before.clamp_min(tiny), 0.0), direction)
    return x


class _Solve(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, right: Tensor, state: Tensor, ridge: Tensor, keys: Tensor, weight: Tensor, decay: Tensor, steps: int
    ) -> Tensor:
        x = conjugate_gradients(MesaSystem(state, ridge, keys, weight, decay), right, steps)
        ctx.steps = steps
        ctx.save_for_backward(x, state, ridge, keys, weight, decay)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, state, ridge, keys, weight, decay = ctx.saved_tensors
        with no_autocast(x.device):
            y = conjugate_gradients(MesaSystem(state, ridge, keys, weight, decay), dx, ctx.steps)
            x_keys, y_keys = x @ keys.mT, y @ keys.mT
            dkeys = -((weight * x_keys).mT @ y + (weight * y_keys).mT @ x)
            dstate = -(decay * y).mT @ x
            ddecay = -(y * (x @ state.mT)).sum(-1, keepdim=True)
            dridge = -(x * y).sum(-2, keepdim=True)
        return y, dstate, dridge, dkeys, -x_keys * y_keys, ddecay, None


def solve_mesa(system: MesaSystem, right: Tensor, steps: int) -> Tensor:
    """x [N, rows, K] with system x = right; differentiable once in everything, the system with keys."""
    return _Solve.apply(right, *system, steps)  # type: ignore[no-any-return]
