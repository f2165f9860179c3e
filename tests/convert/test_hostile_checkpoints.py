"""Damaged, contradictory and malicious teachers give one line with file, tensor and remedy; nothing is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deltanet_convert.job import prepare
from deltanet_convert.options import ConvertOptions
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


Change = Callable[[Path], Any]
Rows = Iterable[tuple[Change, Sequence[str]]]


def assert_all_refused(teacher: Path, folder: Path, rows: Rows) -> None:
    """Assert that a copy of `teacher` with each change is refused in one line with these parts, and nothing made."""
    for number, (change, parts) in enumerate(rows):
        copy = Path(shutil.copytree(teacher, folder / str(number) / "teacher"))
        change(copy)
        before = sorted(folder.rglob("*"))
        with pytest.raises(UserError) as caught:
            prepare(str(copy), folder / "out", ConvertOptions())
        message = str(caught.value)
        assert all(part in message for part in parts), (parts, message)
        assert "\n" not in message
        assert len(message) < 1000
        assert sorted(folder.rglob("*")) == before


def edited(name: str, change: Callable[[dict[str, Any]], Any]) -> Change:
    def edit(folder: Path) -> None:
        value = json.loads((folder / name).read_text())
        change(value)
        (folder / name).write_text(json.dumps(value))

    return edit


def config(**keys: Any) -> Change:
    return edited("config.json", lambda values: values.update(keys))


def rope(**keys: Any) -> Change:
    return config(rope_parameters={"rope_type": "default", "rope_theta": 10000.0, **keys})


def written(name: str, text: str) -> Change:
    return lambda folder: (folder / name).write_text(text)


def mapped(name: str, shard: object) -> Change:
    """The index names `shard` for the tensor."""
    return edited(INDEX_FILE, lambda index: index["weight_map"].update({name: shard}))


def weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Change:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / SINGLE_FILE)
        change(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / SINGLE_FILE)

    return edit


def truncated(keep: int) -> Change:
    return lambda folder: (folder / SINGLE_FILE).write_bytes((folder / SINGLE_FILE).read_bytes()[:keep])


def header(change: Callable[[dict[str, Any]], Any]) -> Change:
    """Changes the header of a safetensors file and leaves the data unchanged."""

    def edit(folder: Path) -> None:
        raw = (folder / SINGLE_FILE).read_bytes()
        length = int.from_bytes(raw[:8], "little")
        value = json.loads(raw[8 : 8 + length])
        change(value)
        body = json.dumps(value).encode()
        (folder / SINGLE_FILE).write_bytes(len(body).to_bytes(8, "little") + body + raw[8 + length :])

    return edit


def renamed(name: str) -> Change:
    return header(lambda entries: entries.update({name: entries.pop(Q)}))


def moved_out(folder: Path) -> None:
    """Leaves a link to the first file of weights instead of the file."""
    shard = min(folder.glob("*.safetensors"))
    shutil.move(shard, folder.parent / "elsewhere.safetensors")
    shard.symlink_to(folder.parent / "elsewhere.safetensors")


def looping(folder: Path) -> None:
    (folder / SINGLE_FILE).unlink()
    (folder / SINGLE_FILE).symlink_to(SINGLE_FILE)


def pickled(suffix: str) -> Change:
    def change(folder: Path) -> None:
        (folder / SINGLE_FILE).rename(folder / f"pytorch_model{suffix}")

    return change


def in_two_shards(folder: Path) -> None:
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    save_file({**load_file(second), next(iter(load_file(first))): torch.zeros(1)}, second)


def test_the_undamaged_teachers_open(single: Path, good_shards: Path) -> None:
    first, second = opened(single), opened(good_shards)
    assert first.num_layers == second.num_layers == 2
    assert len(second.checkpoint.files()) > 2
    for name in first.checkpoint.entries:
        assert torch.equal(first.checkpoint.read(name), second.checkpoint.read(name))
    weights(lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))(single)
    assert opened(single).num_layers == 2  # derived frequencies are no extra tensor


O_BIAS = "model.layers.0.self_attn.o_proj.bias"
WEIGHTS: Rows = [
    *((truncated(keep), [f"teacher/{SINGLE_FILE}", "cannot be read", "download"]) for keep in (0, -1)),
    *(
        (header(change), [f"teacher/{SINGLE_FILE}", "cannot be read", "download"])
        for change in (
            lambda entries: entries[Q].update(shape=[1, 1]),
            lambda entries: entries[Q].update(dtype=["F32"]),
            lambda entries: entries.update(__metadata__=[]),
        )
    ),
    (renamed("\udcff"), [SINGLE_FILE, "cannot be read"]),
    *((renamed(name), [SINGLE_FILE, Q, "is missing"]) for name in ("a\nb", "model.layers." + "9" * 5000 + ".x")),
    (looping, [SINGLE_FILE, "cannot be opened"]),
    (
        weights(lambda tensors: tensors.update({"two\nlines": tensors[Q].clone()})),
        [SINGLE_FILE, r"two\nlines", "has no place"],
    ),
    (moved_out, [SINGLE_FILE, "link that leaves the folder"]),
    *((pickled(suffix), [f"pytorch_model{suffix}", "pickled", "safetensors"]) for suffix in (".bin", ".pt")),
    *(
        (weights(lambda tensors, to=to: tensors.update({Q: tensors[Q].to(to)})), [SINGLE_FILE, Q, "not a plain float"])
        for to in (torch.int64, torch.float8_e4m3fn)
    ),
    (weights(lambda tensors: tensors.pop(Q)), [SINGLE_FILE, Q, "is missing"]),
    (weights(lambda tensors: tensors.pop("lm_head.weight")), ["lm_head.weight", "tie_word_embeddings"]),
    (weights(lambda tensors: tensors.update({O_BIAS: torch.zeros(32)})), [SINGLE_FILE, O_BIAS, "has no place"]),
    (weights(lambda tensors: tensors.update({Q: tensors[Q][:16]})), [SINGLE_FILE, Q, "[16, 32]", "[32, 32]"]),
]


def test_damaged_weights(good: Path, tmp_path: Path) -> None:
    assert_all_refused(good, tmp_path, WEIGHTS)


def test_damaged_shards(good: Path, good_shards: Path, tmp_path: Path) -> None:
    first, second = sorted(file.name for file in good_shards.glob("*.safetensors"))[:2]
    shutil.copy(good_shards / first, tmp_path / "outside.safetensors")
    away = ("../../outside.safetensors", "/etc/outside.safetensors", "a/../../../outside.safetensors")
    rows: Rows = [
        *((mapped(Q, shard), [INDEX_FILE, shard, "leaves the folder"]) for shard in away),
        *((mapped(Q, shard), [INDEX_FILE, Q, "not a .safetensors file"]) for shard in ("weights.bin", 7, None, ["a"])),
        (moved_out, [first, "link that leaves the folder"]),
        (lambda folder: (folder / second).unlink(), [INDEX_FILE, second, "download"]),
        (lambda folder: (folder / INDEX_FILE).unlink(), [INDEX_FILE, "the index is missing"]),
        *(
            (written(INDEX_FILE, text), [INDEX_FILE])
            for text in ("", "{", "[]", '{"weight_map": {}}', '{"weight_map": 3}')
        ),
        (mapped("ghost", first), [INDEX_FILE, "ghost", first]),
        (mapped(next(iter(load_file(good_shards / second))), first), [INDEX_FILE, "is not in its shard", first]),
        (edited(INDEX_FILE, lambda index: index["weight_map"].pop(Q)), [Q, "not in weight_map"]),
        (in_two_shards, [second, next(iter(load_file(good_shards / first))), first]),
    ]
    assert_all_refused(good_shards, tmp_path, rows)
    sharded = [("a" * 5000 + ".safetensors", "cannot be opened"), ("\udcff.safetensors", "index.json")]
    rows = [(written(INDEX_FILE, json.dumps({"weight_map": {Q: name}})), [said]) for name, said in sharded]
    assert_all_refused(good, tmp_path / "single", rows)


BANANA = '{"cache_implementation": "banana"}'
CONFIGS: Rows = [
    (config(num_hidden_layers=3), ["num_hidden_layers is 3", "2 layers"]),
    (config(num_hidden_layers=1), ["num_hidden_layers is 1", "2 layers"]),
    (config(num_hidden_layers=10**9), ["num_hidden_layers", "2 layers"]),
    (config(num_hidden_layers="two"), ["num_hidden_layers"]),
    (config(num_key_value_heads=4), ["k_proj", "correct the keys of the config"]),
    (config(intermediate_size=96), ["mlp", "shape"]),
    (config(hidden_act="no such"), ["config.json", "cannot build"]),
    (config(model_type="deltanet_llama"), ["config.json", "converted already"]),
    (config(quantization_config={"quant_method": "gptq"}), ["config.json", "quantised"]),
    (config(architectures=["Qwen2ForSequenceClassification"]), ["config.json", "Qwen2ForSequenceClassification"]),
    (config(model_type=None), ["config.json", "model_type"]),
    (config(deltanet={"kinds": {}}), ["key 'deltanet' belongs to converted models"]),
    (config(rms_norm_eps=float("nan")), ["key 'rms_norm_eps' is nan"]),
    (config(rms_norm_eps=-1e-6), ["key 'rms_norm_eps' is -1e-06"]),
    (config(initializer_range=float("inf")), ["initializer_range"]),
    (config(hidden_size=10**400), ["config.json"]),
    (config(max_position_embeddings=0), ["key 'max_position_embeddings' is 0"]),
    (rope(rope_theta=-1.0), ["key 'rope_parameters.rope_theta' is -1.0"]),
    (rope(rope_theta=float("nan")), ["key 'rope_parameters.rope_theta' is nan"]),
    (rope(rope_type="linear", factor=-2.0), ["key 'rope_parameters.factor' is -2.0"]),
    *(
        (written("generation_config.json", text), ["generation_config.json", said])
        for text, said in (("{", ""), ("[]", ""), ('{"max_new_tokens": "many"}', ""), (BANANA, "banana"))
    ),
    *((written("config.json", text), ["teacher/config.json"]) for text in ("", "{", "[]", "\xff")),
    *((config(model_type=name), [name, *FAMILIES]) for name in ("gpt2", "qwen2_moe", "no_such_type")),
    *(
        (config(model_type="gemma3", **{key: {}}), ["gemma3", "multimodal", key])
        for key in ("vision_config", "audio_config", "text_config")
    ),
]


def test_configs_that_contradict_the_tensors_or_are_not_supported(good: Path, tmp_path: Path) -> None:
    assert_all_refused(good, tmp_path, CONFIGS)


def test_teachers_that_are_no_folder_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.pt").write_bytes(b"\x80\x04.")
    monkeypatch.chdir(tmp_path / "empty")
    names = {name: "no such folder" for name in ("no/such/folder", "./missing", "/missing", "bad name")}
    names["nobody/nothing"] = "nobody/nothing: no such folder here, and it cannot be downloaded"
    for teacher, said in {**names, str(tmp_path / "model.pt"): "pickled"}.items():
        with pytest.raises(UserError, match=said) as caught:
            resolve_source(teacher, tmp_path / "scratch", None)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"config\.json"):
        opened(Path(".."))


def test_values_that_are_not_finite_or_overflow(good: Path, tmp_path: Path) -> None:
    for value, word in ((torch.nan, "NaN"), (torch.inf, "infinite"), (-torch.inf, "infinite"), (1e6, "overflows")):
        folder = Path(shutil.copytree(good, tmp_path / str(value)))
        weights(lambda tensors, value=value: tensors[Q][3].fill_(value))(folder)
        with pytest.raises(UserError, match=word) as caught:
            Checkpoint.open(folder).read(Q, torch.float16)
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


def test_file_that_shrinks_after_the_check(single: Path) -> None:
    checkpoint = Checkpoint.open(single)
    truncated(500)(single)
    with pytest.raises(UserError, match="changed or is damaged"):
        checkpoint.read(Q)
