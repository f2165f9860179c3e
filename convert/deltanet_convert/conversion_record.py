"""The records of a conversion: the request that a resumed run must repeat, and the report `conversion.json`."""

import os
from pathlib import Path
from typing import Any

from .calibration_text import CalibrationText
from .job import Job
from .storage.safetensors_folder import read_json
from .storage.teacher_source import Source
from .storage.versions import versions


def request(job: Job, text: CalibrationText) -> dict[str, Any]:
    """Everything that the result depends on, as a JSON value."""
    return {
        "teacher": job.teacher.identity(),
        "options": {**job.options.decisive(), "table": job.table.to_dict()},
        "text": {"sha256": text.sha256, "tokens": list(text.calibration.shape)},
        "versions": versions(),
    }


def report(
    job: Job, text: CalibrationText, out: Path, steps: dict[str, dict[str, Any]], held_out: dict[str, Any]
) -> dict[str, Any]:
    """The contents of `conversion.json`.

    Args:
        out: the folder that will be made.
        steps: figures by step name, from the journal.
        held_out: perplexities and KL divergence on the held-out text.
    """
    normed = [layer.index for layer in job.plan.layers if layer.normed]
    return {
        "teacher": {**_teacher_facts(job), **_place(job.teacher.source, out)},
        "options": _option_facts(job),
        "text": {
            "source": text.source,
            "sha256": text.sha256,
            "calibration_tokens": text.calibration.numel(),
            "held_out_tokens": text.held_out.numel(),
            "sequence_length": text.calibration.shape[1],
        },
        "versions": versions(),
        **({"selection": job.selection.to_json()} if job.selection else {}),
        "plan": job.plan.to_json(),
        "layers": [{"index": index, **steps[f"layer {index}"]} for index in job.table.converted],
        "inserted_norms": [{"index": index, **steps[f"layer {index}"]} for index in normed],
        "held_out": held_out,
    }


def finished_report(job: Job, text: CalibrationText, out: Path) -> dict[str, Any] | None:
    """The report in the output folder `out` if this very conversion has been completed already, otherwise None."""
    file = out / "conversion.json"
    if not file.exists():
        return None
    found = read_json(file)
    same = (
        found.get("teacher") in (_teacher_facts(job), {**_teacher_facts(job), **_place(job.teacher.source, out)})
        and found.get("options") == _option_facts(job)
        and found.get("text", {}).get("sha256") == text.sha256
    )
    return found if same else None


def _teacher_facts(job: Job) -> dict[str, Any]:
    return {
        "name": job.teacher.name,
        "revision": job.teacher.source.revision,
        "model_type": job.teacher.family.model_type,
        "dtype": str(job.teacher.dtype).removeprefix("torch."),
        "tied_embeddings": job.teacher.tied,
    }


def _place(source: Source, out: Path) -> dict[str, str]:
    """Where a local teacher is, seen from OUT, so that recipes find it; no path of the machine goes into the record."""
    if source.revision is not None:
        return {}
    return {"folder": os.path.relpath((source.gguf or source.folder).resolve(), out.resolve())}


def _option_facts(job: Job) -> dict[str, Any]:
    return {**job.options.decisive(), "keep": job.options.keep, "deltanet": job.table.to_dict()}
