"""Everything in the output folder besides the weights."""

import json
import platform
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig

from deltanet_hf.errors import QualityError, UserError
from deltanet_hf.safe_write import sync_folder, write_atomically, writing

from .job import Job
from .views.conversion_card import model_card
from .views.layer_error_plot import layer_error_plot

# Written by no `save_pretrained`, but read by other tools; the tokenizer itself is saved as transformers loads it.
COMPANIONS = ("tokenizer.model", "vocab.json", "merges.txt", "chat_template.json", "LICENSE*", "NOTICE*")
SAMPLE = "In 1859, 12 mice -- \n\tand a cat's 3.50 $ café, naïve 東京 <|im_end|>  did 2+2=4."
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


def complete_folder(job: Job, tokenizer: Any, folder: Path, report: dict[str, Any]) -> None:
    """Config with its shim, generation config, tokenizer, licence, report, plot and card; safe to repeat.

    Raises QualityError when the tokenizer does not survive being saved.
    """
    with writing(folder):
        job.plan.config.save_pretrained(folder)
        _generation_config(job.teacher.folder, job.teacher.config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        for pattern in COMPANIONS:
            for file in sorted(job.teacher.folder.glob(pattern)):
                if file.is_file() and not (folder / file.name).exists():
                    shutil.copyfile(file, folder / file.name)
        layer_error_plot(report["layers"], folder / PLOT)
    if load_tokenizer(folder)(SAMPLE)["input_ids"] != tokenizer(SAMPLE)["input_ids"]:
        raise QualityError(f"{folder}: the saved tokenizer differs from the teacher's; please report the teacher")
    write_atomically(folder / "README.md", model_card(report, job.teacher.folder, PLOT).encode())
    write_atomically(folder / "conversion.json", (json.dumps(report, indent=2) + "\n").encode())
    with writing(folder):
        sync_folder(folder)


def _generation_config(teacher: Path, config: Any) -> GenerationConfig:
    if (teacher / "generation_config.json").exists():
        found: GenerationConfig = GenerationConfig.from_pretrained(teacher)
        return found
    return GenerationConfig.from_model_config(config)
