"""A mixer's prefill computes its elementwise work in few kernels: the same results as the separate operations."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from deltanet_hf.fast.decoder import fast_mixer
from deltanet_kernels.dispatch import Operator
from support.plain_form import plain_form
from support.read_in_parts import read_in_parts
from support.tiny_models import tiny_student

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
JOINED = {"prompt_inputs", "gate_values", "window_mixture", "window_keep"}
TOKENS = torch.randint(3, 97, (2, 13), generator=torch.Generator().manual_seed(4)).to(DEVICE)
WINDOW = {"window": 3, "sinks": 2}
ROUNDING = {"rtol": 1e-4, "atol": 1e-4}
SETTINGS: dict[str, dict[str, Any]] = {
    "faithful": {},
    "beside a window": WINDOW,
    "one state per key head": {**WINDOW, "expand_kv": False, "k_offset": False},
    "qwen3_5": {"profile": "qwen3_5"},
    "activations": {**WINDOW, "qk_activation": "silu", "v_activation": "silu", "conv_size": 2},
    "nothing around the state": {**WINDOW, "conv_size": 0, "k_offset": False, "output_norm": "none"},
    "no gate": {**WINDOW, "output_gate": False, "output_norm": "shared"},
    "neither norm nor gate": {**WINDOW, "output_gate": False, "output_norm": "none"},
    "a low-rank gate": {**WINDOW, "output_gate_rank": 4},
    "no rotation": {**WINDOW, "rope": False},
    "shared projections": {**WINDOW, "shared_kv": True},
    "convolved keys": {**WINDOW, "conv_on": "k"},
    "strong writes": {"allow_neg_eigval": True},
}


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Sends the joined operators to their Triton form, and lists the calls of them."""
    calls: list[str] = []
    real = Operator.unchecked

    def unchecked(operator: Operator[..., Any, Any], call: Any) -> Any:
        if operator.__name__ not in JOINED:
            return real(operator, call)
        calls.append(operator.__name__)
        function = operator.triton() if INTERPRETED or ON_GPU else operator.cpu
        return function(call)

    monkeypatch.setattr(Operator, "unchecked", unchecked)
    return calls


def apart(function: Callable[..., Any], *args: Any) -> Any:
    """Computes a function with the plain form."""
    with plain_form():
        return function(*args)


def student(family: str = "llama", layers: tuple[int, ...] = (0, 2), **changes: Any) -> PreTrainedModel:
    return tiny_student(family, layers=layers, **changes).to(DEVICE)


@torch.no_grad()
def read(model: Any, lengths: tuple[int, ...] = (13,), mask: Tensor | None = None, rows: int = 2) -> Tensor:
    """Logits of the tokens, read in parts of these lengths."""
    return read_in_parts(model, TOKENS[:rows], lengths, mask)


@pytest.mark.skipif(ON_GPU, reason="compares the PyTorch forms")
@pytest.mark.parametrize("changes", SETTINGS.values(), ids=SETTINGS)
def test_on_a_cpu_every_bit_is_as_before(changes: dict[str, Any]) -> None:
    model = student(layers=(1,), **changes).bfloat16()
    assert torch.equal(read(model, (9, 4)), apart(read, model, (9, 4)))


@pytest.mark.parametrize(
    "name",
    ["beside a window", "nothing around the state", "faithful", pytest.param("activations", marks=pytest.mark.slow)],
)
def test_kernels_compute_the_same(name: str, joined: list[str]) -> None:
    """Whole, in parts, and token by token."""
    model = student(layers=(0,), **SETTINGS[name])
    wanted = apart(read, model)
    assert not joined
    for lengths, rows in (((13,), 1), ((7, 1, 2), 2)):
        found = read(model, lengths, rows=rows)
        torch.testing.assert_close(found, wanted[:rows, : sum(lengths)], **ROUNDING)
    beside = "window" in SETTINGS[name]
    assert (
        joined[: 4 if beside else 2]
        == ["prompt_inputs", "gate_values", "window_keep", "window_mixture"][: 4 if beside else 2]
    )


@pytest.mark.parametrize("family", ["phi3", pytest.param("gemma3_text", marks=pytest.mark.slow)])
def test_kernels_in_other_families(family: str, joined: list[str]) -> None:
    """Partly rotated heads; a window of the family's own, and learned norms."""
    model = student(family, (0,), **WINDOW)
    wanted = apart(read, model, (8,))
    torch.testing.assert_close(read(model, (5, 3)), wanted, **ROUNDING)
    assert set(joined) == JOINED


def test_kernels_of_several_writes(joined: list[str]) -> None:
    model = student(layers=(0,), mixer="deltaproduct", **WINDOW, k_offset=True)
    torch.testing.assert_close(read(model, (9, 4), rows=1), apart(read, model)[:1], **ROUNDING)
    assert set(joined) == JOINED


def test_padding_keeps_the_separate_convolution(joined: list[str]) -> None:
    model = student(layers=(0,), **WINDOW)
    mask = torch.ones_like(TOKENS)
    mask[1, :4] = mask[0, 11:] = 0  # in both parts; one without padding is read by the kernels
    real = mask.bool()
    wanted = apart(read, model, (13,), mask)
    torch.testing.assert_close(read(model, (9, 4), mask)[real], wanted[real], **ROUNDING)
    assert set(joined) == {"gate_values", "window_mixture"}


def test_packed_rows_keep_the_separate_convolution(joined: list[str]) -> None:
    model = student(layers=(0,), **WINDOW)
    positions = torch.cat([torch.arange(8), torch.arange(5)]).expand(2, -1).to(DEVICE)

    @torch.no_grad()
    def packed() -> Tensor:
        return model(TOKENS, position_ids=positions, use_cache=False).logits

    torch.testing.assert_close(packed(), apart(packed), **ROUNDING)
    assert set(joined) == {"gate_values", "window_mixture"}


def test_a_compiler_sees_the_separate_operations(joined: list[str]) -> None:
    model = student(layers=(0,), **WINDOW)
    compiled = torch.compile(lambda: model(TOKENS, use_cache=False).logits, backend="eager")
    with torch.no_grad():
        found = compiled()
        assert not joined
        torch.testing.assert_close(found, model(TOKENS).logits, **ROUNDING)
    assert joined


@torch.no_grad()
def test_a_rotation_that_does_not_fit_is_refused() -> None:
    model = student(layers=(0,), **WINDOW)
    x = torch.zeros(2, 5, model.config.hidden_size, device=DEVICE)
    for angles in ((1, 4, 8), (3, 5, 8), (1, 5, 7), (1, 5, 64), (5, 8)):
        table = torch.ones(angles, device=DEVICE)
        with pytest.raises(ValueError, match="cos"):
            fast_mixer(model.model.layers[0].self_attn, False)(x, (table, table))


@torch.no_grad()
def test_a_prompt_without_tokens_is_refused() -> None:
    model = student(layers=(0,), **WINDOW)
    x, table = torch.zeros(1, 0, model.config.hidden_size), torch.zeros(1, 0, 8)
    with pytest.raises(ValueError, match="none of them 0"):
        fast_mixer(model.model.layers[0].self_attn, False)(x.to(DEVICE), (table.to(DEVICE), table.to(DEVICE)))
