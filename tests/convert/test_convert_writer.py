"""The shard writer: the safetensors library reads its files, and the order of writing does not change the bytes."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from deltanet_convert.storage.safetensors_folder import Checkpoint
from deltanet_convert.storage.shard_writer import ShardWriter, TensorSpec, plan_layout
from deltanet_hf.errors import UserError

TENSORS = {
    "a": torch.randn(3, 5).bfloat16(),
    "b": torch.randn(7),
    "c": torch.randn(2, 2, 2).half(),
    "empty": torch.zeros(0, 4),
    "scalar": torch.tensor(2.5),
    "large": torch.randn(64, 8).bfloat16(),
    "last": torch.randn(3).bfloat16(),
}
SPECS = [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in TENSORS.items()]


def write_all(folder: Path, shard_size: int, names: list[str] | None = None) -> None:
    folder.mkdir()
    writer = ShardWriter(folder, plan_layout(SPECS, shard_size))
    writer.prepare()
    for name in names or list(TENSORS):
        writer.write(name, TENSORS[name].flatten().split(4))
    writer.finish()


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("shard_size", [1, 200, 10**9])
def test_library_reads_what_was_written(tmp_path: Path, shard_size: int) -> None:
    write_all(tmp_path / "out", shard_size)
    found = {}
    for file in sorted((tmp_path / "out").glob("*.safetensors")):
        with safe_open(file, framework="pt") as shard:
            assert shard.metadata() == {"format": "pt"}
        found |= load_file(file)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_shards_stay_within_the_size_and_the_index_is_right(tmp_path: Path) -> None:
    write_all(tmp_path / "out", 200)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == TENSORS.keys()
    assert index["metadata"]["total_size"] == sum(t.numel() * t.dtype.itemsize for t in TENSORS.values())
    layout = plan_layout(SPECS, 200)
    for shard in layout.shards:
        data = sum(layout.specs[name].nbytes for name in shard.offsets)
        assert data <= 200 or len(shard.offsets) == 1
    assert Checkpoint.open(tmp_path / "out").entries.keys() == TENSORS.keys()  # this package's strict reader accepts it


def test_offsets_are_multiples_of_the_item_size() -> None:
    for shard in plan_layout(SPECS, 10**9).shards:
        for name, offset in shard.offsets.items():
            assert offset % TENSORS[name].dtype.itemsize == 0


def test_order_and_repetition_do_not_change_the_bytes(tmp_path: Path) -> None:
    write_all(tmp_path / "one", 200)
    write_all(tmp_path / "two", 200, [*reversed(TENSORS), "a", "large"])
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_dtype_is_converted(tmp_path: Path) -> None:
    value = torch.randn(10)
    writer = ShardWriter(tmp_path, plan_layout([TensorSpec("w", (10,), torch.bfloat16)], 100))
    writer.prepare()
    writer.write("w", [value])
    writer.finish()
    assert torch.equal(load_file(tmp_path / "model.safetensors")["w"], value.bfloat16())


@pytest.mark.parametrize("pieces", [[torch.zeros(3)], [torch.zeros(4), torch.zeros(4)]])
def test_wrong_number_of_elements_is_an_error(tmp_path: Path, pieces: list[torch.Tensor]) -> None:
    writer = ShardWriter(tmp_path, plan_layout([TensorSpec("w", (7,), torch.float32)], 100))
    writer.prepare()
    with pytest.raises(ValueError, match=r"w: .* layout"):
        writer.write("w", pieces)


def test_nothing_has_its_final_name_before_finish(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, plan_layout(SPECS, 200))
    writer.prepare()
    writer.write("a", [TENSORS["a"]])
    writer.sync()
    assert all(file.name.endswith(".tmp") for file in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("call", "code", "message"),
    [
        *((call, errno.ENOSPC, "disk is full") for call in ("posix_fallocate", "pwrite", "fsync", "replace")),
        ("pwrite", errno.EROFS, "cannot be written"),
    ],
)
def test_refusals_of_the_disk_are_clear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int, message: str
) -> None:
    def refuse(*args: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(UserError, match=message) as caught:
        write_all(tmp_path / "out", 200)
    assert str(tmp_path / "out") in str(caught.value)
