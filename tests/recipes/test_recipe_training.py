"""Stages on a tiny model: losses fall, frozen weights stay, merged adapters equal unmerged ones, runs resume."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from deltanet_hf.errors import UserError
from deltanet_recipes.command import data as data_command
from deltanet_recipes.config import load_recipe
from deltanet_recipes.schema import Align, Distil, Recipe
from deltanet_recipes.training import trainer
from deltanet_recipes.training.adapters import MergedAdapters, lora_targets, merge_lora, train_for
from deltanet_recipes.training.feeds import check_share
from deltanet_recipes.training.logbook import read_log
from deltanet_recipes.training.model_pair import load_student, mixers, teacher_of
from deltanet_recipes.training.pipeline import run
from deltanet_recipes.training.runtime import Runtime
from support.tiny_models import tiny_student
from support.tiny_run import (
    ALIGN,
    CHAT_TEMPLATE,
    DISTIL,
    LAYERS,
    NO_CHECKPOINTS,
    interrupted_at,
    losses,
    make_workplace,
    recipe_tree,
    tiny_recipe,
    write_recipe,
)


def train(workplace: Path, out: Path, stages: list[dict[str, Any]], **changes: Any) -> list[dict[str, Any]]:
    run(tiny_recipe(workplace, out, *stages, **changes))
    return read_log(out)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


NEW = (".a_proj", ".b_proj", ".g_proj", ".conv1d", ".decay", ".self_attn.norm", ".k_offset")
"""Parameters that the teacher does not have."""
ADAPTED = tuple(f"self_attn.{name}_proj.weight" for name in "qkvo")


def test_align_lowers_the_error_of_every_layer_and_moves_what_is_new(workplace: Path, tmp_path: Path) -> None:
    rows = train(workplace, tmp_path / "run", [{**ALIGN, "tokens": 128 * 30}], log=NO_CHECKPOINTS)
    for layer in range(3):
        key = f"held_out.error.{layer}"
        assert rows[-1][key] < 0.85 * rows[0][key]
    before, after = weights(workplace / "student"), weights(tmp_path / "run" / "final")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved
    assert moved == {name for name in before if any(part in name for part in NEW)}


@pytest.mark.usefixtures("real_plots")
def test_layerwise_alignment_also_lowers_every_error(workplace: Path, tmp_path: Path) -> None:
    stage = {**ALIGN, "mode": "layerwise", "tokens": 128 * 30, "cached_tokens": 512}
    rows = train(workplace, tmp_path / "run", [stage])
    for layer in range(3):
        own = [row["held_out.error"] for row in rows if row["stage"] == f"align.{layer}" and "held_out.error" in row]
        assert own[-1] < 0.85 * own[0]
    assert (tmp_path / "run" / "layers.png").is_file()
    assert not list((tmp_path / "run").rglob("activations*"))


def test_layerwise_alignment_keeps_nothing_of_the_layer_before(
    workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU a trainer holds the memory of its CUDA graph. Each is fed the two blocks of rows in turn."""
    trainers: list[weakref.ref[trainer.Trainer]] = []
    fed: list[list[float]] = []
    train_one = trainer.Trainer.run

    def watched(self: trainer.Trainer) -> None:
        assert not any(before() for before in trainers)
        trainers.append(weakref.ref(self))
        fed.append([float(batch.target.sum()) for _ in range(4) for batch in self.feed.step()])
        self.feed.state = 0
        self.itself = self  # type: ignore[attr-defined]  # as compiled layers do
        train_one(self)

    monkeypatch.setattr(trainer.Trainer, "run", watched)
    stage = {**ALIGN, "mode": "layerwise", "tokens": 512, "cached_tokens": 256}
    train(workplace, tmp_path / "run", [stage])
    assert len(trainers) == 3
    assert all(first != second and [first, second] == again for first, second, *again in fed)


def test_layerwise_and_joint_start_from_the_same_errors(workplace: Path, tmp_path: Path) -> None:
    short = {**ALIGN, "tokens": 128}
    joint = train(workplace, tmp_path / "a" / "run", [short])[0]
    layered = train(workplace, tmp_path / "b" / "run", [{**short, "mode": "layerwise"}])
    for layer in range(3):
        first = next(row for row in layered if row["stage"] == f"align.{layer}")
        assert first["held_out.error"] == pytest.approx(joint[f"held_out.error.{layer}"], rel=1e-4)
    errors = [joint[f"held_out.error.{layer}"] for layer in range(3)]
    assert joint["held_out.loss"] == pytest.approx(sum(errors) / 3)


