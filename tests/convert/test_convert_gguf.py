"""A GGUF file as teacher: its weights are those that transformers reads, and omitted digit splitters are restored."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from deltanet_convert.job import prepare, sole_conversion
from deltanet_convert.options import ConvertOptions
from deltanet_convert.storage import gguf_teacher
from deltanet_convert.storage.gguf_teacher import GgufTeacher
from deltanet_convert.storage.safetensors_folder import Checkpoint
from deltanet_convert.storage.teacher_source import resolve_source
from deltanet_hf.errors import UserError
from deltanet_hf.version import install_command
from support.command_line import CommandLine
from support.tiny_conversion import tiny_conversion
from support.tiny_gguf import TOKENS, begun, finish, write_gguf
from support.tiny_models import tiny_teacher


@pytest.mark.usefixtures("quick_fit")
def test_conversion_of_a_gguf_file(tmp_path: Path) -> None:
    kept = write_gguf(tmp_path / "tiny.gguf")
    report = tiny_conversion(tmp_path / "tiny.gguf", tmp_path / "out", dtype="float32", layers="keep:0")
    assert (report["teacher"]["name"], report["teacher"]["folder"]) == ("tiny.gguf", "../tiny.gguf")
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


NO_BIAS = {"attention_bias": False, "mlp_bias": False}
GEMMA = {"layer_types": None, "tie_word_embeddings": True}
# Architectures whose tensors llama.cpp stores in different ways, and options of the family in transformers.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", NO_BIAS),
    "llama, tied": ("llama", {**NO_BIAS, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma2": ("gemma2", GEMMA),
    "gemma3": ("gemma3_text", GEMMA),
    "phi3": ("phi3", {}),
}
SIZES: dict[str, Any] = {
    "vocab_size": len(TOKENS), "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": False,
}  # fmt: skip
HEAD_DIMS = {"gemma2": 32, "gemma3_text": 32, "qwen3": 128}  # transformers reads no other from a GGUF file of Qwen3
QUANTISED = (Type.Q4_1, Type.Q8_0, Type.Q5_0, Type.F16, Type.BF16, Type.F32)
K_QUANTS = {Type.Q4_K: (144, (0, 2)), Type.Q6_K: (210, (208,))}  # bytes of 256 values; places of float16 factors


def write_family(path: Path, label: str, leave_out: str = "", add: str = "") -> None:
    """Writes random weights of a tiny model in many types; K-quants, which `gguf` cannot make, as random bytes."""
    family, changes = FAMILIES[label]
    architecture = label.split(",")[0]
    model = tiny_teacher(family, **{**SIZES, **changes, "head_dim": HEAD_DIMS.get(family, 16)})
    config: Any = model.config
    heads = config.num_attention_heads, config.num_key_value_heads
    writer = begun(
        path, architecture, config.num_hidden_layers, config.hidden_size, config.intermediate_size, heads, context=64
    )
    writer.add_key_length(getattr(config, "head_dim", 16))
    writer.add_value_length(getattr(config, "head_dim", 16))
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_scores([0.0] * len(TOKENS))  # transformers 5.17 needs them for Gemma, and a first token's id
    writer.add_pad_token_id(0)
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    random = np.random.default_rng(0)
    types = iter(QUANTISED * 10)
    for name, tensor in model.state_dict().items():
        module, _, kind = name.rpartition(".")
        if (name == "lm_head.weight" and config.tie_word_embeddings) or (leave_out and leave_out in name):
            continue
        values, stored = tensor.numpy(), f"{names.get_name(module)}.{kind}"
        if values.ndim == 1:
            writer.add_tensor(stored, values)
        elif values.shape[1] % 256 == 0:
            kind_of_k = (Type.Q4_K, Type.Q6_K)[".0." in name]
            size, factors = K_QUANTS[kind_of_k]
            blocks = random.integers(0, 256, (values.shape[0], values.shape[1] // 256, size), dtype=np.uint8)
            for place in factors:
                blocks[..., place : place + 2] = random.random((*blocks.shape[:2], 1)).astype(np.float16).view(np.uint8)
            writer.add_tensor(stored, blocks.reshape(values.shape[0], -1), raw_dtype=kind_of_k)
        else:
            as_type = next(types)
            quantised = gguf.quantize(values, as_type)
            writer.add_tensor(stored, quantised, raw_dtype=as_type)
    if add:
        writer.add_tensor(add, np.ones(4, np.float32))
    finish(writer)


def test_texts_begin_as_the_file_says(tmp_path: Path) -> None:
    for add_bos, begin in ((False, []), (True, [1])):
        write_gguf(tmp_path / "tiny.gguf", add_bos=add_bos)
        teacher = resolve_source(str(tmp_path / "tiny.gguf"), tmp_path / f"copy {add_bos}", None)
        assert AutoTokenizer.from_pretrained(teacher.folder)("a")["input_ids"][:-1] == begin


@pytest.mark.parametrize("fault", ["no begin-of-text token", "no merges"])
def test_a_tokenizer_that_is_saved_wrongly_is_refused(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers 5.17 does both to Gemma 3."""
    write_gguf(tmp_path / "tiny.gguf", add_bos=True)
    teacher = GgufTeacher.open(tmp_path / "tiny.gguf", torch.float32)
    save = teacher.tokenizer.save_pretrained

    def save_wrongly(folder: Path) -> None:
        save(folder)
        file = folder / "tokenizer.json"
        saved = json.loads(file.read_text())
        if fault == "no merges":
            saved["model"]["vocab"] |= {"word": 300, "other": 301}
        else:
            saved["post_processor"] = None
        file.write_text(json.dumps(saved))

    monkeypatch.setattr(teacher.tokenizer, "save_pretrained", save_wrongly)
    with pytest.raises(UserError, match=r"tiny.gguf: transformers .* reads this file's tokenizer wrongly; upgrade"):
        teacher.write(tmp_path / "copy")


