"""Tokens as rows at a constant distance: without a copy where they are, with one where they are not."""

from __future__ import annotations

import torch

from deltanet_kernels.common.rows import rows

X = torch.arange(2 * 3 * 20).view(2, 3, 20)
TALL = torch.arange(4 * 3 * 2 * 5).view(4, 3, 2, 5)


ROWS: list[tuple[torch.Tensor, int, bool]] = [
    (X, 20, False),
    (X[..., 3:10], 20, False),
    (X[:, :1, 3:10], 60, False),
    (X[:1, :, 3:10], 20, False),
    (X[1:, 2:, 3:10], 7, False),
    (X[:, :2, 3:10], 7, True),
    (X[:, ::2], 20, True),
    (X[:1, ::2, :4], 40, False),
    (X[..., ::2], 10, True),
    (X[:1, :1, ::2], 10, True),
    (X[..., 3:10].unflatten(-1, (7, 1)), 20, False),
    (TALL, 10, False),
    (TALL[:, :, 1:], 10, False),
    (TALL[:, :1, :, 1:], 8, True),
    (TALL[:, :, 1:, 1:], 10, False),
    (TALL.transpose(0, 1), 10, True),
    (X[:1, :1, :4].expand(3, 1, 4), 0, False),
    (X[:0], 20, False),
    (X[:1, 3:, 3:10], 7, False),  # whatever the strides of no token are
]


def test_rows() -> None:
    for number, (x, distance, copied) in enumerate(ROWS):
        found, step = rows(x)
        assert step == distance, number
        assert (found.data_ptr() != x.data_ptr()) == copied, number
        assert torch.equal(found, x), number
        if x.numel():
            width = x[0, 0].numel()
            tokens = found.as_strided((x.shape[0] * x.shape[1], width), (step, 1))
            assert torch.equal(tokens, x.reshape(-1, width)), number
