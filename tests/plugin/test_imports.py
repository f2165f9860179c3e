"""Each use of the project imports only the packages and rooms that it uses."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from deltanet_hf.models.families import FAMILIES
from deltanet_hf.models.qwen3_5 import MODEL_TYPE
from deltanet_recipes.cli import COMMANDS
from support.tiny_models import tiny_student

ROOT = Path(__file__).parents[2]
INSTALLED = ("kernels/deltanet_kernels", "deltanet_hf", "convert/deltanet_convert", "recipes/deltanet_recipes")
# Not imported where a model is only loaded and run.
EVALUATION = ("deltanet_hf.evaluation", "lm_eval", "datasets")
CONVERSION = ("deltanet_convert", "gguf", "matplotlib")
SERVING = ("vllm", "deltanet_hf.vllm_plugin")
TRAINING = ("deltanet_recipes", "peft")  # transformers itself imports accelerate where it is installed


def imported(*steps: tuple[str, tuple[str, ...]]) -> list[list[str]]:
    """For each script and its names: those modules that one fresh interpreter has imported when the script ends."""
    report = "\nimport sys\nprint('imported', *[name for name in {!r} if name in sys.modules])\n"
    whole = "".join(script + report.format(names) for script, names in steps)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    run = subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True, check=True, env=environment)
    return [line.split()[1:] for line in run.stdout.splitlines() if line.startswith("imported")]


def imports_in(file: Path, module: str) -> set[str]:
    """The names that a module's file imports, at its top and in functions, but for type checkers."""
    found = set()
    left: list[ast.AST] = [ast.parse(file.read_text())]
    while left:
        node = left.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom):
            package = module.split(".") if file.stem == "__init__" else module.split(".")[:-1]
            parts = package[: len(package) + 1 - node.level] if node.level else []
            origin = ".".join([*parts, *([node.module] if node.module else [])])
            found |= {origin, *(f"{origin}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        left += ast.iter_child_nodes(node)
    return found


def help_of(*arguments: str) -> str:
    """A script that prints the help of `deltanet-hf ARGUMENTS`."""
    return (
        "import contextlib, sys\nfrom deltanet_recipes.cli import main\n"
        f"sys.argv = ['deltanet-hf', *{arguments!r}, '--help']\n"
        "with contextlib.suppress(SystemExit):\n    main()"
    )


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("converted")
    tiny_student("llama", layers=(0, 2)).save_pretrained(folder)
    return folder


def test_importing_loading_and_measuring_import_no_other_room(converted: Path) -> None:
    """Nor does importing the plugin import a family's modelling code."""
    families = ("llama", "gemma3", "qwen3", "qwen3_5", "phi3", "olmo3", "granite")
    modelling = tuple(f"transformers.models.{family}.modeling_{family}" for family in families)
    run = f"""
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(converted)!r})
model.generate(torch.arange(3, 9)[None], max_new_tokens=2)
"""
    measures = "from deltanet_hf.evaluation.measures import continuations, probes, scores, speed, text_scores"
    others = EVALUATION + CONVERSION + TRAINING + SERVING
    found = imported(
        ("import deltanet_hf", others + modelling),
        (run, others),
        (measures, ("lm_eval", "datasets", "matplotlib", *CONVERSION, "deltanet_recipes")),
    )
    assert found == [[], [], []]


def test_importing_the_packages_imports_neither_torch_nor_transformers() -> None:
    light = "import deltanet_hf, deltanet_kernels\nfrom deltanet_hf.errors import UserError"
    assert imported((light, ("torch", "triton", "transformers"))) == [[]]


@pytest.mark.parametrize(
    "first",
    [
        "from transformers import AutoConfig",
        "from transformers import AutoModelForCausalLM",  # whose import is under way when AutoConfig is there
        # The first imports another module of its package, the second the Auto classes, and they the configurations.
        "from deltanet_kernels.operators import rms_norm\nfrom deltanet_hf.models.layers import LayerTable",
    ],
)
def test_families_are_registered_whatever_is_imported_first(first: str) -> None:
    known = "from transformers.models.auto.configuration_auto import CONFIG_MAPPING as known"
    names = f"{[*(family.converted_model_type for family in FAMILIES.values()), MODEL_TYPE]!r}"
    check = f"import deltanet_hf\n{first}\n{known}\nassert all(name in known for name in {names})"
    assert imported((check, ())) == [[]]


def test_help_imports_neither_torch_nor_transformers() -> None:
    scripts = "\n".join(help_of(*arguments) for arguments in ((), *((name,) for name in COMMANDS)))
    assert imported((scripts, ("torch", "triton", "transformers", "lm_eval", "matplotlib"))) == [[]]


def test_files_and_rooms_form_an_order() -> None:
    """A room is a folder without folders; other files stand for themselves. Whole folders of a package do, too."""
    files = {}
    for root in (ROOT / package for package in (*INSTALLED, "recipes/measuring")):
        for file in root.rglob("*.py"):
            files[".".join(file.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__")] = file
    split = {file.parent.parent for file in files.values()}  # folders with folders
    rooms = {module: module if file.parent in split else file.parent for module, file in files.items()}
    between_files: dict[str, set[str]] = {}
    for module, file in files.items():
        between_files[module] = {name for name in imports_in(file, module) if name in files and name != module}
    assert len(set(TopologicalSorter(between_files).static_order())) == len(files)  # CycleError names a circle
    for place_of in (rooms, {module: ".".join(module.split(".")[:2]) for module in files}):
        between: dict[Path | str, set[Path | str]] = {}
        for module, imports in between_files.items():
            place = place_of[module]
            between.setdefault(place, set()).update({place_of[name] for name in imports} - {place})
        assert len(set(TopologicalSorter(between).static_order())) == len(between)


def test_a_folder_that_lists_its_files_lists_all() -> None:
    for init in (file for package in INSTALLED for file in (ROOT / package).rglob("__init__.py")):
        files = {file.name for file in init.parent.glob("*.py")} - {"__init__.py"}
        listed = set(re.findall(r"\w+\.py\b", ast.get_docstring(ast.parse(init.read_text())) or ""))
        if 2 * len(files & listed) > len(files):
            assert files <= listed, (init, files - listed)


def test_no_installed_module_imports_what_a_checkout_measures_with() -> None:
    for package in INSTALLED:
        for file in (ROOT / package).rglob("*.py"):
            assert not re.search(r"^\s*(import|from) measuring\b", file.read_text(), re.MULTILINE), file
