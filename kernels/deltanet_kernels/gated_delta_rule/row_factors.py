"""Row factors: float32 numbers per token and head that every chunk kernel reads instead of computing them again.

One tensor [6 HV + 4 HO, B*T], head first. With plane = HV * B * T elements per block:

    offset 0            G [HV, B*T]
    offset plane        s [HV, B*T]
    offset 2 plane      per token and state head, side by side: beta, -gamma beta r, rev r, r. The second is what a
                        prediction reads the state with, with the gamma of the token before if it is undecayed
    offset 6 plane      per token and output head, side by side: 1/|q|, scale gamma / |q|, and two unused numbers.
                        ../group_rule/ has its own gamma there, and scale / |q| third

The package docstring defines the symbols.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from deltanet_kernels.common.sequences import Chunks
from deltanet_kernels.common.tiles import L2_EPS, load_tile


@triton.jit
def row_factors(factors, at, i, live, FULL: tl.constexpr):
    """Four factors of each row of a chunk, stored side by side from row `at`: one load that a loop can prefetch."""
    j = tl.arange(0, 4)[None, :]
    quad = factors + 4 * at + (4 * i[:, None] + j)
    x = tl.load(quad) if FULL else tl.load(quad, mask=live[:, None] & (j < 4), other=0.0)
    even, odd = tl.split(tl.reshape(x, [i.shape[0], 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def state_factors(factors, plane):
    """Start of the four factors per token and state head; `plane` = HV * tokens."""
    return factors + 2 * plane


@triton.jit
def output_factors(factors, plane):
    """Start of the four factors per token and output head; `plane` = HV * tokens."""
    return factors + 6 * plane


@triton.jit
def row_norm_factor(x):
    """1 / sqrt(|x|^2 + 1e-6) of each row."""
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, axis=1) + L2_EPS)


@triton.jit
def load_G(rows, plane, i, valid, FULL: tl.constexpr, PRECISION: tl.constexpr):
    """G and s of a chunk's rows, where rows past the end equal the last one, and e^{G_last}.

    With tf32 products (10 bits) a closed gate is -128 in G, which moves the decays after it by up to 3e-4; s is then 0.
    """
    G_i = load_tile(rows + i, i < valid, FULL)
    s_i = load_tile(rows + plane + i, i < valid, FULL)
    G_last = tl.load(rows + valid - 1)
    s_last = tl.load(rows + plane + valid - 1)
    fade = tl.where(s_last > 0.0, 0.0, tl.exp(G_last))
    if PRECISION == "tf32":
        G_i -= 128.0 * s_i
        G_last -= 128.0 * s_last
        s_i = tl.zeros_like(s_i)
        s_last = 0.0
    if not FULL:
        G_i = tl.where(i < valid, G_i, G_last)
        s_i = tl.where(i < valid, s_i, s_last)
    return G_i, s_i, fade


@triton.jit
def load_G_before(rows, plane, i, valid, PRECISION: tl.constexpr):
    """G and s of the token before each of a chunk's rows, 0 for the first: what the undecayed state has faded by."""
    at = tl.minimum(i, valid) - 1
    G = tl.load(rows + at, mask=i > 0, other=0.0)
    s = tl.load(rows + plane + at, mask=i > 0, other=0.0)
    if PRECISION == "tf32":
        G -= 128.0 * s
        s = tl.zeros_like(s)
    return G, s


@triton.jit
def middle_decays(rows, plane, i, valid, FULL: tl.constexpr):
    """Decays around the boundary after the first 32 tokens of a chunk of 64 (../group_rule/).

    From each of these tokens to the boundary, 0 for later rows; over the first 32 tokens; over the others.
    """
    last = rows + valid - 1
    middle = rows + tl.minimum(valid, 32) - 1
    G, s = load_tile(rows + i, i < valid, FULL), load_tile(rows + plane + i, i < valid, FULL)
    G_middle, s_middle = tl.load(middle), tl.load(middle + plane)
    until = tl.where((i < 32) & (s == s_middle), tl.exp(tl.minimum(G_middle - G, 0.0)), 0.0)
    second = tl.where(tl.load(last + plane) > s_middle, 0.0, tl.exp(tl.minimum(tl.load(last) - G_middle, 0.0)))
    return until, gamma_of(G_middle, s_middle), second


@triton.jit
def row_after(x, i):
    """Element i of the result is element i + 1 of x; the last is 0."""
    return tl.sum(tl.where(i[:, None] + 1 == i[None, :], x[None, :], 0.0), axis=1)


@triton.jit
def gamma_of(G, s):
    """e^G of each row."""
    return tl.where(s > 0.0, 0.0, tl.exp(G))


@triton.jit
def decay_between(G, s, causal):
    """D = e^{G_i - G_j} where `causal` (rows i, columns j), else 0."""
    return decay_to(G, s, G, s, causal)


@triton.jit
def decay_to(G_i, s_i, G_j, s_j, causal):
    """The same with G and s of the rows apart from those of the columns."""
    same = causal & (s_i[:, None] == s_j[None, :])
    return tl.where(same, tl.exp(tl.where(causal, G_i[:, None] - G_j[None, :], 0.0)), 0.0)


def erase_flags(erase: str) -> dict[str, bool]:
    """Constants of the kernels that say which form the erase term has.

    READ: there is one, so that the writes of a chunk depend on each other and L is not 0. UNDECAYED: the prediction
    comes from the state before the token's decay.
    """
    return {"READ": erase != "off", "UNDECAYED": erase == "undecayed"}


class ChunkInputs(NamedTuple):
    """Everything that the scores, the row factors and the inverse are computed from."""

    q: torch.Tensor
    k: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    chunks: Chunks
    scale: float
    sigmoid: bool
    """`beta` holds logits of the write strength."""
    norm: bool
    """q and k are normalised to unit length."""
    bound: bool
    """Also compute the bounds, which cutting sequences into segments requires."""
    erase: str = "decayed"
    scores: bool = True
    """Without, P and the factors of the output heads are left as they are."""


class ChunkTensors(NamedTuple):
    """The tensors that every later stage reads: the result of scores.py with solve.py, or of hopper/solve.py."""

    P: torch.Tensor
    """Decayed and scaled scores within a chunk [chunks, HO, C, C], dtype of the keys; empty without scores."""
    T: torch.Tensor | None
    """(I + L)^-1 [chunks, HV, C, C], dtype of the keys; None if L is 0."""
    factors: torch.Tensor
    """Row factors [6 HV + 4 HO, B*T], float32."""
    bounds: torch.Tensor | None
    """Upper bound of the log of each chunk's gain on the state [chunks, HV], float32; None unless requested."""


def empty_scores(inputs: ChunkInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """P [chunks, HO, C, C], the row factors [6 HV + 4 HO, B*T], and the bounds [chunks, HV]; see `ChunkTensors`."""
    k, chunks, HV = inputs.k, inputs.chunks, inputs.g.shape[2]
    HO = max(inputs.q.shape[2], HV)
    P = k.new_empty((chunks.count, HO, chunks.size, chunks.size) if inputs.scores else (0,))
    factors = k.new_empty(6 * HV + 4 * HO, k.shape[0] * k.shape[1], dtype=torch.float32)
    return P, factors, k.new_empty(chunks.count, HV, dtype=torch.float32) if inputs.bound else None
