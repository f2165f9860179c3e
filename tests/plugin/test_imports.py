"""Each use of the project imports only the packages and rooms that it uses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.tiny_models import tiny_student

ROOT = Path(__file__).parents[2]
# Not imported where a model is only loaded and run.
EVALUATION = ("deltanet_hf.evaluation", "lm_eval", "datasets")
CONVERSION = ("deltanet_convert", "gguf", "matplotlib")
SERVING = ("vllm", "deltanet_hf.vllm_plugin")
TRAINING = ("deltanet_recipes", "peft")  # transformers itself imports accelerate where it is installed


def imported(script: str, names: tuple[str, ...]) -> list[str]:
    """Those of the modules `names` that a fresh interpreter has imported after `script`."""
    script += f"\nimport sys\nprint(*[name for name in {names!r} if name in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    return run.stdout.splitlines()[-1].split()


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


def test_importing_the_plugin_imports_neither_another_room_nor_a_familys_modelling_code() -> None:
    families = ("llama", "gemma3", "qwen3", "qwen3_5", "phi3", "olmo3", "granite")
    names = tuple(f"transformers.models.{family}.modeling_{family}" for family in families)
    assert imported("import deltanet_hf", EVALUATION + CONVERSION + TRAINING + SERVING + names) == []


def test_loading_and_running_a_model_imports_no_other_room(converted: Path) -> None:
    script = f"""
import torch
from transformers import AutoModelForCausalLM
import deltanet_hf
model = AutoModelForCausalLM.from_pretrained({str(converted)!r})
model.generate(torch.arange(3, 9)[None], max_new_tokens=2)
"""
    assert imported(script, EVALUATION + CONVERSION + TRAINING + SERVING) == []


def test_the_measures_import_no_evaluation_packages() -> None:
    script = """
from deltanet_hf.evaluation.measures import continuations, probes, scores, speed, text_scores
"""
    assert imported(script, ("lm_eval", "datasets", "matplotlib", *CONVERSION, "deltanet_recipes")) == []


@pytest.mark.parametrize("arguments", [(), ("eval",), ("report",), ("distill",), ("align",)], ids=str)
def test_help_imports_neither_torch_nor_transformers(arguments: tuple[str, ...]) -> None:
    names = ("torch", "transformers", "deltanet_hf", "deltanet_convert", "lm_eval", "matplotlib")
    assert imported(help_of(*arguments), names) == []


def test_no_installed_module_imports_what_a_checkout_measures_with() -> None:
    packages = ("deltanet_hf", "kernels/deltanet_kernels", "convert/deltanet_convert", "recipes/deltanet_recipes")
    for package in packages:
        for file in (ROOT / package).rglob("*.py"):
            assert not re.search(r"^\s*(import|from) measuring\b", file.read_text(), re.MULTILINE), file
