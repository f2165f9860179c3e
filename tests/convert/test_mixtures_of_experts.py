"""Teachers that are mixtures of experts: names on the disk, memory, rounding and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from deltanet_convert.layer_step import LayerStep
from deltanet_convert.layer_stream import LayerStream
from deltanet_convert.storage.safetensors_folder import INDEX_FILE, SINGLE_FILE
from deltanet_hf.errors import UserError
from support.allocated import peak_bytes
from support.tiny_conversion import opened, teacher_folder, tiny_conversion, tiny_job
from support.tiny_models import tiny_teacher
from tests.convert.test_convert_families import held_out_check, texts_of

MIXTURES = ["qwen3_moe", "olmoe", "mixtral", "granitemoe", "gpt_oss"]


def change_weights(folder: Path, **changes: Any) -> None:
    """Replaces tensors of a checkpoint by part of their names; None removes them."""
    weights = load_file(folder / SINGLE_FILE)
    for part, value in changes.items():
        name = next(name for name in weights if name.endswith(part.replace("__", ".")))
        del weights[name]
        if value is not None:
            weights[name] = value
    save_file(weights, folder / SINGLE_FILE)


def in_many_files(folder: Path) -> None:
    """One file per tensor: files are mapped into memory as a whole, and the mappings are counted."""
    weights = load_file(folder / SINGLE_FILE)
    files = {name: f"model-{index}.safetensors" for index, name in enumerate(weights)}
    for name, file in files.items():
        save_file({name: weights[name]}, folder / file)
    (folder / SINGLE_FILE).unlink()
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": files}))


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_are_read_whatever_their_names_are(tmp_path: Path, family: str) -> None:
    """As they are published, and as they are in memory."""
    model = tiny_teacher(family)
    folder = teacher_folder(tmp_path / "teacher", family, max_shard_size="20KB")
    for _ in range(2):
        checkpoint = opened(folder).checkpoint
        for name, tensor in model.state_dict().items():
            assert torch.equal(checkpoint.read(name), tensor), name
            if tensor.dim() == 3:
                assert torch.equal(checkpoint.read_index(name, 2, torch.float32), tensor[2])
        for shard in folder.glob("model*"):
            shard.unlink()
        save_file(model.state_dict(), folder / SINGLE_FILE)


def test_experts_are_not_held_in_memory(tmp_path: Path) -> None:
    sizes = {"num_experts": 64, "moe_intermediate_size": 512, "mlp_only_layers": [], "num_hidden_layers": 1}
    folder = teacher_folder(tmp_path / "teacher", "qwen3_moe", **sizes)
    in_many_files(folder)
    job = tiny_job(folder, tmp_path / "out")
    stream = LayerStream(job.teacher)
    stream.learn_arguments(128)
    step = LayerStep(stream, job.plan.student, torch.float32, 0, torch.device("cpu"))
    experts = 4 * 3 * 32 * 512 * 64
    assert peak_bytes(lambda: step.begin(0, torch.randn(2, 128, 32))) < experts / 4
    assert not [name for name in stream.layers[0].state_dict() if ".experts." in name]


@pytest.mark.usefixtures("quick_fit")
def test_the_student_is_measured_with_rounded_experts(tmp_path: Path) -> None:
    folder = teacher_folder(tmp_path / "teacher", "mixtral")
    texts = texts_of(tiny_job(folder, tmp_path / "out", layers="every:2"))
    report = tiny_conversion(folder, tmp_path / "out", dtype="bfloat16", layers="every:2")
    ids = torch.arange(3, 90)[None]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    for name, tensor in tiny_teacher("mixtral").state_dict().items():
        if ".experts." in name:
            assert torch.equal(model.state_dict()[name], tensor.bfloat16().float())
    assert report["held_out"] == held_out_check(folder, model, texts.held_out)
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32)
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_incomplete_experts_and_other_numbers_of_them_are_refused(tmp_path: Path) -> None:
    lacks = "an expert between 0 and 3 lacks a matrix"
    for part, value, message in (
        ("experts__1__w2__weight", None, lacks),
        ("experts__1__w3__weight", torch.zeros(5, 32), "the experts' matrices differ in shape"),
        ("experts__3__w1__weight", None, lacks),
    ):
        folder = teacher_folder(tmp_path / part, "mixtral")
        change_weights(folder, **{part: value})
        with pytest.raises(UserError, match=message):
            opened(folder)
    folder = teacher_folder(tmp_path / "more", "olmoe")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"num_experts": 4', '"num_experts": 8'))
    with pytest.raises(UserError, match="sizes, heads, experts"):
        opened(folder)
    with pytest.raises(UserError, match="key 'clip_qkv'"):
        opened(teacher_folder(tmp_path / "clipped", "olmoe", clip_qkv=8.0))
