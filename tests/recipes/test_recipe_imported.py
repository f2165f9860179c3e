"""Recipes on an imported Qwen3.5 model: LoRA adapts its mixers too, and there is no align stage."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

from deltanet_convert.export.import_qwen3_5 import plan_import, write_import
from deltanet_hf.errors import UserError
from deltanet_recipes.training.adapters import train_for
from deltanet_recipes.training.estimate import estimates
from deltanet_recipes.training.logbook import read_log
from deltanet_recipes.training.model_pair import is_imported, load_student, mixers
from deltanet_recipes.training.optim import parameter_groups
from deltanet_recipes.training.pipeline import run
from deltanet_recipes.training.runtime import Runtime
from support.tiny_run import (
    ALIGN,
    CHAT_TEMPLATE,
    DISTIL,
    NO_CHECKPOINTS,
    SHAPE,
    make_tokenizer,
    make_workplace,
    tiny_recipe,
)

LINEAR = {
    **{key: SHAPE[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings")},
    "num_hidden_layers": 4,  # three linear ones and one of gated softmax attention
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.15,
    "tie_word_embeddings": True,
}

FAST = {**DISTIL, "optimizer": {"mixer_lr": 1e-2, "rest_lr": 1e-2}}
FULL = {**FAST["optimizer"], "projection_lr": 1e-2}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`student`: an imported model; `native`: that model before the import; `teacher`: a Llama of its vocabulary."""
    folder = make_workplace(tmp_path_factory.mktemp("models"))
    shutil.rmtree(folder / "student")
    torch.manual_seed(3)
    Qwen3_5ForCausalLM(Qwen3_5TextConfig(**LINEAR)).save_pretrained(folder / "native")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder / "native")
    plan = plan_import(folder / "native", None, 10**9)
    write_import(plan, folder / "student", resume=False, overwrite=False, progress=lambda done, total: None)
    return folder


def train(workplace: Path, out: Path, stages: list[dict[str, Any]], teacher: str, **changes: Any) -> Path:
    """Run a recipe and return the folder of the final model."""
    return run(tiny_recipe(workplace, out, *stages, teacher=str(workplace / teacher), **changes))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def moved(before: Path, after: Path) -> set[str]:
    one, two = weights(before), weights(after)
    assert one.keys() == two.keys()
    return {name for name in one if not torch.equal(one[name], two[name])}


@pytest.mark.parametrize(
    ("settings", "precision"),
    [({"train": "lora"}, "bf16"), ({"train": "full"}, "fp32"), ({"train": "frozen", "optimizer": FULL}, "bf16")],
)
def test_another_model_teaches_and_only_what_should_moves(
    workplace: Path, tmp_path: Path, settings: dict[str, Any], precision: str
) -> None:
    steps = 20 if settings["train"] == "frozen" else 10
    stage = {**FAST, "tokens": 128 * steps, **settings}
    engine = {"device": "cpu", "precision": precision}
    final = train(workplace, tmp_path / "run", [stage], "teacher", engine=engine, log=NO_CHECKPOINTS)
    rows = read_log(tmp_path / "run")
    assert rows[-1]["held_out.kl"] < 0.97 * rows[0]["held_out.kl"]
    names = set(weights(workplace / "student"))
    projections = {
        n for n in names if n.endswith("_proj.weight") and not n.endswith(("a_proj.weight", "b_proj.weight"))
    }
    expected = {
        "lora": projections,
        "full": {name for name in names if "embed_tokens" not in name},
        "frozen": {name for name in names if ".linear_attn." in name},
    }
    assert len(projections) == 3 * 5 + 4 + 4 * 3
    assert moved(workplace / "student", final) == expected[settings["train"]]


