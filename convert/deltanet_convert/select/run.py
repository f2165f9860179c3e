"""Runs a selection: reference losses, one round per kept unit, the file, the plot."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltanet_hf.data import prefix_ids
from deltanet_hf.errors import UserError
from deltanet_hf.models.layers import LayerTable
from deltanet_hf.safe_write import write_atomically

from ..conversion_plan import make_plan
from ..storage.saved_tokenizer import load_tokenizer
from ..storage.teacher_source import Source
from ..storage.versions import versions
from ..teacher_model import Teacher
from .budget import Memory
from .journal import REFERENCES, SelectionJournal
from .loading import load_teacher
from .methods import EXPORTABLE, Forward, Gradient, NextUnit, Round, every_nth
from .objectives import AnswerLoss, TextKL
from .plot import selection_plot
from .probes import haystack, recall_probes
from .references import References
from .scoring import Scorer
from .select_options import SelectOptions
from .selection_file import Selection
from .switchable import SwitchableModel
from .units import Candidates, Unit, evenly, to_json

DIGITS = 6  # of the scores in the file
TEXT_ROWS = 4  # rows of running text per probe of a format
Show = Callable[
    [float, int, str | None], None
]  # rounds done, with a fraction; all rounds; a line that says what is done


@dataclass(frozen=True)
class SelectionTask:
    """A selection that is checked but has not begun.

    Attributes:
        out: the file to write.
        count: the number of units to keep.
        memory: bytes per sequence, for a budget in bytes.
        notes: lines for the user.
    """

    source: Source
    teacher: Teacher
    options: SelectOptions
    out: Path
    candidates: Candidates
    count: int
    memory: Memory | None
    notes: tuple[str, ...]

    @property
    def length(self) -> int:
        return min(self.options.length, int(self.teacher.config.max_position_embeddings))


def plan_selection(
    source: Source, teacher: Teacher, options: SelectOptions, table: LayerTable, out: Path
) -> SelectionTask:
    """Checks a selection.

    Args:
        table: the layers of a conversion that keeps nothing; a budget in bytes counts their states.

    Raises:
        UserError: the budget makes no sense for this teacher.
    """
    config = teacher.config
    candidates = Candidates.of(config, options.unit)
    notes = [note for note in (candidates.note(),) if note]
    memory = None
    if (at := options.budget.at) is not None:
        plan = make_plan(teacher, table, teacher.dtype, 5 * 10**9, 64)
        memory = Memory.of(plan.layers, candidates, at)
        longest = int(config.max_position_embeddings)
        if at > longest:
            notes.append(f"--at {at}: the teacher's positions end at {longest}; only the bytes count at {at} tokens.")
    count = options.budget.units(candidates, memory)
    return SelectionTask(source, teacher, options, out, candidates, count, memory, tuple(notes))


def run_selection(task: SelectionTask, show: Show = lambda done, total, line: None) -> Selection:
    """Runs a selection to the end and writes its file and plot.

    An interrupted run continues after its last round.

    Raises:
        UserError: the file exists or cannot be written, or recall probes say nothing about this teacher.
    """
    journal = SelectionJournal(task.out, _request(task), task.options.overwrite)
    try:
        selection = _measured(task, journal, show) if task.options.measured else _spread(task)
    except UserError:
        if not journal.steps:  # nothing worth continuing
            journal.remove()
        raise
    write_atomically(task.out, (json.dumps(selection.to_json(), indent=1) + "\n").encode())
    if task.options.measured:
        write_atomically(task.out.with_suffix(".png"), selection_plot(selection))
    journal.remove()
    return selection


def _measured(task: SelectionTask, journal: SelectionJournal, show: Show) -> Selection:
    options, config = task.options, task.teacher.config
    rounds = journal.rounds()
    show(len(rounds), task.count, f"continued after round {len(rounds)}" if rounds else None)
    model = SwitchableModel(
        load_teacher(task.teacher, options.torch_device), task.candidates, options.window, options.sinks
    )
    scorer = Scorer(model, lambda share: show(len(rounds) + share, task.count, None))
    objective = _objective(task)
    if int(objective.ids.max()) >= int(config.vocab_size):
        raise UserError(
            f"{task.teacher.folder}: the tokenizer makes token {int(objective.ids.max())} but vocab_size in "
            f"config.json is {config.vocab_size}; give the tokenizer that belongs to the teacher"
        )
    if (found := journal.references()) is None or isinstance(objective, TextKL):
        measured = References.measure(scorer, objective)  # which also keeps the teacher's logits for the KL
        if found is None:
            journal.done(REFERENCES, found := measured.to_json())
    references = References.from_json(found)
    for name, reason in references.dropped.items():
        show(len(rounds), task.count, f"probes of the format '{name}' are left out: {reason}")
    objective = references.usable(objective, task.source.name)
    scale = references.scale(objective.names)
    units = task.candidates.units
    next_unit: NextUnit
    if options.method == "gradient":
        assert isinstance(objective, AnswerLoss)
        next_unit = Gradient(scorer, objective, scale, units)
    else:
        next_unit = Forward(scorer, objective, scale, units)
    known: dict[Unit, float] = {unit: gain for step in rounds for unit, gain in step.gains.items()}
    while len(rounds) < task.count:
        step = next_unit([step.unit for step in rounds], known)
        journal.round_done(len(rounds) + 1, step)
        rounds.append(step)
        known |= step.gains
        show(len(rounds), task.count, f"{len(rounds)}/{task.count}: {_named(step.unit)}, score {step.score:.3f}")
    spread = scale.score(scorer.losses(objective, evenly(units, task.count)))
    return _selection(task, [step.unit for step in rounds], _scores(references, rounds, float(spread)))


def _spread(task: SelectionTask) -> Selection:
    """A selection by distance alone."""
    if task.options.method == EXPORTABLE:
        order = every_nth(int(task.teacher.config.num_hidden_layers), task.count)
        if unlike := [unit[0] for unit in order if unit[0] in task.candidates.local]:
            raise UserError(
                f"--exportable: layers {unlike} have the teacher's own sliding window, Qwen3.5's softmax layers have "
                "none; leave out --exportable"
            )
    else:
        order = evenly(task.candidates.units, task.count)
    return _selection(task, order, {})


def _selection(task: SelectionTask, order: list[Unit], scores: dict[str, Any]) -> Selection:
    config, options = task.teacher.config, task.options
    return Selection(
        teacher=task.source.name,
        model_type=task.teacher.family.model_type,
        num_hidden_layers=int(config.num_hidden_layers),
        num_key_value_heads=int(config.num_key_value_heads),
        unit=options.unit,
        method=options.method,
        budget=options.budget.said,
        seed=options.seed,
        kept=tuple(sorted(order)),
        order=tuple(order),
        scores=scores,
        settings=options.settings(task.length),
    )


def _scores(references: References, rounds: list[Round], uniform: float) -> dict[str, Any]:
    """The part "scores" of the file."""
    return {
        "losses": {
            name: {"teacher": round(value, DIGITS), "windows": round(references.windows[name], DIGITS)}
            for name, value in references.teacher.items()
        },
        "dropped": references.dropped,
        "rounds": [
            {
                "unit": to_json(step.unit),
                "score": round(step.score, DIGITS),
                "gains": [[to_json(unit), round(gain, DIGITS)] for unit, gain in sorted(step.gains.items())],
            }
            for step in rounds
        ],
        "uniform": round(uniform, DIGITS),
    }


def _objective(task: SelectionTask) -> AnswerLoss | TextKL:
    options = task.options
    tokenizer = load_tokenizer(task.teacher.folder)
    text = haystack(tokenizer)
    if options.method != "kl":
        return AnswerLoss(recall_probes(tokenizer, text, task.length, options.probes, options.window, options.seed))
    rows = TEXT_ROWS * options.probes
    prefix = prefix_ids(tokenizer)
    return TextKL.of_text(text, prefix, task.length, rows, options.window, options.sinks, options.seed)


def _request(task: SelectionTask) -> dict[str, Any]:
    """Everything that the result depends on, as a JSON value."""
    files = [task.teacher.folder / "config.json", *task.teacher.checkpoint.files()]
    options = task.options
    return {
        "teacher": {
            "name": task.source.name,
            "config": hashlib.sha256(files[0].read_bytes()).hexdigest(),
            "files": {file.name: file.stat().st_size for file in files},
        },
        "unit": options.unit,
        "method": options.method,
        "budget": options.budget.said,
        "kept": task.count,
        "seed": options.seed,
        "settings": options.settings(task.length),
        "device": options.torch_device.type if options.measured else None,
        "versions": versions(),
    }


def _named(unit: Unit) -> str:
    return f"layer {unit[0]}" if len(unit) == 1 else f"layer {unit[0]}, key/value head {unit[1]}"
