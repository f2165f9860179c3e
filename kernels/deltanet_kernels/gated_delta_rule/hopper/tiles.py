"""Tiles of the Gluon kernels for Hopper: layouts, copies into shared memory, and names that Triton changed after 3.6.

Tensor cores and threads access shared memory through different proxies. A fence separates what threads have written or
copied there from the product that reads it, and a product is awaited before its operands are overwritten.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared

# Triton 3.9 renamed these.
copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
view = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret

TILE = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))  # 16 bytes per thread
NARROW = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
SQUARE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
WIDE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
ROWS = gl.constexpr(gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])))
COLUMNS = gl.constexpr(gl.SliceLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])))
SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


@gluon.jit
def arrived(pending: gl.constexpr):
    """All copies but the last `pending` groups are in shared memory, for every thread and for the tensor cores."""
    async_copy.wait_group(pending)
    fence_async_shared()
    barrier()


@gluon.jit
def tile_at(at, stride: gl.constexpr, rows: gl.constexpr, columns: gl.constexpr):
    """Addresses of a tile, 16 bytes each: a thread's first one, and constants added to it."""
    layout: gl.constexpr = NARROW if columns == 64 else TILE
    cube: gl.constexpr = gl.BlockedLayout(
        [rows * columns // 1024, 1, 8], [1, 256 // columns, columns // 8], [1, 4, 1], [2, 1, 0]
    )
    step: gl.constexpr = 1024 // columns
    part = gl.arange(0, rows // step, layout=gl.SliceLayout(1, gl.SliceLayout(2, cube)))
    i = gl.arange(0, step, layout=gl.SliceLayout(0, gl.SliceLayout(2, cube)))
    d = gl.arange(0, columns, layout=gl.SliceLayout(0, gl.SliceLayout(1, cube)))
    at = at + (i[None, :, None] * stride + d[None, None, :])
    at = at + part[:, None, None] * (step * stride)
    at = gl.convert_layout(gl.reshape(at, [rows, columns]), layout, assert_trivial=True)
    return gl.max_contiguous(gl.multiple_of(at, [1, 16]), [1, 8])


@gluon.jit
def softplus(x):
    """log(1 + e^x), as in common/tiles.py."""
    return gl.where(x > 20.0, x, gl.log(1.0 + gl.exp(gl.minimum(x, 20.0))))


@gluon.jit
def zeros(columns: gl.constexpr):
    """A zero accumulator for a product with 64 rows."""
    return gl.zeros([64, columns], gl.float32, WIDE if columns == 128 else SQUARE)
