"""The chunked gated delta rule in plain PyTorch, backward; the algebra is in cpu.py.

With dS the gradient of the state after the chunk and dO that of the (unscaled) output, last chunk first:

    dV' = rev * (K dS) + Y^T dO          dW = (I + L)^-T dV'          dV = beta * dW
    dS <- e^{G_C} dS + Q^T (gamma * dO) - K^T (beta * gamma_p * dW)

and then, for all chunks of a block at once, with Y = D * Q K^T and A = D_p * K K^T:

    dY = dO V'^T                  dQ = gamma * (dO S^T) + (D * dY) K
    X = tril(dW V'^T, -1)         E = beta * D_p * X            (the gradient of L is -X)
    dK = rev * (V' dS^T) + (D * dY)^T Q - beta * gamma_p * (dW S^T) - (E + E^T) K
    dbeta = rowsum(dW * V) - gamma_p * rowsum((dW S^T) * K) - rowsum(X * A)

dg_t collects, for every factor e^{G_i - G_j} with i >= t > j, its value times its gradient; summing exactly
these terms, instead of differences of sums over i and over j, avoids cancellation. If the prediction is undecayed,
row i of A and of gamma_p holds e^{G_{i-1}}. Shapes as in cpu_forward.py.

Where only gates learn, as in the fit of a conversion, dg and dbeta are all that is computed: of dQ and dK they read
the terms that contain a state, and those within a chunk are left out.
"""

import torch

from deltanet_kernels.arguments import Upstream
from deltanet_kernels.common.device import no_autocast
from deltanet_kernels.common.registration import operator
from deltanet_kernels.gated_delta_rule.cpu_forward import (
    Block,
    CpuForward,
    Kept,
    Prepared,
    Sizes,
    Workspace,
    prepare,
)

DIFFERENTIATED = ("q", "k", "v", "g", "beta", "initial_state")
"""The fields of a call whose gradients `torch_chunk_backward` returns, in its order."""

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _fake_backward(upstream: Upstream, call: CpuForward, kept: Kept) -> Gradients:
    q, k, v = (x.new_empty((0,) if call.gates_only else x.shape) for x in call[:3])
    g, beta = (x.new_empty(x.shape) for x in call[3:5])
    s = Sizes.of(call)
    return q, k, v, g, beta, kept.states.new_empty(s.B, s.HV, s.K, s.V)


@operator(_fake_backward)
def torch_chunk_backward(upstream: Upstream, call: CpuForward, kept: Kept) -> Gradients:
    """Gradients of q, k, v (empty with `gates_only`), g, beta, and the initial state [B, HV, K, V]."""
    with no_autocast(call.q.device):
        return _backward(upstream, call, kept)


def _backward(upstream: Upstream, call: CpuForward, kept: Kept) -> Gradients:
    s, grads, (do, dfinal) = Sizes.of(call), _fake_backward(upstream, call, kept), upstream
    N, v = s.N, call.v
    ws = Workspace(s.dtype, v.device)
    current = grads[5].view(N, s.K, s.V)
    current.copy_(dfinal.reshape(N, s.K, s.V)) if dfinal is not None else current.zero_()
    for block in reversed(s.blocks()):
        _, M, C = block
        states, values = block.kept(s, *kept)
        p = prepare(s, block, ws, call)
        dout = ws.get("dout", M, s.B, s.HV * s.R, C, s.V).copy_(block.view(do)).view(M * N, s.R * C, s.V)
        dout.mul_(p.inv_q * s.scale)
        dout_in = ws.get("dout_in", M * N, s.R * C, s.V)
        heads = (M * N, s.R, C, s.V)
        torch.mul(dout.view(heads), p.gamma.unsqueeze(1), out=dout_in.view(heads))

        dvalues = torch.bmm(p.scores.mT, dout, out=ws.get("dvalues", M * N, C, s.V))
        dread = torch.bmm(p.q.mT, dout_in, out=ws.get("dread", M * N, s.K, s.V))
        dwanted = ws.get("dwanted", M * N, C, s.V)
        dstates = ws.get("dstates", M * N, s.K, s.V)  # gradient of the state after each chunk
        factor = p.beta * p.gamma_p
        rows_v = ws.get("rows_v", N, C, s.V)
        dstates[(M - 1) * N :] = current
        dS_of, dV_of, dW_of = (current, *dstates.split(N)), dvalues.split(N), dwanted.split(N)
        k_of, read_of = p.k.split(N), dread.split(N)
        T_of = p.inverse.split(N) if s.reads else ()
        rev_of, factor_of, last_of = p.rev.split(N), factor.split(N), p.last.split(N)
        for m in reversed(range(M)):
            dS = dS_of[m + 1]
            dV_of[m].addcmul_(torch.bmm(k_of[m], dS, out=rows_v), rev_of[m])
            if s.reads:
                torch.bmm(T_of[m].mT, dV_of[m], out=dW_of[m])
            else:
                dW_of[m].copy_(dV_of[m])
            torch.addcmul(read_of[m], dS, last_of[m], out=dS_of[m])
            if s.reads:
                torch.mul(dW_of[m], factor_of[m], out=rows_v)
                dS_of[m].baddbmm_(k_of[m].mT, rows_v, alpha=-1.0)
        _parallel(s, block, ws, p, call, states, values, dout, dout_in, dwanted, dstates, grads)
    return grads


