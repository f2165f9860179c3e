"""A GGUF file as teacher: transformers dequantises it, and the digit splitter that it omits is restored."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from deltanet_convert.job import prepare
from deltanet_convert.options import ConvertOptions
from deltanet_convert.start import START
from deltanet_hf.errors import UserError
from deltanet_recipes.cli import main
from support.tiny_conversion import quick_start, tiny_conversion
from support.tiny_gguf import write_gguf


def test_conversion_of_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(START, "gated_deltanet", quick_start)
    kept = write_gguf(tmp_path / "tiny.gguf")
    report = tiny_conversion(tmp_path / "tiny.gguf", tmp_path / "out", dtype="float32", layers="keep:0")
    assert report["teacher"]["name"] == "tiny.gguf"
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    state = model.state_dict()
    for name in ("q_proj", "k_proj"):
        full = f"model.layers.0.self_attn.{name}.weight"
        torch.testing.assert_close(state[full], kept[full])
    # Without the digit splitter the merge of 1 and 2 would apply.
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.convert_ids_to_tokens(tokenizer("a12")["input_ids"]) == ["a", "1", "2"]
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []


def test_folder_with_one_gguf_file(tmp_path: Path) -> None:
    folder = tmp_path / "download"
    folder.mkdir()
    write_gguf(folder / "tiny.gguf")
    job = prepare(str(folder), tmp_path / "out", ConvertOptions())
    assert job.source.name == "tiny.gguf"
    assert job.dtype == torch.bfloat16
    job.close()
    assert not (tmp_path / ".out.teacher").exists()
    write_gguf(folder / "second.gguf")
    with pytest.raises(UserError, match=r"holds 2 \.gguf files"):
        prepare(str(folder), tmp_path / "out", ConvertOptions())


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\x00\x00\x00" + b"\xff" * 40, b"nothing"])
def test_damaged_gguf_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(UserError, match=r"bad\.gguf: transformers cannot load this GGUF file") as caught:
        prepare(str(tmp_path / "bad.gguf"), tmp_path / "out", ConvertOptions())
    assert "\n" not in str(caught.value)


def test_copy_is_removed_after_an_error(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(UserError, match="--layers"):
        prepare(str(tmp_path / "tiny.gguf"), tmp_path / "out", ConvertOptions(layers="keep:7"))
    assert [file.name for file in tmp_path.iterdir()] == ["tiny.gguf"]


def test_missing_package_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)  # importing it raises ModuleNotFoundError
    monkeypatch.setattr(sys, "argv", ["deltanet-hf", "convert", str(tmp_path / "tiny.gguf"), str(tmp_path / "out")])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert capsys.readouterr().err == "error: gguf is not installed; run pip install 'deltanet-hf[gguf]'\n"
    assert [file.name for file in tmp_path.iterdir()] == ["tiny.gguf"]
