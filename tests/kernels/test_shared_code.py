"""Prompts and windows of all lengths share the code of their kernels, of which each takes Triton a second or more."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from deltanet_kernels import group_gated_delta_step_, group_gates, window_mixture
from deltanet_kernels.group_rule import gates
from deltanet_kernels.group_rule import step as group_step
from deltanet_kernels.group_rule.calls import KEPT, GroupStepCall
from deltanet_kernels.packed_cache import launches
from deltanet_kernels.window import mixture
from tests.kernels.test_group_step import copied, step
from tests.kernels.test_window_prompt import Mixture
from tests.kernels.test_window_prompt import make as make_mixture
from tests.kernels.triton_mode import DEVICE, by_triton

PAGE = 2**18  # bytes


def in_pages(call: GroupStepCall) -> GroupStepCall:
    """The call with its sequences in pages of a server's cache, all of one size."""

    def paged(x: Tensor) -> Tensor:
        pages = torch.zeros(len(x) + 1, PAGE // x.element_size(), device=DEVICE, dtype=x.dtype)
        rows = pages[:, : x[0].numel()].view(-1, *x.shape[1:])
        rows[1:] = x
        return rows

    cache = call.token.cache.with_tensors(map(paged, call.token.cache.tensors))
    pages = torch.arange(1, 1 + len(call.state), dtype=torch.int32, device=DEVICE)
    token = call.token._replace(cache=cache, state_indices=pages)
    return call._replace(token=token, **{name: paged(x) for name in KEPT if (x := getattr(call, name)) is not None})


def prompt_gates(tokens: int, groups: int) -> None:
    of_tokens, of_heads = torch.zeros(1, tokens, 3, device=DEVICE), torch.zeros(3, device=DEVICE)
    by_triton(group_gates)(of_tokens, of_tokens, of_heads, of_heads, groups, 4)


def mixed(tokens: int, places: int, before: int) -> None:
    by_triton(window_mixture)(**make_mixture(Mixture("", T=tokens, B=1, places=places, before=before)))


def token(groups: int) -> None:
    by_triton(group_gated_delta_step_)(*in_pages(copied(step(groups=groups), DEVICE)))


CASES: dict[str, Iterable[Callable[[], None]]] = {
    "prompts within their window": [partial(mixed, T, 200, T) for T in (13, 14, 150)],
    "prompts beyond it": [partial(mixed, T, places, places) for T, places in ((13, 5), (29, 21))],
    "gates of a prompt": [partial(prompt_gates, T, groups) for T, groups in ((40, 2), (41, 1), (200, 3))],
    "steps in pages": [partial(token, groups) for groups in (1, 2, 3)],
}


@pytest.mark.parametrize("calls", CASES.values(), ids=CASES)
def test_lengths_need_no_code_of_their_own(calls: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch) -> None:
    made: set[Any] = set()

    def launch(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
        made.add((kernel.fn.__name__, *sorted(constants.items())))
        original(kernel, programs, *args, **constants)

    original = launches.launch
    for module in (gates, group_step, launches, mixture):
        monkeypatch.setattr(module, "launch", launch)
    first, *others = calls
    first()
    assert made
    needed = set(made)
    for call in others:
        call()
    assert made == needed
