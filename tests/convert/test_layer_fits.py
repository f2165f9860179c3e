"""Layers that are fitted at once, in threads: the same files as one by one, one error, and no thread left behind."""

from __future__ import annotations

import json
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deltanet_convert.conversion import convert
from deltanet_convert.memory_estimate import ConversionMemory
from deltanet_convert.start import START, fitted, turns
from deltanet_convert.start.turns import others_may_run, own_turn
from deltanet_hf.errors import QualityError, UserError
from support.tiny_conversion import digest, quick_start, teacher_folder, tiny_conversion, tiny_job

LAYERS = 4
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return teacher_folder(tmp_path_factory.mktemp("teacher"), "llama", num_hidden_layers=LAYERS)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Sets the number of layers that are fitted at once; checks that no thread and no setting stays behind."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    state = torch.get_rng_state()

    def choose(number: int) -> None:
        monkeypatch.setattr(ConversionMemory, "layers_at_once", lambda memory, threads: number)

    choose(2)
    yield choose
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("fit")]
    assert torch.get_num_threads() == 1
    assert torch.equal(torch.get_rng_state(), state)
    torch.set_num_threads(threads)


def digests(folder: Path) -> dict[str, str]:
    """Of all files; the plan's estimate of memory is left out."""
    report = json.loads((folder / "conversion.json").read_text())
    for name in ("layers_at_once", "peak_memory_bytes"):
        del report["plan"][name]
    return {**digest(folder), "conversion.json": json.dumps(report)}


@pytest.mark.parametrize(
    "options",
    [
        {"mixer": "gated_deltanet+window", "layers": "keep:1"},
        {"mixer": "deltaproduct", "layers": "keep:0"},  # draws random numbers behind the fit, too
        {"mixer": "kda", "layers": "keep:0"},
        {"profile": "qwen3_5", "layers": "keep:0,3"},  # inserts norms
    ],
)
def test_the_files_do_not_depend_on_how_many_layers_are_fitted_at_once(
    teacher: Path,
    tmp_path: Path,
    at_once: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
) -> None:
    monkeypatch.setattr("deltanet_convert.start.gate_fit.STEPS", 4)
    for number in (1, 3):
        at_once(number)
        tiny_conversion(teacher, tmp_path / str(number), **options)
    assert digests(tmp_path / "1") == digests(tmp_path / "3")


