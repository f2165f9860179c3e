"""`deltanet-hf bench`: names, the check before the times, rows, table, picture, refusals."""

from __future__ import annotations

import dataclasses
import itertools
import json
import platform
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from deltanet_hf.decoding import captured_step
from deltanet_hf.decoding.capture import CAPTURES
from deltanet_hf.decoding.generation import GraphedGeneration
from deltanet_hf.decoding.graphed_step import graphed_step
from deltanet_hf.errors import QualityError, UserError
from deltanet_hf.evaluation.measures import speed
from deltanet_hf.evaluation.measures.decoding_mode import EAGER, GRAPH, MODES, read
from deltanet_hf.evaluation.speed.bench import Conditions, Subject, machine, measure
from deltanet_hf.evaluation.speed.check_decoding import check_decoding, rounding_noise
from deltanet_hf.evaluation.speed.random_models import KINDS, SHAPES, random_model
from deltanet_hf.evaluation.speed.subjects import kind_of, shape_of, subjects
from deltanet_hf.mixers.cache.cache_bytes import cache_bytes
from deltanet_hf.models.cache_bits import cache_bits_of
from support.command_line import CommandLine
from support.replayed_step import EmulatedCapture
from support.tiny_models import HYBRID, TINY_SHAPE, mixture_table, tiny_mixture, tiny_student, tiny_teacher

RANDOM = ("bench", "--random-weights", "135M", "--device", "cpu", "--dtype", "float32")