def _parallel(
    s: Sizes,
    block: Block,
    ws: Workspace,
    p: Prepared,
    call: CpuForward,
    states: torch.Tensor,
    values: torch.Tensor,
    dout: torch.Tensor,
    dout_in: torch.Tensor,
    dwanted: torch.Tensor,
    dstates: torch.Tensor,
    grads: Gradients,
) -> None:
    """Compute the gradients of a block that require no loop over chunks, into `grads`."""
    v, gates_only = call.v, call.gates_only
    grad_q, grad_k, grad_v, grad_g, grad_beta, _ = grads
    _, M, C = block
    n = M * s.N

    def row_dot(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.mul(x, y, out=ws.get("product", *x.shape)).sum(-1, keepdim=True)

    # Inside the chunk. `pair` is the gradient of G_i - G_j.
    dscores = torch.bmm(dout, values.mT, out=ws.get("dscores", n, s.R * C, C))
    pair = torch.mul(dscores, p.scores, out=ws.get("pair", n, s.R * C, C)).view(n, s.R, C, C)
    pair = pair.sum(1) if s.R > 1 else pair.squeeze(1)
    if not gates_only:
        dscores.view(n, s.R, C, C).mul_(p.decay)

    dq = torch.bmm(dout_in, states.mT, out=ws.get("dq", n, s.R * C, s.K))
    read = row_dot(dq, p.q).view(n, s.R, C, 1).sum(1)
    if not gates_only:
        dq.baddbmm_(dscores, p.k)

    dk = torch.bmm(values, dstates.mT, out=ws.get("dk", n, C, s.K)).mul_(p.rev)
    written = row_dot(dk, p.k)
    if not gates_only:
        dk.baddbmm_(dscores.mT, p.q)

    by_head = (M, s.B, s.HV, C, s.V)
    dbeta = row_dot(dwanted.view(by_head), block.view(v)).view(n, C, 1)
    if s.reads:
        dpredicted = torch.bmm(dwanted, states.mT, out=ws.get("dpredicted", n, C, s.K))
        predicted = row_dot(dpredicted, p.k).mul_(p.gamma_p)
        dbeta -= predicted
        if not gates_only:
            dk.addcmul_(dpredicted, p.beta * p.gamma_p, value=-1.0)
        predicted.mul_(p.beta)
        read -= _row_after(predicted) if s.erase == "undecayed" else predicted
        x = torch.bmm(dwanted, values.mT, out=ws.get("x", n, C, C)).tril_(-1)
        inner = p.gram.mul_(x)
        dbeta -= inner.sum(-1, keepdim=True)
        if s.erase == "undecayed":
            pair -= _row_after(inner.mul_(p.beta))
        else:
            pair.addcmul_(inner, p.beta, value=-1.0)
        if not gates_only:
            x.mul_(p.decay_p.squeeze(1)).mul_(p.beta)
            dk.baddbmm_(torch.add(x, x.mT, out=ws.get("system", n, C, C)), p.k, alpha=-1.0)
    pair.tril_(-1)

    earlier = torch.ones(C, C, dtype=s.dtype, device=v.device).triu_(1).expand(n, C, C)
    across = torch.bmm(pair, earlier, out=ws.get("gram", n, C, C)).tril_()  # sum over j < t of pair_ij, for i >= t
    dg = across.sum(1).unsqueeze(-1)
    dg += read.flip(1).cumsum(1).flip(1)
    dg[:, 1:] += written[:, :-1].cumsum(1)
    carried = torch.mul(dstates, states, out=ws.get("dread", n, s.K, s.V)).sum((1, 2), keepdim=True)
    dg += carried * p.last
    block.view(grad_g.unsqueeze(-1)).copy_(dg.view(M, s.B, s.HV, C, 1))
    block.view(grad_beta.unsqueeze(-1)).copy_(dbeta.view(M, s.B, s.HV, C, 1))
    if gates_only:
        return
    torch.mul(dwanted.view(by_head), p.beta.view(M, s.B, s.HV, C, 1), out=dwanted.view(by_head))
    block.view(grad_v).copy_(dwanted.view(by_head))
    if s.normalize:
        dq.addcmul_(p.q, row_dot(p.q, dq) * p.inv_q * p.inv_q, value=-1.0)
        dk.addcmul_(p.k, row_dot(p.k, dk), value=-1.0).mul_(p.inv_k)
    _write(dq, grad_q, block, s.B)
    _write(dk, grad_k, block, s.B)


def _row_after(x: torch.Tensor) -> torch.Tensor:
    """Row i of the result is row i + 1 of x [n, C, D]; the last is 0."""
    return torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], dim=1)


def _write(dx: torch.Tensor, grad: torch.Tensor, block: Block, B: int) -> None:
    """Sum the copies of shared heads and put the block's rows in place."""
    heads = grad.shape[2]
    dx = dx.view(block.M, B, heads, -1, block.C, grad.shape[3])
    block.view(grad).copy_(dx.sum(3) if dx.shape[3] > 1 else dx.squeeze(3))
