"""No code of a model's folder is run, and nothing is unpickled: the source has no call that could."""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from deltanet_hf.errors import UserError
from deltanet_recipes.training.training_state import Checkpoints

ROOT = Path(__file__).parents[1]
PACKAGES = [ROOT / part for part in ("deltanet_hf", "kernels", "convert", "recipes")]
UNPICKLERS = {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
# They load the folders of their own configuration, not the ones that a command of deltanet-hf is given.
MAINTAINERS = ("measuring", "demo")
# The process that runs the programs of coding tasks, if HF_ALLOW_CODE_EVAL allows it.
ANSWERS = "deltanet_hf/evaluation/tasks/answer_process.py"


@functools.cache
def calls() -> list[tuple[str, str, dict[str, object]]]:
    """(file and line, name of the function with what it belongs to, constant keyword arguments) of every call."""
    found: list[tuple[str, str, dict[str, object]]] = []
    for file in (file for package in PACKAGES for file in sorted(package.rglob("*.py"))):
        name = file.relative_to(ROOT)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names]
                modules = names if isinstance(node, ast.Import) else [node.module or ""]
                found += [(f"{name}:{node.lineno}", f"import {module.partition('.')[0]}", {}) for module in modules]
            elif isinstance(node, ast.Call):
                given = {word.arg: getattr(word.value, "value", ...) for word in node.keywords if word.arg}
                found.append((f"{name}:{node.lineno}", ast.unparse(node.func), given))
    return found


def test_nothing_is_unpickled() -> None:
    loads = [(place, given) for place, name, given in calls() if name == "torch.load"]
    assert loads
    for place, given in loads:
        assert given.get("weights_only") is True, place
    for place, name, given in calls():
        assert name.removeprefix("import ") not in UNPICKLERS or not name.startswith("import "), place
        assert name not in ("yaml.load", "yaml.unsafe_load", "eval", "os.system"), place
        assert name != "exec" or place.startswith(ANSWERS), place
        assert given.get("allow_pickle") is not True, place
        assert given.get("shell") is not True, place


def test_no_code_of_a_folder_is_run() -> None:
    found = [
        (place, name, given)
        for place, name, given in calls()
        if name.startswith("Auto") and name.endswith(".from_pretrained") and not any(m in place for m in MAINTAINERS)
    ]
    assert len(found) > 3
    for place, name, given in found:
        if "gguf_file" in given:  # a format without code and pickles
            continue
        assert given.get("trust_remote_code") is False, place
        if "Model" in name:
            assert given.get("use_safetensors") is True, place


class Code:
    """An object whose pickle would write a file when it is read."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.file,)


@pytest.mark.parametrize("content", ["code", "empty", "text", "cut"])
def test_a_checkpoint_with_code_or_damage_is_refused(tmp_path: Path, content: str) -> None:
    module = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    runtime: Any = SimpleNamespace(main=True, barrier=lambda: None, from_main=lambda value: value)
    checkpoints = Checkpoints(tmp_path, 1, runtime)
    checkpoints.save(1, module, [optimizer], {"label": "x"})
    folder = checkpoints.last()
    assert folder is not None
    assert checkpoints.load(folder, module, [optimizer]) == {"step": 1, "label": "x"}
    weights = folder / "weights.pt"
    if content == "code":
        torch.save({"model": Code(tmp_path / "ran"), "optimizer": {}}, weights)
    else:
        weights.write_bytes({"empty": b"", "text": b"weights", "cut": weights.read_bytes()[:-100]}[content])
    with pytest.raises(UserError, match=r"checkpoint cannot be read .* delete it") as caught:
        checkpoints.load(folder, module, [optimizer])
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()