def test_it_can_be_its_own_teacher_and_the_result_generates_in_batches(workplace: Path, tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text((json.dumps({"text": "w1 w2 w3 w4 w5 w6 w7 w8"}) + "\n") * 200)
    stage = {**FAST, "kl_weight": 0.1, "ce_weight": 1.0, "tokens": 128 * 20}
    data = {"sources": [{"path": str(tmp_path / "text.jsonl")}]}
    final = train(workplace, tmp_path / "run", [stage], "student", data=data, log=NO_CHECKPOINTS)
    rows = read_log(tmp_path / "run")
    assert rows[0]["held_out.kl"] == pytest.approx(0.0, abs=1e-6)
    assert rows[-1]["held_out.ce"] < 0.8 * rows[0]["held_out.ce"]
    card = (final / "README.md").read_text()
    assert "# student, trained with student as its teacher" in card
    assert "onverted" not in card
    loaded: Any = AutoModelForCausalLM.from_pretrained(final, output_loading_info=True)
    model, report = loaded
    assert not report["missing_keys"]
    assert is_imported(model)
    ids, mask = torch.randint(4, 64, (2, 12), generator=torch.Generator().manual_seed(1)), torch.ones(2, 12).long()
    mask[1, :5] = 0
    greedy: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    together = model.eval().generate(ids * mask, attention_mask=mask, **greedy)[:, 12:]
    assert torch.equal(together[0], model.generate(ids[:1], **greedy)[0, 12:])
    assert torch.equal(together[1], model.generate(ids[1:, 5:], **greedy)[0, 7:])


def test_the_plan_counts_what_is_trained(workplace: Path, tmp_path: Path) -> None:
    for train_what in ("lora", "full", "frozen"):
        stage = {**DISTIL, "train": train_what}
        recipe = tiny_recipe(workplace, tmp_path / "run", stage, teacher=str(workplace / "teacher"))
        student = load_student(recipe.student, torch.float32)
        assert list(mixers(student)) == [0, 1, 2]
        (found,) = estimates(recipe.stages, student, Runtime(recipe.engine), holdout_tokens=0)
        train_for(student, recipe.stages[0], seed=0)  # type: ignore[arg-type]
        parts = [entry for mixer in mixers(student).values() for entry in mixer.named_parameters()]
        in_mixers = sum(p.numel() for name, p in parts if p.requires_grad and "lora" not in name)
        trained = sum(p.numel() for p in student.parameters() if p.requires_grad)
        assert (found.in_mixers, found.rest) == (in_mixers, trained - in_mixers)
        if train_what == "lora":  # adapters of mixers too have the rate of what the teacher has
            groups = parameter_groups(student, recipe.stages[0].optimizer)
            assert {group["peak_lr"] for group in groups} == {recipe.stages[0].optimizer.rest_lr}


def test_alignment_is_refused(workplace: Path, tmp_path: Path) -> None:
    stages = [{**ALIGN, "name": "first"}, DISTIL]
    with pytest.raises(UserError, match=r"^stages\.first: [^\n]*no softmax attention[^\n]*\(stages\.first=null\)$"):
        train(workplace, tmp_path / "run", stages, "teacher")
    assert not (tmp_path / "run").exists()


def test_teachers_that_cannot_teach_it_are_refused(workplace: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"teacher: .*'qwen3_5_text'.*`deltanet-hf import` wrote"):
        train(workplace, tmp_path / "run", [DISTIL], "native")
    with pytest.raises(UserError, match=r"num_hidden_layers 3, the student 4; set hidden_weight to 0"):
        train(workplace, tmp_path / "run", [{**DISTIL, "hidden_weight": 0.5}], "teacher")
    shutil.copytree(workplace / "teacher", tmp_path / "teacher")
    file = tmp_path / "teacher" / "tokenizer.json"
    file.write_text(file.read_text().replace('"w7"', '"w8-"').replace('"w8"', '"w7"'))
    with pytest.raises(UserError, match=r"teacher: .* has token 'w7' at 12, the student at 11; .*same vocabulary"):
        train(workplace, tmp_path / "run", [DISTIL], str(tmp_path / "teacher"))
    config = json.loads((workplace / "teacher" / "config.json").read_text())
    (tmp_path / "teacher" / "config.json").write_text(json.dumps({**config, "vocab_size": 65}))
    with pytest.raises(UserError, match=r"vocab_size 65, the student 64; give one with the same vocabulary"):
        train(workplace, tmp_path / "run", [DISTIL], str(tmp_path / "teacher"))
    assert not (tmp_path / "run").exists()