def test_the_benchmark_of_random_weights(cli: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(SHAPES, "135M", TINY_SHAPE)
    options = ("--context", 16, "--context", 32, "--batch", 3, "--repeats", 1, "--out", tmp_path / "b")
    assert cli(*RANDOM, *options) == 0
    assert "(0." in cli.out
    assert cli.err.count("greedy tokens are right") == 4
    document = json.loads((tmp_path / "b" / "bench.json").read_text())
    assert document["command"].startswith("deltanet-hf bench --random-weights 135M --device cpu")
    rows = document["rows"]
    settings = [(row["shape"], row["kind"], row["mode"], row["batch"], row["context"]) for row in rows]
    kinds, sizes = ("transformers", "teacher", "windows4bit", "window25"), [(3, 16), (3, 32)]
    assert settings == [("135M", kind, "eager", *size) for kind in kinds for size in sizes]
    cache = {(row["kind"], row["context"]): row["cache_mb"] for row in rows}
    assert cache["teacher", 32] == pytest.approx(2 * cache["teacher", 16], rel=0.05)
    assert cache["transformers", 16] == cache["teacher", 16] > 0
    assert all(row["prefill_tokens_per_s"] > 0 and row["decode_ms"] > 0 for row in rows)
    assert (tmp_path / "b" / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_the_machine_is_the_device_that_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a GPU that was not asked for, too."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: f"GPU {device}")
    found = [machine(torch.device(name))["device"] for name in ("cpu", "cuda:1")]
    assert found == [platform.machine(), "GPU cuda:1"]


def test_a_model_beside_its_teacher(tmp_path: Path) -> None:
    for name, model in (("teacher", tiny_teacher("llama")), ("student", tiny_student("llama", layers=HYBRID))):
        model.save_pretrained(tmp_path / name)
    found = subjects(str(tmp_path / "student"), str(tmp_path / "teacher"), None, "-", "auto", "cpu")
    names = [(subject.shape, subject.kind, kind_of(subject.load())) for subject in found]
    assert names == [("0M", "transformers", "teacher"), ("0M", "teacher", "teacher"), ("0M", "converted", "converted")]


def test_a_teacher_as_transformers_runs_it_comes_without_the_fast_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is measured first and eagerly only, whatever the modes; then the same weights are served."""
    monkeypatch.setitem(CAPTURES, "cpu", EmulatedCapture())
    tiny_teacher("llama").save_pretrained(tmp_path / "teacher")
    forms = [
        isinstance(subject.load(), GraphedGeneration)
        for subject in subjects(str(tmp_path / "teacher"), None, None, "-", "auto", "cpu")
    ]
    assert forms == [False, True]
    found = subjects(str(tmp_path / "teacher"), None, None, "-", "auto", "cpu")
    rows = measure(found, Conditions([16], [2], ["graph"], 1), lambda line: None)
    assert [(row["kind"], row["mode"]) for row in rows] == [("transformers", "eager"), ("teacher", "graph")]


def test_names_of_shapes_and_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kind_of(tiny_student("qwen3")) == "converted"
    assert kind_of(tiny_mixture("llama", mixture_table())) == "converted"
    for family in ("llama", "phi3"):
        for count, name in ((8.03e9, "8.0B"), (999.6e6, "1.0B"), (999.4e6, "999M")):
            monkeypatch.setattr("deltanet_hf.evaluation.speed.subjects._parameters", lambda model, count=count: count)
            assert shape_of(tiny_teacher(family)) == name
        monkeypatch.undo()
        assert shape_of(tiny_student(family)) == shape_of(tiny_teacher(family))


def test_the_shapes_have_the_parameters_of_their_models() -> None:
    for shape, billions in {"135M": 0.1345, "1B": 1.2358, "8B": 8.0303}.items():
        model = random_model(shape, "teacher", torch.bfloat16, torch.device("meta"))
        assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(1e9 * billions, rel=1e-3)
    for kind, layout in KINDS.items():
        made = random_model("135M", kind, torch.bfloat16, torch.device("meta"))
        assert cache_bits_of(made) == layout.cache_bits, kind


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_a_mode_that_decodes_something_else_is_found(dtype: torch.dtype) -> None:
    model = tiny_student("llama", layers=HYBRID).to(dtype)
    assert check_decoding(model, EAGER, length=40) <= 0.25

    def forgetful(model: Any, cache: Any) -> Any:
        return EAGER.step(model, DynamicCache(config=model.config))

    with pytest.raises(QualityError, match="broken: a greedily decoded token is"):
        check_decoding(model, dataclasses.replace(EAGER, name="broken", step=forgetful), length=40)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(QualityError, match="is nan standard deviations"):
        check_decoding(model, EAGER, length=40)


def test_a_model_that_amplifies_rounding_has_a_wider_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit follows the dtype's rounding, and no limit lets a token at random pass."""
    model = tiny_teacher("llama")
    text = torch.arange(3, 43).view(2, 20)
    noise = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        model = model.to(dtype)
        logits = model(text).logits[:, -9:].float()
        noise[dtype] = rounding_noise(model, text, logits)
    assert noise[torch.float64] < noise[torch.float32] < 1e-5 < 1e-3 < noise[torch.bfloat16] < 0.1
    assert not any(layer._forward_hooks for layer in model.model.layers)

    def second_best(model: Any, cache: Any) -> Any:
        return lambda token: model(token, past_key_values=cache, use_cache=True).logits[:, -1:].topk(2).indices[..., 1]

    place, mode = "deltanet_hf.evaluation.speed.check_decoding", dataclasses.replace(EAGER, step=second_best)
    for amplified, limit in ((0.2, "0.8"), (0.9, "1")):
        monkeypatch.setattr(f"{place}.rounding_noise", lambda *_, noise=amplified: noise)
        with pytest.raises(QualityError, match=f"is 1.519 standard .*; rounding explains {limit},"):
            check_decoding(model.float(), mode, length=40)
    monkeypatch.setattr(f"{place}.MOST", 2.0)
    assert check_decoding(model, mode, length=40) == pytest.approx(1.519, rel=1e-3)


def test_a_model_that_decodes_wrongly_has_no_row(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(SHAPES, "135M", TINY_SHAPE)
    wrong = ["converted"]

    def check(model: Any, *_: Any, **__: Any) -> float:
        if kind_of(model) in wrong:
            raise QualityError("eager: a greedily decoded token is 2 standard deviations below")
        return 0.0

    monkeypatch.setattr("deltanet_hf.evaluation.speed.bench.check_decoding", check)
    options = ("--context", 16, "--batch", 1, "--repeats", 1, "--out", tmp_path)
    assert cli(*RANDOM, *options) == 0
    assert "135M window25, eager: not measured: eager: a greedily" in cli.err
    kinds = [row["kind"] for row in json.loads((tmp_path / "bench.json").read_text())["rows"]]
    assert kinds == ["transformers", "teacher"]
    wrong += ["teacher"]
    assert cli(*RANDOM, *options) != 0
    assert "nothing was measured" in cli.err


@pytest.mark.parametrize("kind", ["teacher", "all", "windows"])
def test_decoding_by_a_graph(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = {
        "teacher": lambda: tiny_teacher("llama"),
        "all": lambda: tiny_student("llama", mixer="gated_deltanet+window", window=8, sinks=2),
        "windows": lambda: tiny_mixture("gemma2", mixture_table()),
    }[kind]()
    with pytest.raises(UserError, match=r"--mode graph: .* on cpu.*; use --mode eager"):
        check_decoding(model, GRAPH, length=40)
    capture = EmulatedCapture()
    monkeypatch.setitem(CAPTURES, "cpu", capture)
    assert check_decoding(model, GRAPH, length=40) <= 1e-2
    assert (capture.captured, capture.replayed) == (1, 8)
    found = []
    for mode in (EAGER, GRAPH):
        cache, token, texts = DynamicCache(config=model.config), torch.tensor([[5], [9]]), []
        with torch.inference_mode():
            read(model, torch.arange(3, 23).view(2, 10), cache)
            step = mode.step(model, cache)
            for _ in range(24):
                token = step(token).clone()
                texts.append(token)
        found.append(torch.cat(texts, dim=1).tolist())
    assert found[0] == found[1]


def test_a_mode_that_cannot_be_had_leaves_the_others() -> None:
    lines: list[str] = []
    conditions = Conditions(contexts=[16], batches=[2], modes=["graph", "eager"], repeats=1)
    rows = measure([Subject("tiny", "all", lambda: tiny_student("llama"))], conditions, lines.append)
    assert [row["mode"] for row in rows] == ["eager"]
    assert lines[0].partition(": not measured: --mode ")[2][:8] == "graph: t"


@pytest.mark.parametrize("family", ["llama", "gemma2"])  # gemma2's sliding windows are full before the first step
def test_a_step_is_taken_back_before_it_is_captured(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CAPTURES, "cpu", EmulatedCapture())
    for model in (tiny_teacher(family), tiny_student(family)):
        ids = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(0))
        plain, cache = DynamicCache(config=model.config), DynamicCache(config=model.config)
        token = read(model, ids, plain)
        read(model, ids, cache)
        step = graphed_step(model, cache, 4)
        for _ in range(4):
            expected = model(token, past_key_values=plain, use_cache=True).logits
            torch.testing.assert_close(step(token), expected, rtol=1e-4, atol=1e-4)
            token = expected.argmax(-1)


def test_a_graph_has_places_for_its_tokens_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CAPTURES, "cpu", EmulatedCapture())
    monkeypatch.setattr(captured_step, "SPARE", 0)
    monkeypatch.setattr(captured_step, "ALIGNMENT", 1)
    model = tiny_teacher("llama")
    cache = DynamicCache(config=model.config)
    read(model, torch.zeros(1, 5, dtype=torch.long), cache)
    step = graphed_step(model, cache, 2)
    for _ in range(2):
        step(torch.zeros(1, 1, dtype=torch.long))
    with pytest.raises(ValueError, match="more than 2 tokens"):
        step(torch.zeros(1, 1, dtype=torch.long))


def test_a_speed_is_that_of_all_sequences_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Medians of the runs after the first, by prompts and steps in turn."""
    clock = iter(itertools.accumulate([0.0, 90.0, 0.0, 80.0, 0.0, 2.0, 0.0, 3.0, 0.0, 4.0, 0.0, 5.0]))
    monkeypatch.setattr(speed, "_now", lambda cuda: next(clock))
    model = tiny_teacher("llama")
    point = speed.measure_speed(model, 10, batch=3, repeats=2, steps=4)
    assert (point.prefill_tokens_per_second, point.decode_tokens_per_second) == (10.0, 3.0)
    cache = DynamicCache(config=model.config)
    model(torch.zeros(3, 10, dtype=torch.long), past_key_values=cache, use_cache=True)
    assert point.cache_bytes == cache_bytes(cache)
    assert MODES == {"eager": EAGER, "graph": GRAPH}


def test_a_row_has_milliseconds_of_a_step_and_megabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding is checked on no longer texts than the contexts."""
    lengths: list[int] = []
    place = "deltanet_hf.evaluation.speed.bench"
    monkeypatch.setattr(f"{place}.measure_speed", lambda *_: speed.SpeedPoint(16, 15.0, 6.0, 2_500_000, None))
    monkeypatch.setattr(f"{place}.check_decoding", lambda *_, length: lengths.append(length) or 0.0)
    subject = Subject("0M", "teacher", lambda: tiny_teacher("llama"))
    (row,) = measure([subject], Conditions([16], [2], ["eager"], 1), lambda line: None)
    times = {"prefill_tokens_per_s": 15.0, "decode_ms": 333.3333, "cache_mb": 2.5}
    assert row == {"shape": "0M", "kind": "teacher", "mode": "eager", "batch": 2, "context": 16, **times}
    assert lengths == [16]


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("full"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_what_does_not_fit_has_no_row(
    cli: CommandLine, error: RuntimeError, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(SHAPES, "135M", TINY_SHAPE)

    def full(*_: object) -> None:
        raise error

    monkeypatch.setattr("deltanet_hf.evaluation.speed.bench.measure_speed", full)
    monkeypatch.setattr("deltanet_hf.evaluation.speed.bench.check_decoding", lambda *args, **kwargs: 0.0)
    assert cli(*RANDOM, "--context", "2k", "--batch", 1, "--out", tmp_path) != 0
    said = cli.err
    assert said.count("1 x 2048: out of memory") == 4
    assert "nothing was measured" in said
    assert not list(tmp_path.iterdir())


REFUSED: list[tuple[tuple[str, ...], str]] = [
    ((), "give either a model or --random-weights"),
    (("m", "--random-weights", "1B"), "give either a model or --random-weights"),
    (("--random-weights", "2B"), "--random-weights: got '2B', expected one of 135M, 1B, 8B"),
    (("--random-weights", "1B", "--teacher", "t"), "makes its own teacher"),
    (("--random-weights", "1B", "--mixer", "x"), "--mixer: got 'x'"),
    (("--random-weights", "1B", "--dtype", "int8"), "--dtype: got 'int8'"),
    (("m", "--context", "0"), "--context: '0' is no length in tokens; write it as 32768 or 32k"),
    (("m", "--batch", "-1"), "--batch: got -1"),
    (("m", "--batch", "9" * 30), "expected 1 to 1,000,000,000"),
    (("m", "--mode", "fast"), "--mode: got 'fast', expected one of eager"),
    (("no/such/model",), "no such folder"),
]


def test_the_benchmark_refuses(cli: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    taken = (("--random-weights", "135M", "--out", str(tmp_path / "file")), "file: cannot be written (File exists)")
    for arguments, said in [*REFUSED, taken]:
        assert cli("bench", *arguments) == 2, arguments
        assert said in cli.err, arguments
