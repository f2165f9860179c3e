"""The operator of the Mesa layer for training and prefill."""

# mypy: allow-untyped-defs
from __future__ import annotations

from deltanet_kernels.dispatch import Operator
from deltanet_kernels.mesa.calls import MesaCall, check_mesa
from deltanet_kernels.mesa.cpu import chunk_mesa_torch


def _chunk():
    from deltanet_kernels.mesa.chunk import chunk_mesa_triton

    return chunk_mesa_triton


chunk_mesa = Operator("chunk_mesa", MesaCall, check=check_mesa, cpu=chunk_mesa_torch, triton=_chunk)