def test_progress_is_shown_in_order_and_no_more_layers_run_than_planned(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, most, shown, lock = [0], [0], [], threading.Lock()
    begun, met = threading.Event(), threading.Event()

    def slow_at_first(attention: Any, layer: Any, *rest: Any) -> dict[str, Any]:
        with others_may_run():
            with lock:
                running[0] += 1
                most[0] = max(most[0], running[0])
            if layer.layer_idx == 0:
                begun.set()
                assert met.wait(30)  # the layer behind it is fitted first
            if layer.layer_idx == 1:
                assert begun.wait(30)
                met.set()
            with lock:
                running[0] -= 1
        return quick_start(attention, layer, *rest)

    monkeypatch.setitem(START, "gated_deltanet", slow_at_first)
    out = tmp_path / "out"
    convert(tiny_job(teacher, out), out, lambda done, total, step, figures: shown.append((done, step)))
    assert shown[:LAYERS] == [(index + 1, f"layer {index}") for index in range(LAYERS)]
    assert most == [2]


def test_random_numbers_of_two_rules_do_not_mix() -> None:
    barrier = threading.Barrier(2, timeout=30)

    def rule(seed: int, meet: Callable[[], object]) -> list[float]:
        with own_turn(seed, CPU):
            found = torch.randn(2).tolist()
            with others_may_run():
                meet()
                with others_may_run():  # a rule that calls another one
                    meet()
            return found + torch.randn(2).tolist()

    alone = [rule(seed, lambda: None) for seed in range(2)]
    found: dict[int, list[float]] = {}
    threads = [threading.Thread(target=lambda s=s: found.update({s: rule(s, barrier.wait)})) for s in range(2)]
    with torch.random.fork_rng(devices=[]):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [found[seed] for seed in range(2)] == alone
        torch.manual_seed(1)
        assert torch.randn(4).tolist() == alone[1]


@pytest.mark.parametrize("mixer", ["gated_deltanet+window", "deltaproduct", "mesa", "linear"])
def test_rules_draw_nothing_where_others_may_run(
    teacher: Path, tmp_path: Path, at_once: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, mixer: str
) -> None:
    blocks = []

    @contextmanager
    def watched() -> Iterator[None]:
        before = torch.get_rng_state()
        with others_may_run():
            yield
            blocks.append(torch.equal(torch.get_rng_state(), before))

    at_once(1)
    monkeypatch.setattr(fitted, "others_may_run", watched)
    monkeypatch.setattr("deltanet_convert.start.gate_fit.STEPS", 2)
    tiny_conversion(teacher, tmp_path / "out", mixer=mixer, layers="keep:1,2,3")
    assert blocks == [True, True]


def broken(index: int) -> Callable[..., dict[str, Any]]:
    """A start rule that fails in one layer, while the next one is being fitted."""
    next_runs = threading.Event()

    def rule(attention: Any, layer: Any, *rest: Any) -> dict[str, Any]:
        figures = quick_start(attention, layer, *rest)
        with others_may_run():
            if layer.layer_idx == index:
                assert next_runs.wait(30)
            if layer.layer_idx == index + 1:
                next_runs.set()
        with torch.no_grad():
            layer.a_proj.weight.mul_(float("nan") if layer.layer_idx >= index else 1)
        return figures

    return rule


def test_an_error_in_one_fit_ends_with_the_first_layers_error(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(START, "gated_deltanet", broken(1))
        with pytest.raises(QualityError, match=r"^layer 1: the start values of a_proj.weight are not finite"):
            tiny_conversion(teacher, tmp_path / "out")
    resumes_to_the_same_files(teacher, tmp_path, ["embedding", "layer 0"], monkeypatch)


def test_a_bad_weight_is_reported_after_the_layers_before_it(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(START, "gated_deltanet", quick_start)
    bad, name = shutil.copytree(teacher, tmp_path / "bad"), "model.layers.2.mlp.up_proj.weight"
    weights = load_file(bad / "model.safetensors")
    weights[name][0, 0] = torch.nan
    save_file(weights, bad / "model.safetensors")
    with pytest.raises(UserError, match=rf"model\.safetensors: tensor '{name}' holds NaN"):
        tiny_conversion(bad, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert steps(tmp_path) == ["embedding", "layer 0", "layer 1"]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where the shell has started pytest in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_does_not_wait_for_the_fits(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C arrives while two layers are being fitted."""
    began = threading.Barrier(2)

    def endless(attention: Any, layer: Any, *rest: Any) -> dict[str, Any]:
        if layer.layer_idx == 0:
            return quick_start(attention, layer, *rest)
        with others_may_run():
            first, pressed = began.wait(30) == 0, 0.0
            while True:
                turns.stop_if_ended()
                if first and time.monotonic() > pressed + 10:  # again: Python loses one that falls into a GC callback
                    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                    pressed = time.monotonic()
                time.sleep(0.01)

    with monkeypatch.context() as patch:
        patch.setitem(START, "gated_deltanet", endless)
        with pytest.raises(KeyboardInterrupt):
            tiny_conversion(teacher, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    resumes_to_the_same_files(teacher, tmp_path, ["embedding", "layer 0"], monkeypatch)


@pytest.mark.parametrize("where", ["Samples", "search_memory", "descend"])
def test_every_long_part_of_a_fit_can_be_stopped(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The conversion fails in its first layer while the second one reaches each part."""
    reached, failed = threading.Event(), threading.Event()
    ended, real = [], getattr(fitted, where)
    rule = START["gated_deltanet"]

    def wait(*args: Any, **kwargs: Any) -> Any:
        reached.set()
        assert failed.wait(30)
        while not turns._thread.ended.is_set():
            time.sleep(0.01)
        return real(*args, **kwargs)

    def start(attention: Any, layer: Any, *rest: Any) -> dict[str, Any]:
        if layer.layer_idx == 0:
            with others_may_run():
                assert reached.wait(30)
            failed.set()
            raise QualityError("the first layer failed")
        try:
            return rule(attention, layer, *rest)
        except turns.Stopped:
            ended.append(layer.layer_idx)
            raise

    monkeypatch.setitem(START, "gated_deltanet", start)
    monkeypatch.setattr(fitted, where, wait)
    with pytest.raises(QualityError, match="the first layer failed"):
        tiny_conversion(teacher, tmp_path / "out")
    assert ended == [1]


def steps(folder: Path) -> list[str]:
    """The finished steps of the interrupted conversion to `out`."""
    lines = (folder / ".out.incomplete" / "journal.jsonl").read_text().splitlines()
    return [entry["step"] for entry in map(json.loads, lines) if "step" in entry]


def resumes_to_the_same_files(
    teacher: Path, folder: Path, finished: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(START, "gated_deltanet", quick_start)
    assert steps(folder) == finished
    tiny_conversion(teacher, folder / "out", resume=True)
    tiny_conversion(teacher, folder / "direct")
    assert digests(folder / "out") == digests(folder / "direct")


@pytest.mark.parametrize(
    ("numbers", "more", "threads", "expected"),
    [
        (128 * 64, 10**6, 8, 1),  # tiny
        (2048 * 576, 302 * 10**6, 2, 2),  # SmolLM2-135M
        (2048 * 576, 150 * 10**6, 64, 4),
        (2048 * 960, 620 * 10**6, 8, 2),
        (2048 * 4096, 1420 * 10**6, 64, 1),  # 8B
    ],
)
def test_cores_and_memory_decide_how_many_layers_are_fitted_at_once(
    monkeypatch: pytest.MonkeyPatch, numbers: int, more: int, threads: int, expected: int
) -> None:
    monkeypatch.undo()
    assert ConversionMemory(0, 0, more, 0, numbers).layers_at_once(threads) == expected
