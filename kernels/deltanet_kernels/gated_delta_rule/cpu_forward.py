"""The chunked gated delta rule in plain PyTorch, forward; the algebra is in cpu.py.

Shapes within a block of M chunks of C tokens: the B * HV states of a chunk form the dimension N, the R query
heads that share a state are rows of one matrix, and chunks are the outermost dimension, so that

    q [M*N, R*C, K]    k [M*N, C, K]    v [M*N, C, V]    gates [M*N, C, 1]    S [M*N, K, V]

are contiguous and the loop over chunks takes slices of N entries. All results are written into a workspace that the
blocks share: on CPU a new buffer costs more (page faults) than the arithmetic that fills it.
"""

import math
from typing import NamedTuple

import torch

from deltanet_kernels.common.device import no_autocast
from deltanet_kernels.common.heads import L2_EPS
from deltanet_kernels.common.registration import operator

CHUNK = 64
# Matrices (chunk and head) per block: enough to amortise the call of an operator, few enough for the cache.
BLOCK_MATRICES = 32
# A decay below e^FLOOR counts as 0: smaller factors make denormal numbers, which are 10 to 60 times slower.
FLOOR = {torch.float32: -69.0, torch.float64: -690.0}


class CpuForward(NamedTuple):
    """The arguments of `torch_chunk_forward`: those of a `RuleCall` of rows of equal length, and what is kept of it."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    """Log decay."""
    beta: torch.Tensor
    """Write strength."""
    initial_state: torch.Tensor | None
    scale: float
    normalize: bool
    erase: str
    keep: bool = False
    """Return what the backward pass reads."""
    gates_only: bool = False
    """The gradients of q, k and v are not wanted."""


class Kept(NamedTuple):
    """The results of `torch_chunk_forward` after output and final state, which the backward pass reads."""

    states: torch.Tensor
    """The states that enter each chunk [chunks*N, K, V]."""
    values: torch.Tensor
    """V' [T*N, V]."""


