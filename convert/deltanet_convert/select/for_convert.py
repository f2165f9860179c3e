"""`deltanet-hf convert --layers auto:...`: the selection before a conversion, made once per output folder.

`--layers auto` takes the selection that is shipped for a teacher of this shape. For any other teacher, on a GPU, it
plans heads and windows for a ninth of the teacher's bytes (`USUAL_SHARE`). Where no windows can be planned it keeps a
quarter of the layers, or half of those that do not slide where others do: measured ones with a GPU, and evenly spread
ones without, because a search would take hours.
"""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedConfig

from deltanet_hf.errors import UserError
from deltanet_hf.loading import chosen_device

from ..options import AUTO, ConvertOptions
from ..storage.safetensors_folder import read_json
from ..teacher_model import Teacher
from .budget import Budget
from .run import Show, run_selection, unseen
from .select_options import SelectOptions
from .selection_file import Selection, parse_selection, read_selection
from .task import plan_selection
from .units import Candidates

SHIPPED = Path(__file__).parent / "shipped"
SHAPES: dict[str, dict[str, str | int]] = {
    "smollm2-135m-instruct.json": {
        "model_type": "llama",
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
    },
}  # the teachers of the shipped selections, by the keys of config.json that tell them from others
USUAL_SHARE = "11%@2k"  # of the teacher's bytes: the point that the front recommends (docs/results.md)
ON_GPU = (
    f"Measuring the heads and windows that are worth {USUAL_SHARE} of the teacher's bytes, which takes minutes; "
    "--layers every:4 keeps evenly spread layers at once."
)
NO_GPU = (
    "No GPU: the softmax layers are spread evenly, which keeps less recall than layers that were measured. On a "
    "machine with a GPU, `deltanet-hf select TEACHER` measures them; give its file as --layers FILE."
)


def auto_selection(teacher: Teacher, out: Path, options: ConvertOptions, show: Show = unseen) -> Selection:
    """The layers or heads that `--layers auto:...` keeps.

    A resumed conversion finds the selection beside OUT, or in OUT/conversion.json if it was finished.

    Raises:
        UserError: the budget makes no sense, the teacher cannot be measured, or OUT exists and may not be replaced.
    """
    if out.is_dir() and any(out.iterdir()) and not (options.resume or options.overwrite):
        raise UserError(f"{out}: exists; choose another folder, or add --overwrite to replace it")
    method, budget_text = "forward", options.layers.removeprefix(f"{AUTO}:")
    if options.layers == AUTO:
        if (shipped := shipped_selection(teacher.config)) is not None:
            unit = "layers" if shipped.unit == "layer" else "key/value heads"
            show(0, 1, f"Softmax {unit}: those shipped for {shipped.teacher}, a model of this shape.")
            return shipped
        candidates = Candidates.of(teacher.config, "layer")
        if len(candidates.units) == 1:
            raise UserError(
                f"--layers {AUTO}: {teacher.name} has one layer of full attention, so there is nothing to choose; give "
                "--layers all, which converts it, or every:1, which measures keys for 4 bits"
            )
        budget_text = str(_usual_count(candidates))
        if chosen_device(options.device).type != "cuda":
            method = "uniform"
            show(0, 1, NO_GPU)
        elif not candidates.local and options.cache_bits < 16 and options.plans_windows:
            budget_text = USUAL_SHARE
            show(0, 1, ON_GPU)
    budget = Budget.parse(budget_text, f"--layers {AUTO}:")
    choice = SelectOptions(keep=budget, method=method, seed=options.seed, device=options.device)
    task = plan_selection(teacher, choice, options.table_of((), teacher.config))
    if task.spending is not None and not options.plans_windows:
        raise UserError(f"{budget.said}: a budget in bytes decides how long windows are; leave out --set window")
    if task.spread is not None:
        return task.selection(task.spread, {})
    file = selection_path(out)
    found = _recorded(out, options) if options.resume else None
    if found is None and file.exists():
        found = read_selection(file)
    if found is not None and task.is_answered_by(found):
        return found
    try:
        return run_selection(task, file, show, overwrite=True, plot=False)
    except UserError as error:
        raise UserError(
            f"--layers {options.layers}: {error}. The options are those of deltanet-hf select; give its file as "
            "--layers FILE, or spread the softmax layers evenly with --layers every:4"
        ) from error


def _usual_count(candidates: Candidates) -> int:
    """The layers that `--layers auto` keeps: a quarter; beside layers that slide, half, or facts are lost that pass
    from one global layer to the next (Gemma 3 270M, docs/selecting.md)."""
    count = len(candidates.units)
    return -(-count // 2) if candidates.local else max(1, count // 4)


def shipped_selection(config: PreTrainedConfig) -> Selection | None:
    """The selection that is shipped for a teacher with a config of this shape, if there is one."""
    for file, shape in SHAPES.items():
        if all(getattr(config, key) == value for key, value in shape.items()):
            return read_selection(SHIPPED / file)
    return None


def selection_path(out: Path) -> Path:
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
