"""Writes all files of a converted model except its weights."""

import json
import shutil
from pathlib import Path
from typing import Any

from deltanet_hf.safe_write import write_atomically, writing

from .job import Job
from .select.plot import selection_plot
from .storage.saved_tokenizer import COPIED, check_saved
from .views.conversion_card import model_card
from .views.layer_error_plot import layer_error_plot

PLOT = "layer_errors.png"
SELECTION_PLOT = "selection.png"


def write_other_files(job: Job, folder: Path, report: dict[str, Any]) -> None:
    """Writes config, generation config, tokenizer, licence, report, plot and model card; safe to repeat.

    Args:
        report: the contents of `conversion.json`.

    Raises:
        QualityError: the saved tokenizer does not give the same tokens as the teacher's.
    """
    teacher, tokenizer = job.teacher, job.teacher.tokenizer
    with writing(folder):
        job.plan.config.save_pretrained(folder)
        teacher.generation_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        for pattern in COPIED:
            for file in sorted(teacher.folder.glob(pattern)):
                if file.is_file() and not (folder / file.name).exists():
                    shutil.copyfile(file, folder / file.name)
        if report["layers"]:
            layer_error_plot(report["layers"], folder / PLOT)
        if job.selection is not None and job.selection.scores:  # evenly spread layers have none
            (folder / SELECTION_PLOT).write_bytes(selection_plot(job.selection))
    check_saved(tokenizer, folder, teacher.folder)
    write_atomically(folder / "README.md", model_card(report, teacher.folder, PLOT).encode())
    write_atomically(folder / "conversion.json", (json.dumps(report, indent=2) + "\n").encode())
