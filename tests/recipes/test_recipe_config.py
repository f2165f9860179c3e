"""A wrong recipe is refused with one clear line per problem, before anything is loaded."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import BaseModel

from deltanet_hf.errors import UserError
from deltanet_recipes.cli import COMMANDS
from deltanet_recipes.config import load_recipe
from deltanet_recipes.schema import Distil, DistilBase, Recipe
from deltanet_recipes.shipped import recipe_path, recipes_command, shipped_recipes
from support.tiny_run import ALIGN, DISTIL, recipe_tree, write_recipe


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "student").mkdir()
    (tmp_path / "student" / "config.json").write_text("{}")
    (tmp_path / "student" / "conversion.json").write_text('{"teacher": "t"}')
    (tmp_path / "text.jsonl").write_text('{"text": "w1"}\n')
    return tmp_path


def refused(place: Path, tree: dict[str, Any], *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_recipe(write_recipe(place, tree), overrides)
    return str(caught.value)


def test_overrides_reach_nested_keys_and_stages_by_kind(place: Path) -> None:
    path = write_recipe(place, recipe_tree(place, [ALIGN, DISTIL]))
    changes = ["stages.distil.tokens=256", "stages.0.optimizer.mixer_lr=1.0e-4", "seed=7"]
    recipe = load_recipe(path, [*changes, "stages.distill.kl_weight=0.25", "stages.0.optimizer.clip=.inf"])
    align, distil = recipe.stages
    assert (align.optimizer.mixer_lr, align.optimizer.clip) == (1e-4, float("inf"))
    assert isinstance(distil, Distil)
    assert (distil.tokens, distil.kl_weight, recipe.seed) == (256, 0.25, 7)


def test_all_problems_are_listed_at_once(place: Path) -> None:
    tree = recipe_tree(place, [{**ALIGN, "tokns": 1}, {**DISTIL, "batch_tokens": 100}], sed=3)
    message = refused(place, tree)
    assert "stages.0.tokns: unknown key" in message
    assert "sed: unknown key" in message
    assert "batch_tokens (100) must be a multiple of sequence_length (64)" in message


def test_a_student_that_was_not_converted_is_named(place: Path) -> None:
    (place / "student" / "conversion.json").unlink()
    message = refused(place, recipe_tree(place, [ALIGN]))
    assert (
        f"student: {place / 'student'} has no conversion.json, which names its teacher; give a folder that" in message
    )


def test_contradictions(place: Path) -> None:
    rows: list[tuple[list[dict[str, Any]], str]] = [
        ([], "at least one stage"),
        ([DISTIL, ALIGN], "must come in the order"),
        ([ALIGN, ALIGN], "give them a name"),
        ([{**ALIGN, "cached_tokens": 128}], "needs mode: layerwise"),
        ([{**DISTIL, "kl_weight": 0, "ce_weight": 0}], "nothing to train on"),
        ([{**DISTIL, "tokens": 64}], "less than one step"),
        ([{**DISTIL, "cache_bits": 4}], "recipe: a stage with cache_bits of 8 or 4 cannot keep packed documents apart"),
    ]
    for stages, expected in rows:
        assert expected in refused(place, recipe_tree(place, stages))


def test_an_evaluation_array_overwrites_nothing(place: Path) -> None:
    tree = recipe_tree(place, [ALIGN])
    for path, *names in (("text.npy", "a.npy", "./a.npy"), ("text.npy", "./text.npy")):
        arrays = [{"array": name, "window": 8, "groups": 1} for name in names]
        tree["data"]["sources"] = [{"path": path, "evaluation": arrays}]
        assert f"{names[-1]} is a source, or another array; choose another name" in refused(place, tree)


def test_missing_files_are_named(place: Path) -> None:
    tree = recipe_tree(place, [ALIGN], data={"sources": [{"path": "nowhere.jsonl"}], "decontaminate": ["no.txt"]})
    tree["student"] = str(place / "absent")
    message = refused(place, tree)
    assert "student:" in message
    remedy = "to train on text of your own, give 'data.decontaminate=[]' 'data.sources=[{path: FILE}]'"
    assert message.endswith(f"data: nowhere.jsonl does not exist, no.txt does not exist; {remedy}")


def test_a_model_that_is_its_own_teacher_needs_text(place: Path) -> None:
    tree = recipe_tree(place, [ALIGN, DISTIL], data={"isolate_documents": False}) | {"teacher": str(place / "student")}
    assert "stages.distil.ce_weight: the student is its own teacher" in refused(place, tree)
    for settings in ({"ce_weight": 0.1}, {"cache_bits": 4}):
        tree["stages"][1] = {**DISTIL, **settings}
        assert load_recipe(write_recipe(place, tree)).teacher == tree["student"]


def test_a_tracker_that_is_not_installed_is_named(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = recipe_tree(place, [ALIGN], log={"trackers": ["tensorboard"]})
    monkeypatch.setitem(sys.modules, "tensorboard", ModuleType("tensorboard"))
    sys.modules["tensorboard"].__spec__ = ModuleSpec("tensorboard", None)
    assert load_recipe(write_recipe(place, tree)).log.trackers == ("tensorboard",)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "log.trackers: tensorboard is not installed" in refused(place, tree)


def test_unknown_file_type_and_unbounded_stream(place: Path) -> None:
    (place / "text.doc").write_text("x")
    assert "is none of .txt" in refused(
        place, recipe_tree(place, [ALIGN], data={"sources": [{"path": str(place / "text.doc")}]})
    )
    assert "needs max_tokens" in refused(place, recipe_tree(place, [ALIGN], data={"sources": [{"hub": "a/b"}]}))


def test_bad_overrides(place: Path) -> None:
    for override in (
        *("seed", "stages.9.tokens=1", "stages.².tokens=1", "seed.x=1", "stages.distil.tokens=1"),
        *("seed=2026-99-99", "seed=!!bool x", "seed=" + "[" * 5000 + "]" * 5000),
    ):
        assert "override" in refused(place, recipe_tree(place, [ALIGN]), override), override[:40]


def test_values_that_no_run_can_use(place: Path) -> None:
    for override, said in (
        ("stage=1", "stage: unknown key, did you mean stages?; docs/recipe-keys.md lists the keys"),
        ("stages.aling.tokens=1", "stages has no element 'aling'; it has align"),
        ("seed=4294967296", "seed: Input should be less than"),
        ("output=''", "output: String should have at least 1 character"),
        ("data.sources.0.weight=.inf", "weight: Input should be a finite number"),
        ("data.sources=[{path: text.jsonl, join_groups: true}]", "need group_key"),
        ("data.sources=[{path: a, group_key: x, join_groups: true, messages_key: m}]", "messages_key names chats"),
        ("data.sources=[{path: a, evaluation: [{array: a.npy, window: 8, groups: [b]}]}]", "need group_key"),
        ("data.sources=[{path: a, evaluation: [{array: a.npy, window: 8, groups: 0}]}]", "greater than 0"),
        ("data.sources.0.recall.facts=101", "facts: Input should be less than or equal to 100"),
        ("stages.0.optimizer.mixer_lr=.inf", "mixer_lr: Input should be a finite number"),
        ("stages.0.name=../../x", "name: is part of file names"),
        ('stages.0.name="a\\nb"', "name: is part of file names"),
        (f"stages.0.name={'x' * 200}", "name: is part of file names"),
    ):
        assert said in refused(place, recipe_tree(place, [ALIGN]), override), override


def test_stages_are_named_in_their_order_and_once(place: Path) -> None:
    long = [{**DISTIL, "kind": "long"}, {**DISTIL, "kind": "long", "name": "8k"}]
    message = refused(place, recipe_tree(place, [ALIGN, *long]), "stages.distil.tokens=1")
    assert message.endswith("stages has no element 'distil'; it has align, long, 8k")


def test_a_key_that_stands_twice_is_refused(place: Path) -> None:
    (place / "recipe.yaml").write_text("student: a\nstages:\n- {kind: align}\noutput: b\nstudent: c\n")
    with pytest.raises(UserError, match=r"recipe.yaml: not valid YAML: student is there twice [^\n]* line 5"):
        load_recipe(place / "recipe.yaml")
    with pytest.raises(UserError, match="the value is not valid YAML"):
        load_recipe("demo", ["engine={device: cpu, device: cuda}"])


def test_not_yaml_and_not_there(place: Path) -> None:
    for text in ("a: [1", "[" * 5000):
        (place / "bad.yaml").write_text(text)
        with pytest.raises(UserError, match="not valid YAML"):
            load_recipe(place / "bad.yaml")
    with pytest.raises(UserError, match="no such recipe"):
        load_recipe(place / "none.yaml")


def test_every_key_is_documented() -> None:
    def sections(model: type[BaseModel]) -> list[type[BaseModel]]:
        found = [model]
        for field in model.model_fields.values():
            for inner in (field.annotation, *getattr(field.annotation, "__args__", ())):
                if isinstance(inner, type) and issubclass(inner, BaseModel):
                    found += sections(inner)
        return found

    for section in {*sections(Recipe), *sections(Distil)}:
        for name, field in section.model_fields.items():
            is_section = isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
            assert field.description or is_section or name == "kind", f"{section.__name__}.{name}"


def test_shipped_recipes_are_valid_and_train_by_lora(place: Path) -> None:
    """Those near their teacher by KL alone, which is better there; states alone are far from it."""
    recipes, by_text = shipped_recipes(), set()
    assert len(recipes) >= 2
    for name in recipes:
        changed = [f"student={place / 'student'}", "data.sources=[]", "data.decontaminate=[]"]
        recipe = load_recipe(name, changed)
        assert recipe.stages
        distils = [stage for stage in recipe.stages if isinstance(stage, DistilBase)]
        assert {stage.train for stage in distils} <= {"lora"}
        by_text |= {name for stage in distils if stage.ce_weight or stage.hidden_weight}
    assert by_text == {"smollm2-135m-pure", "smollm2-135m-pure-100m"}


def test_a_file_comes_before_a_shipped_recipe_of_its_name(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    name = next(iter(shipped_recipes()))
    assert recipe_path(name) == shipped_recipes()[name]
    Path(name).mkdir()  # `deltanet-hf demo demo` runs the recipe `demo` beside its folder `demo`
    assert recipe_path(name) == shipped_recipes()[name]
    Path(name).rmdir()
    Path(name).write_text("")
    assert recipe_path(name) == Path(name)
    with pytest.raises(UserError, match=rf"^nowhere: no such recipe; [^\n]*\b{name}\b[^\n]*$"):
        recipe_path("nowhere")
    for got, meant in (("smollm2-135", "smollm2-135m"), ("llama-1b", "llama-3.2-1b")):
        with pytest.raises(UserError, match=f"^{got}: no such recipe, did you mean {meant}[?];"):
            recipe_path(got)


def test_the_examples_of_the_help_need_no_other_files(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    (place / "text.jsonl").rename("corpus.jsonl")
    for command in ("data", "align", "distill"):
        _, _, recipe, *overrides = shlex.split(COMMANDS[command].help.partition("Example: ")[2].strip("`"))
        assert load_recipe(recipe, overrides).student == "student"


def test_shipped_recipes_are_listed_and_copied(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(place)
    recipes_command()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(shipped_recipes())
    assert "  SmolLM2-135M-Instruct, every layer a state alone, 9.9M tokens" in "\n".join(lines)
    assert all(line.endswith(".") for line in lines)  # whole sentences
    shipped = shipped_recipes()["qwen3-8b"].read_text()
    recipes_command("qwen3-8b")
    assert capsys.readouterr().out == shipped
    recipes_command("qwen3-8b", place / "mine.yaml")
    assert (place / "mine.yaml").read_text() == shipped
    with pytest.raises(UserError, match=r"exists already; choose another file with --out"):
        recipes_command("qwen3-8b", place / "mine.yaml")
    with pytest.raises(UserError, match="nowhere: no shipped recipe has this name; there are demo, "):
        recipes_command("nowhere")
    with pytest.raises(UserError, match=r"^smollm: no shipped recipe has this name, did you mean smollm2-135m[?];"):
        recipes_command("smollm")
    with pytest.raises(UserError, match="cannot be written"):
        recipes_command("qwen3-8b", place / "absent" / "mine.yaml")
