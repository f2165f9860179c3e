"""A GGUF file as teacher: transformers dequantises it, and the digit splitter that it omits is restored."""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from deltanet_convert.job import prepare
from deltanet_convert.options import ConvertOptions
from deltanet_convert.start import START
from deltanet_hf.errors import UserError
from deltanet_recipes.cli import main
from support.tiny_conversion import quick_start, tiny_conversion

HIDDEN, INNER, HEADS, KV, LAYERS, HEAD = 32, 48, 4, 2, 2, 8


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorders the rows of q and k as GGUF stores them: the two rows of a rotary pair are adjacent."""
    return weight.view(heads, 2, HEAD // 2, HIDDEN).transpose(1, 2).reshape(weight.shape)


def write_gguf(path: Path) -> dict[str, torch.Tensor]:
    """Writes a tiny Llama with a byte-level tokenizer that merges '1' and '2'; returns some weights by HF name."""
    torch.manual_seed(0)
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *bytes_to_unicode().values(), "12"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    writer.add_rope_dimension_count(HEAD)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    kept: dict[str, torch.Tensor] = {}

    def add(name: str, *shape: int, heads: int = 0, hf_name: str = "") -> None:
        value = torch.randn(*shape) * 0.2 if len(shape) > 1 else torch.ones(*shape)
        kept[hf_name or name] = value
        writer.add_tensor(name, (permuted(value, heads) if heads else value).contiguous().numpy())

    add("token_embd.weight", len(tokens), HIDDEN)
    add("output_norm.weight", HIDDEN)
    add("output.weight", len(tokens), HIDDEN)
    for i in range(LAYERS):
        layer = f"model.layers.{i}.self_attn."
        add(f"blk.{i}.attn_norm.weight", HIDDEN)
        add(f"blk.{i}.ffn_norm.weight", HIDDEN)
        add(f"blk.{i}.attn_q.weight", HEADS * HEAD, HIDDEN, heads=HEADS, hf_name=layer + "q_proj.weight")
        add(f"blk.{i}.attn_k.weight", KV * HEAD, HIDDEN, heads=KV, hf_name=layer + "k_proj.weight")
        add(f"blk.{i}.attn_v.weight", KV * HEAD, HIDDEN)
        add(f"blk.{i}.attn_output.weight", HIDDEN, HEADS * HEAD)
        add(f"blk.{i}.ffn_gate.weight", INNER, HIDDEN)
        add(f"blk.{i}.ffn_up.weight", INNER, HIDDEN)
        add(f"blk.{i}.ffn_down.weight", HIDDEN, INNER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept


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
