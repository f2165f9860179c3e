"""Everything in the output folder besides the weights."""

import json
import platform
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoTokenizer, GenerationConfig

from deltanet_hf.errors import UserError

from .card import model_card
from .checkpoint import read_json
from .files import sync_folder, write_atomically, writing
from .plot import layer_error_plot

if TYPE_CHECKING:
    from .convert import Job

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
PLOT = "layer_errors.png"


def load_tokenizer(folder: Path) -> Any:
    """The teacher's tokenizer; UserError when there is none."""
    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{folder}: its tokenizer cannot be loaded ({reason}); add the teacher's tokenizer.json and "
            "tokenizer_config.json"
        ) from error


def versions() -> dict[str, str]:
    """Of everything that computes or writes."""
    names = ("deltanet-hf", "torch", "transformers", "safetensors")
    return {"python": platform.python_version(), **{name: _version(name) for name in names}}


def _version(name: str) -> str:
    if name == "deltanet-hf":
        import deltanet_hf

        return deltanet_hf.__version__
    return version(name)


def complete_folder(job: "Job", folder: Path, report: dict[str, Any]) -> None:
    """Config with its shim, generation config, tokenizer, licence, report, plot and card; safe to repeat."""
    with writing(folder):
        job.plan.config.save_pretrained(folder)
        _generation_config(job.teacher.folder, job.teacher.config).save_pretrained(folder)
        for file in _companions(job.teacher.folder):
            shutil.copyfile(file, folder / file.name)
        _name_tokenizer_class(job.teacher.folder, folder)
        layer_error_plot(report["layers"], folder / PLOT)
    write_atomically(folder / "README.md", model_card(report, job.teacher.folder, PLOT).encode())
    write_atomically(folder / "conversion.json", (json.dumps(report, indent=2) + "\n").encode())
    with writing(folder):
        sync_folder(folder)


def _generation_config(teacher: Path, config: Any) -> GenerationConfig:
    if (teacher / "generation_config.json").exists():
        found: GenerationConfig = GenerationConfig.from_pretrained(teacher)
        return found
    return GenerationConfig.from_model_config(config)


def _companions(teacher: Path) -> list[Path]:
    names = [teacher / name for name in TOKENIZER_FILES]
    return [
        file
        for file in [*names, *sorted(teacher.glob("LICENSE*")), *sorted(teacher.glob("NOTICE*"))]
        if file.is_file()
    ]


def _name_tokenizer_class(teacher: Path, folder: Path) -> None:
    """Names the tokenizer's class where the teacher leaves it to its model type."""
    file = folder / "tokenizer_config.json"
    settings = read_json(file) if file.exists() else {}
    if "tokenizer_class" not in settings:
        settings["tokenizer_class"] = type(load_tokenizer(teacher)).__name__
        write_atomically(file, (json.dumps(settings, indent=2) + "\n").encode())
