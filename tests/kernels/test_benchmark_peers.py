"""Peers of the benchmarks, with modules in their places: the conventions of their arguments, and their rows."""

import argparse
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from deltanet_kernels import naive_gated_delta_rule, naive_mesa
from deltanet_kernels.channel_gates.cpu import chunked as channel_chunked
from deltanet_kernels.gated_delta_rule.cpu import chunked
from deltanet_kernels.mesa.solve import STEPS
from measuring.kernels import channel_gates, erase, harness, inner_training

SHAPE = (2, 37, 2, 16)
OPTIONS = argparse.Namespace(first_seconds=60.0, repeats=1)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators in PyTorch, and a clock that only calls."""

    def timed(run: Callable[[], object], repeats: int = 20) -> float:
        run()
        return 1.0

    for module in (channel_gates, erase, inner_training):
        monkeypatch.setattr(module, "DEVICE", "cpu")
    for name in ("median_ms", "peak_gib", "call_without_waiting"):
        monkeypatch.setattr(harness, name, timed)
    monkeypatch.setattr(harness, "graph_us", lambda run, calls, repeats: timed(run))
    monkeypatch.setattr(erase, "chunk_gated_delta_rule_triton", chunked)
    monkeypatch.setattr(channel_gates, "chunk_channel_gated_delta_rule_triton", channel_chunked)
    for module in (channel_gates, erase):
        module.reference.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, path: str, function: Callable[..., Any]) -> None:
    """A module `fla.ops.NAME` with `function` under its own name."""
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module = ModuleType(path)
    setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, path, module)


def chunk_gated_delta_product(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, num_householder: int
) -> tuple[torch.Tensor, None]:
    """One decay per token, then its writes one after the other; n_h times as many k, v and beta."""
    B, T, H, K = q.shape
    assert k.shape == v.shape == (B, num_householder * T, H, K)
    assert (g.shape, beta.shape) == ((B, T, H), (B, num_householder * T, H))
    S, outputs = q.new_zeros(B, H, K, K, dtype=torch.float32), []
    for t in range(T):
        S = g[:, t, :, None, None].exp() * S
        for j in range(num_householder * t, num_householder * (t + 1)):
            key, value, strength = k[:, j].float(), v[:, j].float(), beta[:, j].unsqueeze(-1)
            error = value - torch.einsum("bhk,bhkv->bhv", key, S)
            S = S + torch.einsum("bhk,bhv->bhkv", strength * key, error)
        outputs.append(K**-0.5 * torch.einsum("bhk,bhkv->bhv", q[:, t].float(), S))
    return torch.stack(outputs, dim=1).to(q.dtype), None


def chunk_comba(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, p: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, None]:
    return naive_gated_delta_rule(q, k, v, g, beta, erase="undecayed")[0], None


def chunk_simple_gla(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, None]:
    return naive_gated_delta_rule(q, k, v, g, torch.ones_like(g), erase="off")[0], None


def chunk_gated_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, None]:
    return naive_gated_delta_rule(q, k, v, g, beta)[0], None


PEERS: dict[str, tuple[str, Callable[..., Any]]] = {
    erase.WRITES: ("fla.ops.gated_delta_product", chunk_gated_delta_product),
    "off": ("fla.ops.simple_gla", chunk_simple_gla),
    "undecayed": ("fla.ops.comba", chunk_comba),
    "decayed": ("fla.ops.gated_delta_rule", chunk_gated_delta_rule),
}


def test_every_form_that_is_said_to_have_a_peer_has_one() -> None:
    assert tuple(PEERS) == erase.PEERS


@pytest.mark.parametrize("form", list(erase.FORMS))
def test_forms_of_the_erase_term(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["deltanet", *(["mapped"] if form in erase.MAPPED else []), *(["fla"] if form in PEERS else [])]
    if form in PEERS:
        install(monkeypatch, *PEERS[form])
    for name in names:
        row = erase.measure({"shape": list(SHAPE), "form": form, "impl": name}, OPTIONS)
        assert row["rel_error"] < 0.01, name
        assert {"fwd_ms", "fwdbwd_ms", "peak_gib"} < row.keys()
        assert "error" not in row


def test_writes_in_another_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def reversed_writes(q: Any, k: Any, v: Any, g: Any, beta: Any, n: int) -> Any:
        k, v, beta = (x.unflatten(1, (-1, n)).flip(2).flatten(1, 2) for x in (k, v, beta))
        return chunk_gated_delta_product(q, k, v, g, beta, n)

    reversed_writes.__name__ = "chunk_gated_delta_product"
    install(monkeypatch, "fla.ops.gated_delta_product", reversed_writes)
    row = erase.measure({"shape": list(SHAPE), "form": erase.WRITES, "impl": "fla"}, OPTIONS)
    assert row["error"] == "wrong results"


def test_the_steps_of_two_writes_are_what_the_mixer_computes() -> None:
    from deltanet_hf.mixers.deltaproduct import interleave

    x, _ = erase.make(SHAPE, erase.FORMS[erase.WRITES])
    side_by_side = {name: x[name].unflatten(1, (-1, 2)).flatten(2, 3) for name in ("k", "v", "beta")}
    wanted = interleave(x["q"], side_by_side["k"], side_by_side["v"], x["g"], side_by_side["beta"])
    found = erase.arguments(x, erase.FORMS[erase.WRITES])
    assert all(torch.equal(found[name], y) for name, y in zip(("q", "k", "v", "g", "beta"), wanted, strict=True))


@pytest.mark.parametrize("rule", channel_gates.RULES)
@pytest.mark.parametrize("strongest", [-1.0, -5.0])
def test_our_rows_of_channel_gates(rule: str, strongest: float) -> None:
    row = channel_gates.measure(
        {"rule": rule, "shape": list(SHAPE), "gates": [strongest, 0.0], "impl": "deltanet"}, OPTIONS
    )
    assert row["rel_error"] < 0.01
    assert {*harness.TIMES, "peak_gib"} < row.keys()


def test_the_peer_of_bounded_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []

    def chunk_kda(*leaves: torch.Tensor, use_qk_l2norm_in_kernel: bool, safe_gate: bool) -> tuple[torch.Tensor]:
        assert use_qk_l2norm_in_kernel
        told.append(safe_gate)
        return (channel_gates.ours("kda")(*leaves),)

    install(monkeypatch, "fla.ops.kda", chunk_kda)
    for impl in ("fla", channel_gates.BOUNDED):
        told.clear()
        labels = {"rule": "kda", "shape": list(SHAPE), "gates": [-5.0, 0.0], "impl": impl}
        assert channel_gates.measure(labels, OPTIONS)["rel_error"] < 0.01
        assert set(told) == {impl == channel_gates.BOUNDED}


def chunk_mesa_net(*tensors: torch.Tensor, max_CG_iteration: int, use_qk_l2norm_in_kernel: bool) -> Any:
    """No factor on the output, and states after it."""
    assert max_CG_iteration == STEPS
    assert tensors[5].shape == tensors[0].shape[2:]
    o = naive_mesa(*tensors, scale=1.0, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)[0]  # type: ignore[misc]
    return o, None, None


def test_mesa_and_its_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inner_training, "CHECKED", 20)
    install(monkeypatch, "fla.ops.mesa_net", chunk_mesa_net)
    labels = {"operator": "mesa", "shape": list(SHAPE)}
    for name in ("deltanet", "fla"):
        row = inner_training.measure(labels | {"impl": name}, OPTIONS)
        assert row["rel_error"] < 0.01
        assert {"fwd_ms", "fwdbwd_ms", "peak_gib"} < row.keys()

    def scaled(*tensors: torch.Tensor, **given: Any) -> Any:
        return (tensors[0].shape[-1] ** -0.5 * chunk_mesa_net(*tensors, **given)[0],)

    def without_a_number(*tensors: torch.Tensor, **given: Any) -> Any:
        return (torch.nan * chunk_mesa_net(*tensors, **given)[0],)

    for wrong in (scaled, without_a_number):
        wrong.__name__ = "chunk_mesa_net"
        install(monkeypatch, "fla.ops.mesa_net", wrong)
        row = inner_training.measure(labels | {"impl": "fla"}, OPTIONS)
        assert row["error"] == "wrong results"
        assert "fwd_ms" not in row