@pytest.mark.parametrize(
    ("settings", "moving"),
    [
        ({"train": "frozen", "optimizer": {"mixer_lr": 6e-2}}, NEW),
        ({"train": "frozen", "optimizer": {"mixer_lr": 3e-3, "projection_lr": 3e-3}}, ("self_attn",)),
        ({"train": "lora", "optimizer": {"mixer_lr": 1e-2, "rest_lr": 1e-2}}, (*NEW, *ADAPTED, "mlp")),
        ({"train": "lora", "optimizer": {"mixer_lr": 3e-3, "projection_lr": 3e-3}}, ("self_attn", "mlp")),
        ({"train": "full", "hidden_weight": 0.5}, ("self_attn", "mlp", "norm")),
        ({"train": "full", "optimizer": {"name": "muon", "mixer_lr": 6e-3, "rest_lr": 2e-3}},
         ("self_attn", "mlp", "norm")),
    ],
)  # fmt: skip
def test_distil_lowers_the_kl_and_moves_what_it_should(
    workplace: Path, tmp_path: Path, settings: dict[str, Any], moving: tuple[str, ...]
) -> None:
    stage = {**DISTIL, "tokens": 128 * 20, **settings}
    rows = train(workplace, tmp_path / "run", [stage], log=NO_CHECKPOINTS)
    assert rows[-1]["held_out.kl"] < 0.97 * rows[0]["held_out.kl"]
    before, after = weights(workplace / "student"), weights(tmp_path / "run" / "final")
    assert before.keys() == after.keys()
    for name in before:
        same = torch.equal(before[name], after[name])
        assert same != any(part in name for part in moving), name


def test_final_model_loads_and_has_the_logged_perplexity(workplace: Path, tmp_path: Path) -> None:
    rows = train(workplace, tmp_path / "run", [DISTIL], data={"isolate_documents": False})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final").eval()
    corpus = next((tmp_path / "run" / "tokens").iterdir())
    tokens = torch.from_file(
        str(corpus / "tokens.bin"), size=(corpus / "tokens.bin").stat().st_size // 2, dtype=torch.int16
    )
    starts = torch.from_numpy(np.load(corpus / "starts.npy"))
    first = int(starts[torch.searchsorted(starts, starts[-1] - 256, right=True) - 1])
    ids = tokens[first : first + 4 * 64 + 1].long()
    total, count = 0.0, 0
    with torch.no_grad():
        for row in range(4):
            piece = ids[row * 64 : (row + 1) * 64 + 1]
            logits = model(piece[:-1][None]).logits[0].log_softmax(-1)
            keep = piece[:-1] != 2
            total -= float(logits.gather(-1, piece[1:, None])[keep].sum())
            count += int(keep.sum())
    assert math.exp(total / count) == pytest.approx(rows[-1]["held_out.perplexity"], rel=1e-3)
    for name in ("README.md", "conversion.json", "recipe.json", "tokenizer.json"):
        assert (tmp_path / "run" / "final" / name).is_file()


def test_distillation_learns_the_replies_of_chats(workplace: Path, tmp_path: Path) -> None:
    tokenizer_file = workplace / "student" / "tokenizer_config.json"
    settings = json.loads(tokenizer_file.read_text())
    settings["chat_template"] = CHAT_TEMPLATE
    tokenizer_file.write_text(json.dumps(settings))
    chat = [{"role": "user", "content": "w1 w2 w3"}, {"role": "assistant", "content": "w4 w5 w6"}]
    (tmp_path / "chat.jsonl").write_text((json.dumps({"m": chat}) + "\n") * 200)
    source = {"path": str(tmp_path / "chat.jsonl"), "messages_key": "m"}
    data = {"sources": [source], "holdout_tokens": 128, "repeat": True}
    stage = {**DISTIL, "kl_weight": 0.0, "ce_weight": 1.0}
    rows = train(workplace, tmp_path / "run", [stage], data=data, log=NO_CHECKPOINTS)
    assert rows[-1]["held_out.ce"] < 0.8 * rows[0]["held_out.ce"]


