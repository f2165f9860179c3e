"""`deltanet-hf convert --layers auto:...`: the selection before a conversion, made once per output folder."""

from __future__ import annotations

from pathlib import Path

from deltanet_hf.errors import UserError

from ..options import ConvertOptions
from ..storage.safetensors_folder import read_json
from ..storage.teacher_source import Source
from ..teacher_model import Teacher
from .budget import Budget
from .run import Show, run_selection, unseen
from .select_options import SelectOptions
from .selection_file import Selection, parse_selection, read_selection
from .task import plan_selection

AUTO = "auto:"


def auto_selection(
    source: Source, teacher: Teacher, out: Path, options: ConvertOptions, show: Show = unseen
) -> Selection | None:
    """The layers that `--layers auto:...` keeps; None for any other value.

    A resumed conversion finds the selection beside OUT, or in OUT/conversion.json if it was finished.

    Raises:
        UserError: the budget makes no sense, or OUT exists and may not be replaced.
    """
    if not options.layers.startswith(AUTO):
        return None
    if out.is_dir() and any(out.iterdir()) and not (options.resume or options.overwrite):
        raise UserError(f"{out}: exists; choose another folder, or add --overwrite to replace it")
    budget = Budget.auto(options.layers.removeprefix(AUTO))
    choice = SelectOptions(budget, seed=options.seed, overwrite=True)
    file = unfinished_selection(out)
    task = plan_selection(source, teacher, choice, options.table(teacher.num_layers, ()), file)
    found = _recorded(out, options) if options.resume else None
    if found is None and file.exists():
        found = read_selection(file)
    if found is not None and task.is_answered_by(found):
        return found
    for note in task.notes:
        show(0, task.count, note)
    return run_selection(task, show, plot=False)


def unfinished_selection(out: Path) -> Path:
    """Where the selection is kept until the conversion to `out` is finished."""
    return out.parent / f".{out.name}.selection.json"


def _recorded(out: Path, options: ConvertOptions) -> Selection | None:
    """The selection of a finished conversion to `out` with the same --layers."""
    file = out / "conversion.json"
    if not file.exists():
        return None
    report = read_json(file)
    if report.get("selection") is None or report.get("options", {}).get("layers") != options.layers:
        return None
    return parse_selection(report["selection"], f"{file}: key 'selection'")