@pytest.mark.parametrize(("label", "dtype"), [*((label, torch.bfloat16) for label in FAMILIES), ("llama", None)])
def test_the_copy_is_what_transformers_loads(
    label: str, dtype: torch.dtype | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit, although only blocks of rows are in memory; config, generation config and tokenizer too."""
    write_family(tmp_path / "it.gguf", label, add="rope_freqs.weight")
    expected = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="it.gguf", dtype=dtype or torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    expected.save_pretrained(tmp_path / "expected")
    monkeypatch.setattr(gguf_teacher, "BLOCK_ELEMENTS", 1000)  # several blocks per matrix, the last of them shorter
    copy = resolve_source(str(tmp_path / "it.gguf"), tmp_path / "copy", dtype or torch.float32).folder
    found, wanted = Checkpoint.open(copy), Checkpoint.open(tmp_path / "expected")
    assert found.entries.keys() == wanted.entries.keys()
    assert ("lm_head.weight" in found) == (not expected.config.tie_word_embeddings)
    for name in wanted.entries:
        assert found.dtype(name) == wanted.dtype(name)
        assert torch.equal(found.read(name), wanted.read(name)), name
    for file in ("config.json", "generation_config.json"):
        ours, theirs = (json.loads((folder / file).read_text()) for folder in (copy, tmp_path / "expected"))
        assert ours == theirs


def test_a_killed_copy_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_family(tmp_path / "it.gguf", "llama")
    file, copy = str(tmp_path / "it.gguf"), tmp_path / "copy"
    written = gguf_teacher.ShardWriter.write

    def stop(self: Any, name: str, pieces: Any) -> None:
        if "layers.1" in name:
            raise KeyboardInterrupt
        written(self, name, pieces)

    with monkeypatch.context() as patch:
        patch.setattr(gguf_teacher.ShardWriter, "write", stop)
        with pytest.raises(KeyboardInterrupt):
            resolve_source(file, copy, None)
    assert not list(copy.glob("*.safetensors"))
    resolve_source(file, copy, None)
    finished = (copy / "model.safetensors").stat().st_mtime_ns
    resolve_source(file, copy, None)
    assert (copy / "model.safetensors").stat().st_mtime_ns == finished  # the complete copy is used again
    resolve_source(file, copy, torch.float32)
    assert Checkpoint.open(copy).dtype("model.norm.weight") == torch.float32


def test_tensors_that_do_not_fit_the_config(tmp_path: Path) -> None:
    """transformers makes up the one and drops the other; and a file whose end is cut off."""
    file, missing = tmp_path / "it.gguf", r"'blk\.1\.ffn_down\.weight' .* is missing"
    for change, name, said in (
        ("leave_out", "layers.1.mlp.down_proj", missing),
        ("add", "blk.0.attn_q.bias", r"'blk\.0\.attn_q\.bias' has no place in a llama model"),
    ):
        write_family(file, "llama", **{change: name})
        with pytest.raises(UserError, match=said):
            resolve_source(str(file), tmp_path / "copy", None)
        assert not (tmp_path / "copy").exists()
    write_family(file, "llama")
    file.write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(UserError, match=r"it\.gguf: "):
        resolve_source(str(file), tmp_path / "copy", None)


def test_folder_with_one_gguf_file(tmp_path: Path) -> None:
    folder = tmp_path / "download"
    folder.mkdir()
    write_gguf(folder / "tiny.gguf")
    with sole_conversion(tmp_path / "out"):
        job = prepare(str(folder), tmp_path / "out", ConvertOptions(keep="none"))
        assert job.teacher.name == "tiny.gguf"
        assert job.dtype == torch.bfloat16
        assert (tmp_path / ".out.teacher").exists()
    assert not (tmp_path / ".out.teacher").exists()
    write_gguf(folder / "second.gguf")
    with pytest.raises(UserError, match=r"holds 2 \.gguf files"):
        prepare(str(folder), tmp_path / "out", ConvertOptions())


def test_damaged_gguf_file(tmp_path: Path) -> None:
    for content in (b"", b"GGUF", b"GGUF\x03\x00\x00\x00" + b"\xff" * 40, b"nothing"):
        (tmp_path / "bad.gguf").write_bytes(content)
        with pytest.raises(UserError, match=r"bad\.gguf: transformers cannot load this GGUF file") as caught:
            prepare(str(tmp_path / "bad.gguf"), tmp_path / "out", ConvertOptions())
        assert "\n" not in str(caught.value)


def test_copy_is_removed_after_an_error(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(UserError, match="--keep"), sole_conversion(tmp_path / "out"):
        prepare(str(tmp_path / "tiny.gguf"), tmp_path / "out", ConvertOptions(layers="keep:7"))
    assert [file.name for file in tmp_path.iterdir()] == ["tiny.gguf"]


def test_missing_package_is_named_with_its_extra(
    cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)  # importing it raises ModuleNotFoundError
    assert cli("convert", tmp_path / "tiny.gguf", tmp_path / "out") == 2
    assert cli.err == f"error: gguf is not installed; run {install_command('gguf')}\n"
    assert [file.name for file in tmp_path.iterdir()] == ["tiny.gguf"]
