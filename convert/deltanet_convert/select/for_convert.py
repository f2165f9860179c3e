"""`deltanet-hf convert` with a budget as `--keep`: the selection before a conversion, made once per output folder.

`--keep auto` takes the selection that is shipped for a teacher of this shape, and spends what `Budget.usual` says for
any other teacher.
"""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedConfig

from deltanet_hf.errors import UserError
from deltanet_hf.mixers import WINDOW_SUFFIX

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
}
"""The teachers of the shipped selections, by the keys of config.json that tell them from others. Each has a second
selection, states-NAME, for windows with states."""


def auto_selection(teacher: Teacher, out: Path, options: ConvertOptions, show: Show = unseen) -> Selection:
    """The layers or heads that a budget keeps.

    A resumed conversion finds the selection beside OUT, or in OUT/conversion.json if it was finished.

    Raises:
        UserError: the budget makes no sense, the teacher cannot be measured, or OUT exists and may not be replaced.
    """
    if out.is_dir() and any(out.iterdir()) and not (options.resume or options.overwrite):
        raise UserError(f"{out}: exists; choose another folder, or add --overwrite to replace it")
    candidates = Candidates.of(teacher.config, "layer")
    if options.keep == AUTO:
        if (shipped := shipped_selection(teacher.config, options.mixer.endswith(WINDOW_SUFFIX))) is not None:
            unit = "layers" if shipped.unit == "layer" else "key/value heads"
            show(0, 1, f"Softmax {unit}: those shipped for {shipped.teacher}, a model of this shape.")
            return shipped
        if len(candidates.units) == 1:
            raise UserError(
                f"--keep {AUTO}: {teacher.name} has one layer of full attention, so there is nothing to choose; give "
                "--keep none, which converts it, or every:1, which measures keys for 4 bits"
            )
    budget = budget_of(options, candidates)
    choice = SelectOptions(keep=budget, seed=options.seed, device=options.device)
    task = plan_selection(teacher, choice, options.table(teacher.num_layers, (), teacher.config))
    if task.spending is not None and not options.plans_windows:
        raise UserError(f"{budget.said}: a budget in bytes decides how long windows are; leave out --set window")
    file = selection_path(out)
    found = _recorded(out, options) if options.resume else None
    if found is None and file.exists():
        found = read_selection(file)
    if found is not None and task.is_answered_by(found):
        return found
    measures = f"what to keep ({budget.said}), in {task.time}"
    if options.dry_run:
        shown = f"evenly spread {'units, and windows of one length' if task.spending else 'units'}"
        show(0, 1, f"The plan below has {shown}: the conversion measures {measures}.")
        return task.unmeasured()
    show(0, 1, f"Measuring {measures}; --keep every:4 keeps evenly spread layers at once.")
    try:
        return run_selection(task, file, show, overwrite=True, plot=False)
    except UserError as error:
        raise UserError(
            f"--keep {options.keep}: {error}. The options are those of deltanet-hf select; give its file as "
            "--keep FILE, or spread the softmax layers evenly with --keep every:4"
        ) from error


def budget_of(options: ConvertOptions, candidates: Candidates) -> Budget:
    """The budget of `--keep`; that of `auto` is for a teacher that no selection is shipped for."""
    if options.keep == AUTO:
        return Budget.usual(candidates, options.cache_bits < 16 and options.plans_windows)
    return Budget.parse(options.keep)


def shipped_selection(config: PreTrainedConfig, with_states: bool = False) -> Selection | None:
    """The selection that is shipped for a teacher with a config of this shape, if there is one.

    The windows of that `with_states` are as much shorter as states take bytes.
    """
    for file, shape in SHAPES.items():
        if all(getattr(config, key) == value for key, value in shape.items()):
            return read_selection(SHIPPED / (f"states-{file}" if with_states else file))
    return None


def selection_path(out: Path) -> Path:
    """Where the selection is kept until the conversion to `out` is finished."""
    return out.parent / f".{out.name}.selection.json"


def _recorded(out: Path, options: ConvertOptions) -> Selection | None:
    """The selection of a finished conversion to `out` with the same --keep."""
    file = out / "conversion.json"
    if not file.exists():
        return None
    report = read_json(file)
    if report.get("selection") is None or report.get("options", {}).get("keep") != options.keep:
        return None
    return parse_selection(report["selection"], f"{file}: key 'selection'")
