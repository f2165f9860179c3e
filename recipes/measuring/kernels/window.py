"""Times the attention over window and sinks: `python -m measuring.kernels window --peers`.

"deltanet, 4 bits" is the attention of a prompt whose earlier keys and values are seen in 4 bits, without packing them.

Peers: FlexAttention with the same mask (compiled, block mask not timed), SDPA with the mask as a T x T tensor, and SDPA
over all earlier tokens. Each is first compared with the blocked PyTorch form in float64 on the first row and key head;
the last computes another function and is not compared.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from deltanet_kernels import pack_prompt, prompt_attention, window_attention
from deltanet_kernels.packed_cache import launches
from deltanet_kernels.packed_cache.calls import PromptAttentionCall
from deltanet_kernels.packed_cache.reference import torch_prompt_attention
from deltanet_kernels.window import attention
from deltanet_kernels.window.calls import WindowCall
from deltanet_kernels.window.config import WindowConfig, window_config
from deltanet_kernels.window.cpu import torch_window_attention
from measuring.kernels.harness import Benchmark, Configuration, Operator, check_and_time, in_float64
from measuring.rows import Row

SINKS = 4
PACKED = "deltanet, 4 bits"
ALL = "sdpa, all tokens"
SHAPES = [
    (16, 2048, 9, 3, 64, 64),
    (16, 2048, 9, 3, 64, 256),
    (4, 4096, 32, 8, 64, 128),
    (4, 4096, 32, 8, 128, 64),
    (4, 4096, 32, 8, 128, 512),
    (4, 4096, 32, 8, 128, 4096),
    (4, 4096, 4, 1, 256, 64),
    (1, 32768, 32, 8, 128, 128),
    (1, 32768, 32, 8, 128, 1024),
]
"""Rows, tokens, query and key heads, head size, window."""
Shape = tuple[int, int, int, int, int, int]


def sees(window: int, i: Tensor, j: Tensor) -> Tensor:
    return (j <= i) & ((i - j < window) | (j < SINKS))


def _heads_first(function: Callable[..., Tensor], **options: Any) -> Operator:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return function(*(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=True, **options).transpose(1, 2)

    return call


def implementation(impl: str, T: int, window: int) -> Operator:
    """The implementation of this name for T tokens."""
    if impl == "deltanet":
        return lambda q, k, v: window_attention(q, k, v, window, SINKS)[0]
    if impl == ALL:
        return _heads_first(scaled_dot_product_attention, is_causal=True)
    if impl == "sdpa, mask":
        token = torch.arange(T, device="cuda")
        return _heads_first(scaled_dot_product_attention, attn_mask=sees(window, token[:, None], token[None]))
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # each window is a recompilation, and after eight of them PyTorch runs unfused operators
    mask = create_block_mask(lambda b, h, i, j: sees(window, i, j), None, None, T, T)
    return _heads_first(torch.compile(flex_attention, dynamic=False), block_mask=mask)


def make(shape: Shape) -> tuple[list[Tensor], Tensor]:
    """q, k and v in bfloat16, heads before tokens in memory as in models, and a gradient of o."""
    torch.manual_seed(0)
    B, T, HQ, HK, D, _ = shape
    leaves = [torch.randn(B, n, T, D, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for n in (HQ, HK, HK)]
    return [x.requires_grad_() for x in leaves], torch.randn(B, T, HQ, D, device="cuda", dtype=torch.bfloat16)


@torch.no_grad()
def in_4_bits(leaves: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Keys and values of `make` in 4 bits, as queries see those before their own group."""
    _, keys, values = pack_prompt(leaves[1], leaves[2], 4)
    return keys, values


@functools.lru_cache(maxsize=1)
def reference(shape: Shape, packed: bool) -> list[Tensor]:
    """o and the gradients of q, k and v of the first row and key head of `make`, in float64."""
    leaves, do = make(shape)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not packed:
            return torch_window_attention(WindowCall(q, k, v, shape[5], SINKS))[0]
        keys, values = (x[:1, :, :1].double() for x in in_4_bits(leaves))
        return torch_prompt_attention(PromptAttentionCall(q, k, v, keys, values, shape[5], SINKS, shape[4] ** -0.5))[0]

    return in_float64(attend, leaves, do, (shape[2] // shape[3], 1, 1))


def measure(labels: Row, options: argparse.Namespace) -> Row:
    """The figures of the row with these labels."""
    shape: Shape = tuple(labels["shape"])
    leaves, do = make(shape)
    if labels["impl"] == PACKED:
        run: Operator = functools.partial(_packed, in_4_bits(leaves), shape[5])
    else:
        run = implementation(labels["impl"], shape[1], shape[5])
    wanted = None if labels["impl"] == ALL else reference(shape, labels["impl"] == PACKED)
    return check_and_time(lambda: run(*leaves), leaves, do, wanted, options, most=0.02)


def _packed(earlier: tuple[Tensor, Tensor], window: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return prompt_attention(q, k, v, *earlier, window, SINKS, q.shape[3] ** -0.5)[0]


def rows(peers: bool) -> Iterator[Row]:
    """Labels of the rows."""
    for shape in SHAPES:
        for impl in ("deltanet", PACKED, *(("flex_attention", "sdpa, mask", ALL) if peers else ())):
            yield {"shape": list(shape), "impl": impl}


def configurations(labels: Row) -> Iterator[Configuration]:
    """Other sizes of one kernel at a time."""
    for kernel in ("forward", "gradients_q", "gradients_k"):
        own = window_config(kernel, labels["shape"][4], SINKS, torch.bfloat16)
        for M, N, warps, stages in itertools.product((32, 64, 128), (32, 64, 128), (4, 8), (1, 2, 3)):
            sizes = WindowConfig(M, N, min(N, own.S), own.D, warps, stages)
            yield dict.fromkeys(((attention, "window_config"), (launches, "window_config")), OfOneKernel(kernel, sizes))


class OfOneKernel:
    """`window_config` with other sizes for one kernel."""

    def __init__(self, kernel: str, sizes: WindowConfig) -> None:
        self.kernel, self.sizes = kernel, sizes

    def __call__(self, kernel: str, *rest: Any) -> WindowConfig:
        return self.sizes if kernel == self.kernel else window_config(kernel, *rest)

    def __str__(self) -> str:
        return f"{self.kernel}: {self.sizes}"


BENCHMARK = Benchmark(
    rows, measure, {"shape": f"B, T, HQ, HK, D, window; {SINKS} sinks, bfloat16"}, configurations=configurations
)
