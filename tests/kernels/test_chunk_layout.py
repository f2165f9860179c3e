"""The layouts of packed sequences: computed once for all layers of a model."""

from __future__ import annotations

import pytest
import torch

from deltanet_kernels.common import chunk_layout
from deltanet_kernels.common.chunk_layout import ChunkLayout

X = torch.arange(1.0, 25.0).view(1, 24, 1, 1)


def test_lengths_are_read_once_until_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    packed = ChunkLayout._packed
    monkeypatch.setattr(ChunkLayout, "_packed", lambda *key: [reads.append(key[2]), packed(*key)][1])
    cu_seqlens = torch.tensor([0, 5, 24])
    first = ChunkLayout.of(X, 8, cu_seqlens)
    assert ChunkLayout.of(X, 8, cu_seqlens) is first
    assert ChunkLayout.of(X, 4, cu_seqlens) is not first
    assert reads == [8, 4]
    cu_seqlens[1] = 9
    assert ChunkLayout.of(X, 8, cu_seqlens).counts == (2, 2) != first.counts
    assert ChunkLayout.of(X, 8, cu_seqlens.clone()) is not first
    assert reads == [8, 4, 8, 8]


def test_a_layout_lives_as_long_as_its_boundaries() -> None:
    cu_seqlens = torch.tensor([0, 24])
    ChunkLayout.of(X, 8, cu_seqlens)
    before = len(chunk_layout._packed_layouts)
    del cu_seqlens
    assert len(chunk_layout._packed_layouts) == before - 1


def test_inference_leaves_nothing_for_training() -> None:
    """A tensor made in inference mode cannot be saved for a backward pass."""
    cu_seqlens = torch.tensor([0, 7, 24])
    with torch.inference_mode():
        ChunkLayout.of(X, 8, cu_seqlens)
        own = torch.tensor([0, 7, 24])
        shorter = ChunkLayout.of(X, 8, own)
        own[1] = 12
        assert ChunkLayout.of(X, 8, own).counts != shorter.counts
    x = X.clone().requires_grad_()
    ChunkLayout.of(x, 8, cu_seqlens).cut(x).square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * X)
