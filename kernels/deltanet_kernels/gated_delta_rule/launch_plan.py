"""The plan that all launches of one call share: sizes, chunks, configuration and form of the erase term."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from deltanet_kernels.common.config import product_precision, tile_width
from deltanet_kernels.common.device import capability
from deltanet_kernels.common.sequences import Chunks, cut_chunks
from deltanet_kernels.gated_delta_rule.chips import ChunkConfig, Kernel, chunk_config, kernels
from deltanet_kernels.gated_delta_rule.hopper import launches
from deltanet_kernels.gated_delta_rule.row_factors import erase_flags


def kept_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which V' and dW are stored: float32 for float16, which would lose small gradients."""
    return dtype if dtype == torch.bfloat16 else torch.float32


def pinned_config(k: torch.Tensor, v: torch.Tensor) -> ChunkConfig:
    """The configuration for these keys and values on their device."""
    return chunk_config(k.shape[3], v.shape[3], k.dtype, capability(k.device))


class ChunkForm(NamedTuple):
    """Form that the kernels of the states and of the gradients are compiled for: their compile-time constant FORM."""

    H: int
    HV: int
    HQ: int
    K: int
    V: int
    BK: int
    """Width of a tile of K; BV of V."""
    BV: int
    C: int
    VARLEN: bool
    """Sequences are packed."""
    FULL: bool
    """Every tile is full, so that no mask is applied."""
    READ: bool
    """There is an erase term; UNDECAYED: its prediction comes from the state before the token's decay."""
    UNDECAYED: bool
    PRECISION: str
    NORM: bool = False
    """q and k are normalised. Those from here on are of the gradients within a chunk."""
    SIGMOID: bool = False
    """`beta` holds logits of the write strength."""
    GROUPS: bool = False
    """Queries read the state before their group of 32 tokens (gradients_inputs.py)."""


class LaunchPlan(NamedTuple):
    """The plan of one call, the same for its forward and its backward pass."""

    config: ChunkConfig
    sizes: dict[str, int]
    """H, HV, HQ, K, V, and BK: the width of a tile of K."""
    chunks: Chunks
    full: bool
    """Every tile of every kernel is full, so that no mask is applied."""
    precision: str
    form: dict[str, bool]
    """`row_factors.erase_flags`."""
    default: bool
    """This is the gated delta rule itself, the only form of the kernels in hopper/."""
    kernels: tuple[Kernel, ...]
    """The rows of `chips.KERNELS` for such heads, dtype and chip."""

    def serving(self, stage: str, *copied: torch.Tensor) -> Kernel:
        """The kernel of a stage; one in Gluon would copy rows of `copied` [B, T, heads, K] by 16 bytes."""
        return next(
            row for row in self.kernels if row.stage == stage and (not row.gluon or self._by_gluon(row, copied))
        )

    def _by_gluon(self, kernel: Kernel, copied: tuple[torch.Tensor, ...]) -> bool:
        plain = self.full and self.default and self.precision == "tf32"
        return plain and all(map(launches.copied_by_16_bytes, copied)) and launches.imported(kernel) is not None

    @property
    def flags(self) -> dict[str, Any]:
        """Constants of every kernel."""
        return {
            "C": self.config.C, "VARLEN": self.chunks.varlen, "FULL": self.full, "PRECISION": self.precision,
        }  # fmt: skip

    def chunk_form(self, BV: int, **gradients: bool) -> ChunkForm:
        """The constant of a kernel with slices of BV columns; `gradients` are its last fields."""
        constants: dict[str, Any] = {**self.sizes, **self.flags, **self.form, **gradients}
        return ChunkForm(BV=BV, **constants)


def launch_plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    precision: str,
    erase: str,
) -> LaunchPlan:
    """The plan of a call; the arguments are those of `chunk_forward`."""
    (B, T, HQ, K), (H, HV, V) = q.shape, (k.shape[2], *v.shape[2:])
    config, BK = pinned_config(k, v), tile_width(K, k.dtype)
    chunks = cut_chunks(B, T, config.C, cu_seqlens)
    return LaunchPlan(
        config=config,
        sizes={"H": H, "HV": HV, "HQ": HQ, "K": K, "V": V, "BK": BK},
        chunks=chunks,
        full=BK == K and tile_width(V, k.dtype) == V and not chunks.varlen and T % config.C == 0,
        precision=product_precision(precision, q.dtype),
        form=erase_flags(erase),
        default=erase == "decayed",
        kernels=kernels(K, V, k.dtype, capability(k.device), HQ, H, HV),
    )


def zero_tail(chunks: Chunks, *tensors: torch.Tensor) -> None:
    """Tokens after the last packed sequence get zeros."""
    if chunks.cu_seqlens is not None:
        end = chunks.cu_seqlens[-1]
        for x in tensors:
            tail = torch.arange(x.shape[1], device=x.device) >= end
            x.masked_fill_(tail.view(1, -1, *[1] * (x.dim() - 2)), 0)
