"""Files of a model folder that lead out of it, name code or are pickled: they are refused, and nothing is copied."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from deltanet_convert.convert_command import convert_command
from deltanet_convert.storage.saved_tokenizer import load_tokenizer
from deltanet_convert.storage.teacher_source import resolve_source
from deltanet_convert.teacher_model import open_teacher
from deltanet_hf.errors import UserError
from deltanet_hf.generate import load_for_inference
from deltanet_hf.hub import INDEX_FILE, SINGLE_FILE
from deltanet_hf.inside import MARKER
from deltanet_recipes.training.model_pair import load_student
from support.tiny_conversion import opened, teacher_folder, tiny_conversion

SECRET = "secret of this machine"
EVIL = "raise SystemExit('code of the folder ran')"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return teacher_folder(tmp_path_factory.mktemp("saved"), "llama", num_hidden_layers=1)


@pytest.fixture
def teacher(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "given" / "teacher"))


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.write_text(SECRET)
    return file


def refused(call: Callable[[], object], *parts: str) -> None:
    with pytest.raises(UserError) as caught:
        call()
    message = str(caught.value)
    for part in parts:
        assert part in message, message
    assert "\n" not in message
    message.encode()


def link(path: Path, goal: Path) -> None:
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(goal)


LINKED = ["LICENSE", "NOTICE.txt", "README.md", "chat_template.jinja", "tokenizer.json", "vocab.json", "config.json"]


def test_links_out_of_the_folder(saved: Path, secret: Path, tmp_path: Path) -> None:
    for name in (*LINKED, "additional_chat_templates/tools.jinja"):
        teacher = str(shutil.copytree(saved, tmp_path / "given" / Path(name).stem))
        link(Path(teacher) / name, secret)
        refused(partial(convert_command, teacher, tmp_path / "out"), name, "link that leaves", "copy the file")
        refused(partial(load_for_inference, teacher, device="cpu"), name, "link that leaves the folder")
        refused(partial(load_student, teacher), "student: ", name, "link that leaves the folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["given", "secret"]


def test_a_linked_folder_of_templates(teacher: Path, secret: Path) -> None:
    link(teacher / "additional_chat_templates", secret.parent)
    refused(lambda: resolve_source(str(teacher), secret, None), "additional_chat_templates", "leaves the folder")


def test_links_to_nothing(teacher: Path, tmp_path: Path) -> None:
    name = "chat_template.jinja"
    for goal in (name, "nowhere", "/proc/self/fd/99999", "x" * 300):
        link(teacher / name, Path(goal))
        refused(lambda: resolve_source(str(teacher), tmp_path / "scratch", None), name, "cannot be opened")


def test_links_within_the_folder_are_followed(teacher: Path, tmp_path: Path) -> None:
    (teacher / "LICENSE").write_text("terms")
    link(teacher / "LICENSE.txt", Path("LICENSE"))
    assert resolve_source(str(teacher), tmp_path / "scratch", None).folder == teacher


def test_shard_names_that_are_no_file_names(teacher: Path) -> None:
    for name in ("x" * 5000 + ".safetensors", "\ud800.safetensors", "a\0.safetensors"):
        index = {"weight_map": {"model.embed_tokens.weight": name}}
        (teacher / INDEX_FILE).write_text(json.dumps(index))
        refused(lambda: opened(teacher), INDEX_FILE, "shard")
        refused(lambda: load_for_inference(str(teacher), device="cpu"), INDEX_FILE)


def test_an_index_is_checked_before_transformers_follows_it(teacher: Path) -> None:
    shutil.move(teacher / SINGLE_FILE, teacher.parent / "elsewhere.safetensors")
    for name in ("../elsewhere.safetensors", "/elsewhere.safetensors"):
        (teacher / INDEX_FILE).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
        refused(lambda: load_for_inference(str(teacher), device="cpu"), INDEX_FILE, name)


def test_pickled_weights_are_not_loaded(teacher: Path) -> None:
    (teacher / SINGLE_FILE).unlink()
    torch.save({}, teacher / "pytorch_model.bin")
    refused(lambda: load_for_inference(str(teacher), device="cpu"), str(teacher), "safetensors")
    refused(lambda: load_student(str(teacher)), "student", "safetensors")


def test_an_adapter_names_another_folder(teacher: Path, tmp_path: Path) -> None:
    (teacher / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tmp_path)}))
    refused(lambda: resolve_source(str(teacher), tmp_path / "scratch", None), "adapter_config.json", "merge")


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_a_tokenizer_config_that_names_other_files(teacher: Path, secret: Path) -> None:
    file, near = teacher / "tokenizer_config.json", "../../secret"
    before = file.read_text()
    several = ["tokenizer.json", near]
    for key, value in {"vocab_file": str(secret), "tokenizer_file": near, "fast_tokenizer_files": several}.items():
        file.write_text(before)
        edit(file, **{key: value})
        refused(lambda: load_tokenizer(teacher), "tokenizer_config.json", key, "leaves the folder")


def test_files_of_the_machine_that_saved_a_tokenizer_are_ignored(teacher: Path) -> None:
    before = load_tokenizer(teacher)("mice")["input_ids"]
    edit(
        teacher / "tokenizer_config.json",
        tokenizer_file="/home/me/tokenizer.json",
        special_tokens_map_file="/etc/hosts",
    )
    assert load_tokenizer(teacher)("mice")["input_ids"] == before


@pytest.mark.usefixtures("quick_fit")
def test_code_of_a_teacher_is_neither_run_nor_named_in_the_result(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *args: "y")  # the answer to transformers' question
    (teacher / "evil.py").write_text(EVIL)
    edit(teacher / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "somebody/else--evil.Evil"]})
    edit(teacher / "config.json", auto_map={"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"})
    edit(teacher / "config.json", attn_implementation="evil/kernel")
    tiny_conversion(teacher, tmp_path / "out")
    edit(teacher / "config.json", attn_implementation=None)
    assert "auto_map" not in json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert "evil" not in (tmp_path / "out" / "config.json").read_text()
    assert not (tmp_path / "out" / "evil.py").exists()
    load_for_inference(str(teacher), device="cpu")  # a family that transformers knows: its own classes
    edit(teacher / "config.json", model_type="evil")
    refused(lambda: load_for_inference(str(teacher), device="cpu"), "cannot be loaded", "custom code")


def test_a_config_cannot_name_a_kernel_of_the_hub(teacher: Path) -> None:
    file, said = teacher / "config.json", ("code on the hub", "remove")
    before = file.read_text()
    for key in ("attn_implementation", "_attn_implementation"):
        for value in ("somebody/kernel", "somebody/kernel@main:attention", {"": "somebody/kernel"}):
            file.write_text(before)
            edit(file, **{key: value})
            refused(lambda: load_for_inference(str(teacher), device="cpu"), "config.json", key, *said)


def test_files_that_several_repositories_of_a_hub_cache_share(teacher: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--a--b" / "snapshots" / "abc"
    shared, blobs = tmp_path / "hub" / "blobs", snapshot.parent.parent / "blobs"
    for folder in (snapshot, shared, blobs):
        folder.mkdir(parents=True)
    for file in teacher.iterdir():
        shutil.move(file, shared / file.name)
        (blobs / file.name).symlink_to(Path("../../blobs") / file.name)
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    refused(lambda: opened(snapshot), SINGLE_FILE, "link that leaves")
    (shared / MARKER).write_text("1\n")
    source = resolve_source(str(snapshot), tmp_path / "scratch", None)
    assert open_teacher(source).num_layers == 1
