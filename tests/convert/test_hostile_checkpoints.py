"""Damaged, contradictory and malicious teachers give one line with file, tensor and remedy; nothing is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deltanet_convert.storage.safetensors_folder import INDEX_FILE, SINGLE_FILE, Checkpoint, all_finite
from deltanet_convert.storage.teacher_source import resolve_source
from deltanet_hf.errors import UserError
from deltanet_hf.models.families import FAMILIES
from support.tiny_conversion import opened
from support.tiny_models import tiny_teacher

Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("good")
    tiny_teacher("qwen2", num_hidden_layers=2).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def good_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("shards")
    tiny_teacher("qwen2", num_hidden_layers=2).save_pretrained(folder, max_shard_size="20KB")
    return folder


@pytest.fixture
def single(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "teacher"))


@pytest.fixture
def sharded(good_shards: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good_shards, tmp_path / "teacher"))


def refused(folder: Path, *parts: str) -> None:
    with pytest.raises(UserError) as caught:
        opened(folder)
    message = str(caught.value)
    for part in parts:
        assert part in message, message
    assert "\n" not in message


def edit_json(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    weights = load_file(folder / SINGLE_FILE)
    change(weights)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / SINGLE_FILE)


def edit_header(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Rewrites the header of a safetensors file and leaves the data unchanged."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    body = json.dumps(header).encode()
    file.write_bytes(len(body).to_bytes(8, "little") + body + raw[8 + length :])


def test_the_undamaged_teachers_open(single: Path, good_shards: Path) -> None:
    first, second = opened(single), opened(good_shards)
    assert first.num_layers == second.num_layers == 2
    assert len(second.checkpoint.files()) > 2
    for name in first.checkpoint.entries:
        assert torch.equal(first.checkpoint.read(name), second.checkpoint.read(name))


@pytest.mark.parametrize("keep", [0, -1])
def test_truncated_file(single: Path, keep: int) -> None:
    file = single / SINGLE_FILE
    file.write_bytes(file.read_bytes()[:keep])
    refused(single, str(file), "cannot be read", "download")


def test_what_safetensors_finds_in_a_header_is_one_line(single: Path) -> None:
    edit_header(single / SINGLE_FILE, lambda header: header[Q].update(shape=[1, 1]))
    refused(single, str(single / SINGLE_FILE), "cannot be read", "download")


def test_name_of_two_lines(single: Path) -> None:
    edit_weights(single, lambda weights: weights.update({"two\nlines": weights.pop(Q)}))
    refused(single, SINGLE_FILE, Q, "is missing")
    edit_weights(single, lambda weights: weights.update({Q: weights["two\nlines"].clone()}))
    refused(single, SINGLE_FILE, r"two\nlines", "has no place")


@pytest.mark.parametrize("shard", ["../outside.safetensors", "/etc/outside.safetensors", "a/../../b.safetensors"])
def test_weight_map_leaves_the_folder(sharded: Path, shard: str) -> None:
    shutil.copy(next(sharded.glob("*.safetensors")), sharded.parent / "outside.safetensors")
    edit_json(sharded / INDEX_FILE, lambda index: index["weight_map"].update({Q: shard}))
    refused(sharded, INDEX_FILE, shard, "leaves the folder")


@pytest.mark.parametrize("which", ["single", "sharded"])
def test_link_leaves_the_folder(request: pytest.FixtureRequest, which: str) -> None:
    folder: Path = request.getfixturevalue(which)
    shard = next(folder.glob("*.safetensors"))
    shutil.move(shard, folder.parent / "elsewhere.safetensors")
    shard.symlink_to(folder.parent / "elsewhere.safetensors")
    refused(folder, shard.name, "link that leaves the folder")


def test_links_of_a_hub_cache_are_followed(single: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "abc", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in single.iterdir():
        shutil.move(file, blobs / file.name)
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    assert opened(snapshot).num_layers == 2


@pytest.mark.parametrize("shard", ["weights.bin", 7, None, ["a"]])
def test_weight_map_names_something_else(sharded: Path, shard: object) -> None:
    edit_json(sharded / INDEX_FILE, lambda index: index["weight_map"].update({Q: shard}))
    refused(sharded, INDEX_FILE, Q, "not a .safetensors file")


def test_missing_shard(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    refused(sharded, INDEX_FILE, shard.name, "download")


def test_missing_index(sharded: Path) -> None:
    (sharded / INDEX_FILE).unlink()
    refused(sharded, INDEX_FILE, "the index is missing")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"weight_map": {}}', '{"weight_map": 3}'])
def test_bad_index(sharded: Path, text: str) -> None:
    (sharded / INDEX_FILE).write_text(text)
    refused(sharded, INDEX_FILE)


def test_index_names_a_tensor_that_its_shard_lacks(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[0].name
    edit_json(sharded / INDEX_FILE, lambda index: index["weight_map"].update({"ghost": shard}))
    refused(sharded, INDEX_FILE, "ghost", shard)


def test_shard_holds_a_tensor_that_the_index_lacks(sharded: Path) -> None:
    edit_json(sharded / INDEX_FILE, lambda index: index["weight_map"].pop(Q))
    refused(sharded, Q, "not in weight_map")


def test_tensor_in_two_shards(sharded: Path) -> None:
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    weights = load_file(second)
    name = next(iter(load_file(first)))
    save_file({**weights, name: torch.zeros(1)}, second)
    refused(sharded, second.name, name, first.name)


@pytest.mark.parametrize("suffix", [".bin", ".pt"])
def test_pickled_weights(single: Path, suffix: str) -> None:
    (single / SINGLE_FILE).unlink()
    (single / f"pytorch_model{suffix}").write_bytes(b"\x80\x04.")
    refused(single, f"pytorch_model{suffix}", "pickled", "safetensors")


def test_pickled_file_as_teacher(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"\x80\x04.")
    with pytest.raises(UserError, match="pickled"):
        resolve_source(str(tmp_path / "model.pt"), tmp_path / "scratch", None)


@pytest.mark.parametrize("teacher", ["no/such/folder", "./missing", "/missing", "..", "bad name"])
def test_no_such_teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, teacher: str) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    if teacher == "..":
        refused(Path(teacher), "config.json")
    else:
        with pytest.raises(UserError, match="no such folder"):
            resolve_source(teacher, tmp_path / "scratch", None)


def test_hub_that_does_not_answer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nobody/nothing: no such folder here, and it cannot be downloaded") as caught:
        resolve_source("nobody/nothing", tmp_path / "scratch", None)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float8_e4m3fn])
def test_weights_that_are_no_floats(single: Path, dtype: torch.dtype) -> None:
    edit_weights(single, lambda weights: weights.update({Q: weights[Q].to(dtype)}))
    refused(single, SINGLE_FILE, Q, "not a plain float")


def test_missing_tensor(single: Path) -> None:
    edit_weights(single, lambda weights: weights.pop(Q))
    refused(single, SINGLE_FILE, Q, "is missing")


def test_missing_output_head(single: Path) -> None:
    edit_weights(single, lambda weights: weights.pop("lm_head.weight"))
    refused(single, "lm_head.weight", "tie_word_embeddings")


def test_extra_tensor(single: Path) -> None:
    edit_weights(single, lambda weights: weights.update({"model.layers.0.self_attn.o_proj.bias": torch.zeros(32)}))
    refused(single, SINGLE_FILE, "model.layers.0.self_attn.o_proj.bias", "has no place")


def test_misshapen_tensor(single: Path) -> None:
    edit_weights(single, lambda weights: weights.update({Q: weights[Q][:16]}))
    refused(single, SINGLE_FILE, Q, "[16, 32]", "[32, 32]")


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"num_hidden_layers": 3}, ["num_hidden_layers is 3", "2 layers"]),
        ({"num_hidden_layers": 1}, ["num_hidden_layers is 1", "2 layers"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers", "2 layers"]),
        ({"num_hidden_layers": "two"}, ["num_hidden_layers"]),
        ({"hidden_size": 64}, ["tensor", "hidden_size"]),
        ({"num_key_value_heads": 4}, ["k_proj", "num_key_value_heads"]),
        ({"num_attention_heads": 2, "num_key_value_heads": 2}, ["num_attention_heads"]),
        ({"intermediate_size": 96}, ["mlp", "intermediate_size"]),
        ({"vocab_size": 98}, ["embed_tokens", "vocab_size"]),
        ({"hidden_act": "no such"}, ["config.json", "cannot build"]),
    ],
)
def test_config_contradicts_the_tensors(single: Path, changes: dict[str, Any], parts: list[str]) -> None:
    edit_json(single / "config.json", lambda config: config.update(changes))
    refused(single, "config", *parts)


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff"])
def test_bad_config(single: Path, text: str) -> None:
    (single / "config.json").write_text(text)
    refused(single, str(single / "config.json"))


@pytest.mark.parametrize("model_type", ["gpt2", "qwen2_moe", "no_such_type"])
def test_unsupported_family_is_refused_with_the_list(single: Path, model_type: str) -> None:
    edit_json(single / "config.json", lambda config: config.update(model_type=model_type))
    refused(single, model_type, *FAMILIES)


@pytest.mark.parametrize("key", ["vision_config", "audio_config", "text_config"])
def test_multimodal_config_is_refused_by_name(single: Path, key: str) -> None:
    edit_json(single / "config.json", lambda config: config.update({"model_type": "gemma3", key: {}}))
    refused(single, "gemma3", "multimodal", key)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"model_type": "deltanet_llama"}, "converted already"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({"architectures": ["Qwen2ForSequenceClassification"]}, "Qwen2ForSequenceClassification"),
        ({"model_type": None}, "model_type"),
    ],
)
def test_other_configs_that_are_refused(single: Path, changes: dict[str, Any], part: str) -> None:
    edit_json(single / "config.json", lambda config: config.update(changes))
    refused(single, "config.json", part)


@pytest.mark.parametrize(("value", "word"), [(torch.nan, "NaN"), (torch.inf, "infinite"), (-torch.inf, "infinite")])
def test_weights_that_are_not_finite(single: Path, value: float, word: str) -> None:
    def spoil(weights: dict[str, torch.Tensor]) -> None:
        weights[Q][3, 5] = value

    edit_weights(single, spoil)
    checkpoint = Checkpoint.open(single)
    with pytest.raises(UserError, match=word) as caught:
        checkpoint.read(Q)
    assert SINGLE_FILE in str(caught.value)
    assert Q in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_value_that_is_not_finite_is_found_anywhere(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for size in (0, 1, 7, 64, 1000, 40_000):
        values = (100 * torch.randn(size, generator=generator)).to(dtype)
        assert all_finite(values)
        for place in {0, size // 3, size - 1} if size else ():
            for value in (torch.nan, torch.inf, -torch.inf):
                spoilt = values.clone()
                spoilt[place] = value
                assert not all_finite(spoilt)
    assert all_finite(torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).min], dtype=dtype))


def test_overflow_of_the_asked_dtype(single: Path) -> None:
    edit_weights(single, lambda weights: weights.update({Q: weights[Q].fill_(1e6)}))
    with pytest.raises(UserError, match="overflows"):
        Checkpoint.open(single).read(Q, torch.float16)


def test_file_that_shrinks_after_the_check(single: Path) -> None:
    checkpoint = Checkpoint.open(single)
    file = single / SINGLE_FILE
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(UserError, match="changed or is damaged"):
        checkpoint.read(Q)


def test_derived_rotary_frequencies_are_no_extra_tensor(single: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_weights(single, lambda weights: weights.update({name: torch.ones(4)}))
    assert opened(single).num_layers == 2