class Sizes(NamedTuple):
    """Sizes and settings of one call."""

    B: int
    T: int
    H: int
    HQ: int
    HV: int
    K: int
    V: int
    R: int  # query heads per state
    scale: float
    normalize: bool
    dtype: torch.dtype
    erase: str

    @classmethod
    def of(cls, call: CpuForward) -> "Sizes":
        """Sizes of checked inputs."""
        (B, T, HQ, K), H, (HV, V) = call.q.shape, call.k.shape[2], call.v.shape[2:]
        dtype = torch.promote_types(call.q.dtype, torch.float32)
        return cls(B, T, H, HQ, HV, K, V, max(HQ, HV) // HV, call.scale, call.normalize, dtype, call.erase)

    @property
    def N(self) -> int:
        """States per chunk."""
        return self.B * self.HV

    @property
    def reads(self) -> bool:
        """Whether writes subtract a prediction of the state, so that those of a chunk depend on each other."""
        return self.erase != "off"

    def blocks(self) -> list["Block"]:
        """The tokens, cut into blocks of complete chunks and one shorter chunk at the end."""
        whole, tail = divmod(self.T, CHUNK)
        step = max(1, BLOCK_MATRICES // self.N)
        found = [Block(c * CHUNK, min(step, whole - c), CHUNK) for c in range(0, whole, step)]
        return [*found, Block(whole * CHUNK, 1, tail)] if tail else found


class Block(NamedTuple):
    """M chunks of C tokens, from token `start` on."""

    start: int
    M: int
    C: int

    def kept(self, s: Sizes, states: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The block's S [M*N, K, V] and V' [M*N, C, V] in what forward keeps for backward."""
        first = self.start // CHUNK * s.N
        rows = values[self.start * s.N : (self.start + self.M * self.C) * s.N]
        return states[first : first + self.M * s.N], rows.view(self.M * s.N, self.C, values.shape[1])

    def view(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, H, D] -> the block's [M, B, H, C, D], as a view."""
        B, _, H, D = x.shape
        rows = x[:, self.start : self.start + self.M * self.C]
        return rows.view(B, self.M, self.C, H, D).permute(1, 0, 3, 2, 4)


class Workspace:
    """Named buffers that every block reuses."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def get(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """An uninitialised contiguous tensor; valid until the same name is requested again."""
        key = (name, dtype or self.dtype)
        size = math.prod(shape)
        if key not in self._buffers or self._buffers[key].numel() < size:
            self._buffers[key] = torch.empty(size, dtype=key[1], device=self.device)
        return self._buffers[key][:size].view(shape)


class Prepared(NamedTuple):
    """Everything that a block computes independently of the state."""

    q: torch.Tensor  # raw queries [M*N, R*C, K], a part of kq
    k: torch.Tensor  # unit keys [M*N, C, K]
    kq: torch.Tensor  # keys above queries [M*N, C + R*C, K]: both multiply the same matrices; without erasing queries
    inv_q: torch.Tensor | float  # 1/|q| [M*N, R*C, 1], or 1
    inv_k: torch.Tensor | float  # 1/|k| [M*N, C, 1], or 1
    beta: torch.Tensor  # [M*N, C, 1]
    gamma: torch.Tensor  # e^G [M*N, C, 1]
    gamma_p: torch.Tensor  # decay of the state that a token's prediction reads [M*N, C, 1]
    rev: torch.Tensor  # e^{G_C - G} [M*N, C, 1]
    last: torch.Tensor  # e^{G_C} [M*N, 1, 1]
    decay: torch.Tensor  # D [M*N, 1, C, C]
    decay_p: torch.Tensor  # the same between a prediction and earlier keys [M*N, 1, C, C]
    gram: torch.Tensor  # decay_p * K K^T [M*N, C, C]; on and above the diagonal not used
    scores: torch.Tensor  # D * Q K^T [M*N, R*C, C]
    inverse: torch.Tensor  # (I + L)^-1 [M*N, C, C]; empty if L is 0, like gram


def _exp_(x: torch.Tensor, floor: float) -> torch.Tensor:
    """e^x for x <= 0 in place; 0 where x <= floor, so that no denormal number appears."""
    x.clamp_(min=floor, max=0.0).exp_()
    # 1.0001: the exponential of the floor itself has to fall below the threshold in spite of rounding.
    return torch.threshold_(x, 1.0001 * math.exp(floor), 0.0)


def inverse_norm(x: torch.Tensor) -> torch.Tensor:
    """1 / sqrt(sum x^2 + 1e-6) over the last dimension [..., 1]; not differentiable."""
    norm: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().add_(L2_EPS).rsqrt_()


def _before(x: torch.Tensor, first: float) -> torch.Tensor:
    """Row i of the result is row i - 1 of x [n, C, D], and `first` above."""
    return torch.cat([x.new_full((x.shape[0], 1, x.shape[2]), first), x[:, :-1]], dim=1)


def prepare(s: Sizes, block: Block, ws: Workspace, call: CpuForward) -> Prepared:
    """Everything of a block that does not depend on the state."""
    q, k, _, g, beta, *_ = call
    _, M, C = block
    n = M * s.N
    rows = C if s.reads else 0  # of keys
    kq = ws.get("kq", n, rows + s.R * C, s.K)
    q_ = kq[:, rows:]
    k_ = kq[:, :rows] if s.reads else ws.get("k", n, C, s.K)
    k_.view(M, s.B, s.H, s.HV // s.H, C, s.K).copy_(block.view(k).unsqueeze(3))
    if s.HQ < s.HV:
        q_.view(M, s.B, s.HQ, s.HV // s.HQ, C, s.K).copy_(block.view(q).unsqueeze(3))
    else:
        q_.view(M, s.B, s.HV, s.R, C, s.K).copy_(block.view(q).unflatten(2, (s.HV, s.R)))
    inv_q = inverse_norm(q_) if s.normalize else 1.0
    inv_k = inverse_norm(k_) if s.normalize else 1.0
    if s.normalize:
        k_.mul_(inv_k)
    beta_ = ws.get("beta", M, s.B, s.HV, C, 1).copy_(block.view(beta.unsqueeze(-1))).view(n, C, 1)

    # Summed in float64: next to a closed gate (g = -200) float32 sums would lose the digits of the other gates.
    # Below 10 * floor a token forgets everything; the clamp keeps differences of g = -inf defined.
    floor = FLOOR[s.dtype]
    G = ws.get("G", M, s.B, s.HV, C, 1, dtype=torch.float64).copy_(block.view(g.unsqueeze(-1)))
    G = G.view(n, C, 1).clamp_(min=10 * floor).cumsum(1)
    total = G[:, -1:]
    gamma = _exp_(G.to(s.dtype, copy=True), floor)
    rev = _exp_((total - G).to(s.dtype), floor)
    last = _exp_(total.to(s.dtype, copy=True), floor)
    wide = torch.sub(G, G.mT, out=ws.get("wide", n, C, C, dtype=torch.float64))
    decay = _exp_(ws.get("decay", n, C, C).copy_(wide), floor).tril_()
    gamma_p, decay_p = (_before(gamma, 1.0), _before(decay, 0.0)) if s.erase == "undecayed" else (gamma, decay)
    decay, decay_p = decay.unsqueeze(1), decay_p.unsqueeze(1)

    empty = kq.new_empty(0)
    if not s.reads:
        scores = torch.bmm(q_, k_.mT, out=ws.get("products", n, s.R * C, C))
        scores.view(n, s.R, C, C).mul_(decay)
        return Prepared(
            q_, k_, kq, inv_q, inv_k, beta_, gamma, gamma_p, rev, last, decay, decay_p, empty, scores, empty
        )  # fmt: skip
    products = torch.bmm(kq, k_.mT, out=ws.get("products", n, C + s.R * C, C))
    by_row = products.view(n, 1 + s.R, C, C)
    if s.erase == "undecayed":
        by_row[:, :1].mul_(decay_p)
        by_row[:, 1:].mul_(decay)
    else:
        by_row.mul_(decay)
    gram, scores = products[:, :C], products[:, C:]
    # The solver reads the strict lower triangle only.
    system = torch.mul(gram, beta_, out=ws.get("system", n, C, C))
    eye = torch.eye(C, dtype=s.dtype, device=q.device).expand(n, C, C)
    inverse = torch.linalg.solve_triangular(
        system, eye, upper=False, unitriangular=True, out=ws.get("inverse", n, C, C)
    )
    return Prepared(
        q_, k_, kq, inv_q, inv_k, beta_, gamma, gamma_p, rev, last, decay, decay_p, gram, scores, inverse
    )  # fmt: skip


def _fake_forward(call: CpuForward) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    s, v = Sizes.of(call), call.v
    chunks = (s.T + CHUNK - 1) // CHUNK if call.keep else 0
    return (
        v.new_empty(s.B, s.T, s.R * s.HV, s.V),
        v.new_empty(s.B, s.HV, s.K, s.V, dtype=s.dtype),
        v.new_empty(chunks * s.N, s.K, s.V, dtype=s.dtype),
        v.new_empty(s.T * s.N if call.keep else 0, s.V, dtype=s.dtype),
    )


@operator(_fake_forward)
def torch_chunk_forward(call: CpuForward) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output [B, T, HO, V], final state [B, HV, K, V], and the fields of `Kept` (empty unless `keep`)."""
    with no_autocast(call.q.device):
        return _forward(call)


def _forward(call: CpuForward) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    s, v, state = Sizes.of(call), call.v, call.initial_state
    o, final, all_states, all_values = _fake_forward(call)
    N = s.N
    ws = Workspace(s.dtype, v.device)
    current = final.view(N, s.K, s.V)
    current.copy_(state.reshape(N, s.K, s.V)) if state is not None else current.zero_()
    for block in s.blocks():
        _, M, C = block
        p = prepare(s, block, ws, call)
        values = ws.get("values", M * N, C, s.V)
        if call.keep:
            states, values = block.kept(s, all_states, all_values)
            S_of = (*states.split(N), current)
            S_of[0].copy_(current)
        else:
            S_of = (current,) * (M + 1)
        solve = p.inverse.mul_(p.beta.mT) if s.reads else p.beta
        raw = block.view(v)
        out = ws.get("out", M * N, s.R * C, s.V)
        rows = 1 if s.reads else 0  # of predictions above those of the queries
        read = ws.get("read", N, rows + s.R, C, s.V)
        wanted = ws.get("wanted", N, C, s.V)
        by_head = wanted.view(s.B, s.HV, C, s.V)
        kq_of, k_of, T_of = p.kq.split(N), p.k.split(N), solve.split(N)
        gamma_of, erase_of = p.gamma.unsqueeze(1).split(N), p.gamma_p.split(N)
        rev_of, last_of = p.rev.split(N), p.last.split(N)
        V_of, out_of = values.split(N), out.view(M * N, s.R, C, s.V).split(N)
        for m in range(M):
            # V' = T beta (V - gamma * (K S)), then S <- e^{G_C} S + K^T (rev * V')
            torch.bmm(kq_of[m], S_of[m], out=read.view(N, -1, s.V))
            torch.mul(read[:, rows:], gamma_of[m], out=out_of[m])
            if s.reads:
                torch.sub(raw[m], read[:, 0].mul_(erase_of[m]).view_as(by_head), out=by_head)
                torch.bmm(T_of[m], wanted, out=V_of[m])
            else:
                by_head.copy_(raw[m])
                torch.mul(T_of[m], wanted, out=V_of[m])
            torch.mul(V_of[m], rev_of[m], out=wanted)
            torch.mul(S_of[m], last_of[m], out=S_of[m + 1]).baddbmm_(k_of[m].mT, wanted)
        out.baddbmm_(p.scores, values).mul_(p.inv_q * s.scale)
        block.view(o).copy_(out.view(M, s.B, s.HV * s.R, C, s.V))
    return o, final, all_states, all_values