def test_merged_adapters_equal_unmerged_ones(workplace: Path) -> None:
    student = load_student(str(workplace / "student"), torch.float32)
    names = [name for name, _ in student.named_parameters()]
    train_for(student, Distil(tokens=8192, lora_rank=3), seed=1)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in student.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1, generator=generator)
    before, sums = student.state_dict(), {}  # weight plus up times down, whatever the rank
    for name in before:
        if name.endswith("base_layer.weight"):
            up, down = (before[name.replace("base_layer", f"lora_{part}.default")] for part in "BA")
            sums[name.replace("base_layer.", "")] = before[name] + up @ down
    assert len(sums) == len(lora_targets(load_student(str(workplace / "student")), "all"))
    ids = torch.arange(4, 40)[None]
    trained = {name: p for name, p in student.named_parameters() if p.requires_grad}

    def outputs() -> tuple[torch.Tensor, ...]:
        logits = student(ids).logits
        return logits.detach(), *torch.autograd.grad(logits.square().mean(), list(trained.values()))

    unmerged = outputs()
    adapters = MergedAdapters(student)
    for _ in range(2):
        adapters.multiply()
        torch.testing.assert_close(outputs(), unmerged, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        merge_lora(student)
        merged = student(ids).logits
    torch.testing.assert_close(merged, unmerged[0], rtol=1e-4, atol=1e-5)
    assert [name for name, _ in student.named_parameters()] == names
    for name, weight in sums.items():
        torch.testing.assert_close(student.get_parameter(name).data, weight)
    plain = load_student(str(workplace / "student"), torch.float32)
    with torch.no_grad():
        assert not torch.allclose(plain(ids).logits, merged, atol=1e-2)


@torch.no_grad()
def test_adapters_are_merged_in_float32(workplace: Path) -> None:
    """Whatever the dtype of the weights: what is smaller than its rounding is not lost."""
    student = load_student(str(workplace / "student"), torch.bfloat16)
    train_for(student, Distil(tokens=8192, lora_rank=3), seed=1)
    layer: Any = student.model.layers[1].mlp.up_proj
    weight, up, down = layer.base_layer.weight.clone(), layer.lora_B.default.weight, layer.lora_A.default.weight
    up.fill_(1e-4)
    assert (weight.dtype, up.dtype) == (torch.bfloat16, torch.float32)
    merge_lora(student)
    torch.testing.assert_close(student.model.layers[1].mlp.up_proj.weight, weight.float() + up @ down)


def test_adapters_go_to_mlps_and_all_attention(tmp_path: Path) -> None:
    make_workplace(tmp_path, layers=(0, 2))
    student = load_student(str(tmp_path / "student"), torch.float32)
    targets = lora_targets(student, "all")
    assert {name.split(".", 3)[3] for name in targets if ".1." in name} >= {"self_attn.q_proj", "mlp.up_proj"}
    own = [f"model.layers.{index}.self_attn.{name}_proj" for index in (0, 2) for name in "qkvo"]
    assert [name for name in targets if "self_attn" in name and (".0." in name or ".2." in name)] == own
    in_full = lora_targets(student, "all", in_full=True)
    assert in_full == [name for name in targets if name not in own]
    assert list(mixers(student)) == [0, 2]
    assert lora_targets(student, "attention") == [name for name in targets if ".mlp." not in name]


@pytest.mark.parametrize("family", ["qwen3_moe", "granitemoe"])
def test_adapters_leave_experts_and_routers_alone(family: str) -> None:
    student = tiny_student(family, layers=(0, 2))
    train_for(student, Distil(tokens=8192, lora_rank=3), seed=1)
    trained = {name for name, parameter in student.named_parameters() if parameter.requires_grad}
    assert any("lora_A" in name for name in trained)
    assert not [name for name in trained if "expert" in name or ".gate." in name or "router" in name]


def test_micro_batches_give_the_same_training(workplace: Path, tmp_path: Path) -> None:
    """Of a layer too, whose run goes on with other micro-batches. Five held-out rows are no pairs, nor nine cached."""
    layerwise = {**ALIGN, "name": "layers", "mode": "layerwise", "tokens": 128 * 12, "cached_tokens": 64 * 9}
    stages = [layerwise, *({**stage, "tokens": 512} for stage in (ALIGN, DISTIL))]
    data = {"holdout_tokens": 64 * 5}
    one = train(workplace, tmp_path / "a" / "run", stages, data=data)
    engine = {"device": "cpu", "gradient_checkpointing": True}
    with interrupted_at(5):
        train(workplace, tmp_path / "b" / "run", stages, data=data, engine=engine)
    small = [{**stage, "micro_batch_rows": 1} for stage in stages]
    two = train(workplace, tmp_path / "b" / "run", small, data=data, engine=engine)
    for key in ("loss", "held_out.loss"):
        values = [[row[key] for row in rows if key in row] for rows in (one, two)]
        assert values[0] == pytest.approx(values[1], rel=1e-4)


def start(recipe: Path, *arguments: str, processes: int = 1) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--standalone"]
    return subprocess.Popen(
        [*command, "-m", "deltanet_recipes.distill", str(recipe), *arguments],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


@pytest.mark.parametrize("kind", ["joint", pytest.param("layerwise", marks=pytest.mark.slow)])
def test_killed_run_continues_with_the_same_losses_and_weights(workplace: Path, tmp_path: Path, kind: str) -> None:
    stages = [{**ALIGN, "mode": kind, "tokens": 128 * 24}, {**DISTIL, "tokens": 128 * 24}]
    train(workplace, tmp_path / "a" / "run", stages)
    stop_at = ("align", 5) if kind == "joint" else ("align.1", 5)
    out = tmp_path / "b" / "run"
    out.parent.mkdir()
    recipe = write_recipe(out.parent, recipe_tree(workplace, stages, output=str(out)))
    for stage, step in (stop_at, ("distil", 5)):
        process = start(recipe)
        deadline = time.time() + 240
        while process.poll() is None and time.time() < deadline:
            if any(row["stage"] == stage and row["step"] >= step for row in read_log(out)):
                break
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not (out / "final").exists()
    run(load_recipe(recipe))
    assert losses(out) == losses(tmp_path / "a" / "run")
    one, two = weights(tmp_path / "a" / "run" / "final"), weights(out / "final")
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_start_killed_before_its_first_checkpoint_leaves_no_rows(workplace: Path, tmp_path: Path) -> None:
    stages = [{**ALIGN, "tokens": 128 * 4}]
    with interrupted_at(1):
        train(workplace, tmp_path / "run", stages)
    assert [row["step"] for row in read_log(tmp_path / "run")] == [0, 1]
    assert [row["step"] for row in train(workplace, tmp_path / "run", stages)] == [0, 1, 2, 3, 4]


def assert_two_equal_one(
    workplace: Path, folder: Path, stages: list[dict[str, Any]], sharding: str, rel: float = 1e-4, **changes: Any
) -> None:
    """Two processes have the losses of one."""
    train(workplace, folder / "a" / "run", stages, **changes)
    (folder / "b").mkdir()
    recipe = write_recipe(folder / "b", recipe_tree(workplace, stages, output=str(folder / "b" / "run"), **changes))
    process = start(recipe, f"engine.sharding={sharding}", processes=2)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors.decode()[-2000:]
    for one, two in zip(*(losses(folder / name / "run") for name in "ab"), strict=True):
        assert one[:2] == two[:2]
        assert one[2] == pytest.approx(two[2], rel=rel)


@pytest.mark.parametrize("sharding", [pytest.param("none", marks=pytest.mark.slow), "fsdp2"])
def test_two_processes_equal_one(workplace: Path, tmp_path: Path, sharding: str) -> None:
    """The single process takes its rows one by one, so that both runs sum the same parts of each gradient.

    AdamW's first step has full length even for a gradient that consists of rounding errors only.
    """
    stages = [{**stage, "tokens": 512, "micro_batch_rows": 1} for stage in (ALIGN, DISTIL)]
    assert_two_equal_one(workplace, tmp_path, stages, sharding)
    one_final, two_final = (weights(tmp_path / part / "run" / "final") for part in "ab")
    for name in one_final:
        torch.testing.assert_close(one_final[name], two_final[name], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_sharded_weights_of_two_dtypes_train_like_one_process(workplace: Path, tmp_path: Path) -> None:
    """Frozen weights are bfloat16, as they are stored, trained ones float32, and merged ones float32 and frozen."""
    shutil.copytree(workplace, tmp_path / "models")
    student = AutoModelForCausalLM.from_pretrained(workplace / "student", dtype=torch.bfloat16)
    student.save_pretrained(tmp_path / "models" / "student")
    distil = {**DISTIL, "tokens": 512, "micro_batch_rows": 1}
    stages = [distil, {**distil, "kind": "long"}]
    engine = {"device": "cpu", "precision": "bf16"}
    assert_two_equal_one(tmp_path / "models", tmp_path, stages, "fsdp2", rel=0.01, engine=engine)
    kept = load_file(tmp_path / "b" / "run" / "stages" / "00-distil.safetensors")
    assert "model.embed_tokens.weight" not in kept  # not trained, so not saved
    assert any(".mlp." in name for name in kept)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["none", "fsdp2"])
def test_two_processes_align_layer_by_layer_like_one(workplace: Path, tmp_path: Path, sharding: str) -> None:
    """`micro_batch_rows` may exceed the rows that a process has of a step."""
    stages = [{**ALIGN, "mode": "layerwise", "tokens": 512, "cached_tokens": 256, "micro_batch_rows": 2}]
    assert_two_equal_one(workplace, tmp_path, stages, sharding)


def test_every_process_deletes_its_activations_before_one_deletes_the_folder(
    workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run" / "checkpoints"
    met: list[tuple[int, int]] = []  # at each barrier: the numbers of finished mixers and of folders with activations
    monkeypatch.setattr(
        Runtime,
        "barrier",
        lambda self: met.append((len(list(folder.glob("*/mixer-*"))), len(list(folder.glob("*/activations-*"))))),
    )
    train(workplace, tmp_path / "run", [{**ALIGN, "mode": "layerwise", "tokens": 512, "cached_tokens": 256}])
    assert (LAYERS, 0) in met


def test_processes_that_would_leave_rows_out_are_refused() -> None:
    stage = Distil(tokens=8192, batch_tokens=8192, sequence_length=2048)  # 4 rows per step
    for world in (1, 2, 4):
        check_share(stage, world)
    for world in (3, 8):
        with pytest.raises(UserError, match=f"distil: {world} processes cannot share the 4 rows of a step evenly"):
            check_share(stage, world)
    layered = Align(tokens=6144, batch_tokens=6144, sequence_length=512, micro_batch_rows=4, mode="layerwise")
    check_share(layered, 3)
    with pytest.raises(UserError, match=r"micro_batch_rows \(4\) must divide the 6 rows"):
        check_share(layered, 2)


def test_output_of_another_recipe_is_refused(workplace: Path, tmp_path: Path) -> None:
    train(workplace, tmp_path / "run", [{**ALIGN, "tokens": 128}])
    with pytest.raises(UserError, match=r"holds a run with another recipe\.stages\.0\.tokens \(128, now 256\); choose"):
        train(workplace, tmp_path / "run", [{**ALIGN, "tokens": 256}])
    for damaged in ("", "[]", '{"run": 3}'):
        (tmp_path / "run" / "run.json").write_text(damaged)
        with pytest.raises(UserError, match=r"run.json: is damaged .*; choose another output, or delete it"):
            train(workplace, tmp_path / "run", [{**ALIGN, "tokens": 128}])


def test_a_run_does_not_go_on_with_another_text_or_student(workplace: Path, tmp_path: Path) -> None:
    student = shutil.copytree(workplace / "student", tmp_path / "student")
    text = shutil.copy(workplace / "text.jsonl", tmp_path)
    changes: dict[str, Any] = {"student": str(student), "data": {"sources": [{"path": str(text)}]}}
    with interrupted_at(3):
        train(workplace, tmp_path / "run", [ALIGN], **changes)
    report = (tmp_path / "run" / "data.json").read_text()
    lines = Path(text).read_text().splitlines(keepends=True)
    for changed, key in ((lines[1:], "documents"), (lines[::-1], "sha256")):
        Path(text).write_text("".join(changed))
        with pytest.raises(UserError, match=rf"holds a run with another text\.0\.{key} \("):
            train(workplace, tmp_path / "run", [ALIGN], **changes)
        assert (tmp_path / "run" / "data.json").read_text() == report
    Path(text).write_text("".join(lines))
    stored = weights(student)
    save_file({name: t + 1 for name, t in stored.items()}, student / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"holds a run with another student\.model\.safetensors \("):
        train(workplace, tmp_path / "run", [ALIGN], **changes)
    save_file(stored, student / "model.safetensors", metadata={"format": "pt"})
    assert train(workplace, tmp_path / "run", [ALIGN], **changes)[-1]["step"] == 12


def test_other_data_does_not_replace_the_report_of_a_run(
    workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(workplace, tmp_path / "run", [{**ALIGN, "tokens": 128}])
    report = (tmp_path / "run" / "data.json").read_text()
    recipe = tmp_path / "recipe.yaml"
    data_command(recipe)
    assert f"counts: {tmp_path / 'run' / 'data.json'}" in capsys.readouterr().out
    other = shutil.copy(workplace / "text.jsonl", tmp_path / "other.jsonl")
    with Path(other).open("a") as file:
        file.write('{"text": "w1 w2"}\n')
    with pytest.raises(UserError, match=r"holds a run with another text\.0\.\w+ \(.*; choose another folder"):
        data_command(recipe, [f"data.sources=[{{path: {other}}}]"])
    assert (tmp_path / "run" / "data.json").read_text() == report


def test_a_run_that_ended_before_its_first_step_can_be_another(workplace: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the stages need 12,800,000 tokens"):
        train(workplace, tmp_path / "run", [{**ALIGN, "tokens": 128 * 100_000}], data={"repeat": False})
    assert train(workplace, tmp_path / "run", [{**ALIGN, "tokens": 128}])[-1]["loss"]


def test_a_separator_that_the_student_does_not_have_is_refused(workplace: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="separator: got 64, but the student's token ids end at 63"):
        train(workplace, tmp_path / "run", [ALIGN], data={"separator": 64})
    assert not (tmp_path / "run").exists()


def test_teacher_is_found_by_name_beside_the_student(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_workplace(tmp_path, layers=(0,))
    (tmp_path / "student" / "conversion.json").write_text(json.dumps({"teacher": {"name": "teacher"}}))
    monkeypatch.chdir("/")
    assert train(tmp_path, tmp_path / "run", [{**ALIGN, "tokens": 128}])


def test_a_teacher_is_found_where_it_was_or_asked_for(tmp_path: Path) -> None:
    student, teacher = tmp_path / "student", tmp_path / "deep" / "teacher"
    for folder in (student, teacher):
        folder.mkdir(parents=True)
    (teacher / "config.json").write_text("{}")
    record = {"teacher": {"name": "teacher", "revision": None, "folder": "../deep/teacher"}}
    (student / "conversion.json").write_text(json.dumps(record))
    recipe = Recipe.model_validate(recipe_tree(tmp_path, [ALIGN]))
    assert teacher_of(recipe).name == str(teacher)
    assert teacher_of(recipe.model_copy(update={"teacher": "owner/name"})) == ("owner/name", None)
    teacher.rename(tmp_path / "gone")
    with pytest.raises(UserError, match=r"no model at .*deep/teacher; say where it is now: teacher=PATH"):
        teacher_of(recipe)
    (student / "conversion.json").write_text(json.dumps({"teacher": {"name": "gpt2", "revision": "607a30d"}}))
    assert teacher_of(recipe) == ("gpt2", "607a30d")
    (student / "conversion.json").write_text("{")
    with pytest.raises(UserError, match=r"conversion\.json: not valid JSON"):
        teacher_of(recipe)


def test_teacher_of_another_shape_and_unconverted_student_are_refused(workplace: Path, tmp_path: Path) -> None:
    make_workplace(tmp_path, layers=(0,))
    config = json.loads((tmp_path / "teacher" / "config.json").read_text())
    (tmp_path / "teacher" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    with pytest.raises(UserError, match="it is not the model this student was converted from"):
        train(workplace, tmp_path / "run", [ALIGN], teacher=str(tmp_path / "teacher"))
    with pytest.raises(UserError, match="teacher: /no/where: no such folder"):
        train(workplace, tmp_path / "run", [ALIGN], teacher="/no/where")
    assert not (tmp_path / "run").exists()  # the run was refused before anything was tokenised
    with pytest.raises(UserError, match="which is not a converted model"):
        train(workplace, tmp_path / "run2", [ALIGN], student=str(workplace / "teacher"), teacher="x")
