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

import torch

from deltanet_kernels import checks
from deltanet_kernels.arguments import RuleCall, Upstream
from deltanet_kernels.common.registration import differentiable_call
from deltanet_kernels.gated_delta_rule.cpu_backward import DIFFERENTIATED, torch_chunk_backward
from deltanet_kernels.gated_delta_rule.cpu_forward import CHUNK, CpuForward, Kept, torch_chunk_forward
from deltanet_kernels.gated_delta_rule.drop_in import through_plain
from deltanet_kernels.gated_delta_rule.reference import log_decay_and_strength
from deltanet_kernels.signatures import by_arguments

_chunk = differentiable_call(
    torch_chunk_forward, torch_chunk_backward, DIFFERENTIATED, Upstream, Kept, without=["initial_state"]
)


def _run(call: CpuForward) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and final state; keeps what the gradients that are wanted need."""
    q, k, v, *others = call[:6]
    tokens, rest = (any(x is not None and x.requires_grad for x in some) for some in ((q, k, v), others))
    keep = torch.is_grad_enabled() and (tokens or rest)
    return _chunk(call._replace(keep=keep, gates_only=not tokens))[:2]


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
    forward = CpuForward(q, k, v, g, beta, call.initial_state, call.factor, normalize, call.erase)
    if call.cu_seqlens is None:
        o, final = _run(forward)
    else:
        o, final = _run_packed(forward, call.cu_seqlens.tolist())
    return o, final if call.output_final_state else None


def _run_packed(call: CpuForward, offsets: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed sequences: those with equal numbers of chunks run as one batch, shorter rows padded with beta = 0."""
    q, _, v, *_, state = call[:6]
    device, tokens = q.device, call[:5]
    if state is None:
        shape = len(offsets) - 1, v.shape[2], q.shape[3], v.shape[3]
        state = torch.zeros(shape, dtype=torch.promote_types(q.dtype, torch.float32), device=device)
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
        packed = dict(zip(call._fields, (*parts, first_state), strict=False))
        o, final = _run(call._replace(**packed))  # type: ignore[arg-type]
        outputs.append(o.flatten(0, 1))
        states.append(final)
        rows += len(members) * width
    outputs.append(v.new_zeros(1, max(q.shape[2], v.shape[2]), v.shape[3]))
    where[where < 0] = rows
    o = torch.cat(outputs).index_select(0, where.to(device)).unsqueeze(0)
    back = torch.argsort(torch.tensor(order)).to(device)
    return o, torch.cat(states).index_select(0, back)
