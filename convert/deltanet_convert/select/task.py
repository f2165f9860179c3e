"""A selection that is checked: what is to be chosen, and how much of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deltanet_hf.errors import UserError
from deltanet_hf.mixers.attention.head_split import check_heads_part, heads_part
from deltanet_hf.models.far_positions import FarPositions
from deltanet_hf.models.layers import LayerTable

from ..export.obstacles import teacher_obstacles
from ..teacher_model import Teacher
from .budget import Budget
from .cache_sizes import CacheSizes
from .select_options import SelectOptions
from .selection_file import Selection
from .spending import Spending
from .units import Candidates, Unit, evenly, every_nth

LONGEST, LONGEST_PASSED_BACK = 16384, 4096  # tokens of a text, and of one that derivatives are taken on, at most
TEXT_ROWS = 4  # rows of running text for `kl`, per probe of a format for the other methods


@dataclass(frozen=True)
class SelectionTask:
    """A selection that is checked but has not begun.

    Attributes:
        budget: that of the options, or what `auto` stands for.
        count: the number of units to keep; with `spending`, the most that may be (`gradient`: its usual number).
        spread: what is kept where nothing is measured, by distance alone; None where the teacher is run.
        sizes: of caches at the length of a budget in bytes.
        spending: where windows are planned with the kept units: what the budget holds.
        notes: lines for the user.
        positions: those of kept units, where the converted model reads further than the teacher.
    """

    teacher: Teacher
    options: SelectOptions
    candidates: Candidates
    budget: Budget
    count: int
    spread: tuple[Unit, ...] | None
    sizes: CacheSizes | None
    spending: Spending | None
    notes: tuple[str, ...]
    positions: FarPositions | None = None

    @property
    def length(self) -> int:
        """Tokens per probe."""
        return min(self.options.length, int(self.teacher.config.max_position_embeddings))

    @property
    def text_length(self) -> int:
        """Tokens of the texts that ways to spend a budget are measured on."""
        assert self.spending is not None
        return min(self.spending.longest, LONGEST_PASSED_BACK if self.options.method == "gradient" else LONGEST)

    @property
    def settings(self) -> dict[str, Any]:
        """The options and bits on which the scores depend, for the file."""
        options = self.options
        if not options.measured:
            return {}
        planned = {} if self.spending is None else self.spending.sizes.settings
        return {
            "window": options.window,
            "sinks": options.sinks,
            "length": self.length,
            "probes": options.probes,
            **({} if self.positions is None else {"context": self.positions.context}),
        } | planned

    def selection(
        self, order: Sequence[Unit], scores: Mapping[str, Any], windows: tuple[int, ...] | None = None
    ) -> Selection:
        """The result, given the kept units with the most important one first, what was measured, and the windows."""
        config, options = self.teacher.config, self.options
        assert options.unit is not None  # `plan_selection` has decided
        return Selection(
            teacher=self.teacher.name,
            model_type=self.teacher.family.model_type,
            num_hidden_layers=int(config.num_hidden_layers),
            num_key_value_heads=int(config.num_key_value_heads),
            unit=options.unit,
            method=options.choice,
            budget=self.budget.text,
            seed=options.seed,
            kept=tuple(sorted(order)),
            order=tuple(order),
            scores=scores,
            settings=self.settings,
            local=self.candidates.local,
            planned_windows=windows,
        )

    @property
    def time(self) -> str:
        """About how long it takes to measure, for people."""
        on_gpu = self.options.torch_device.type == "cuda"
        return "minutes" if on_gpu else "about ten minutes for 0.5B parameters on two cores"

    def unmeasured(self) -> Selection:
        """Evenly spread units, and windows that are all alike, which take the budget without a measurement."""
        units, spending = self.candidates.units, self.spending
        if spending is None:
            return self.selection(evenly(units, self.count), {})
        kept = evenly(units, spending.usual_count())
        return self.selection(kept, {}, spending.windows(kept, [1.0] * self.teacher.num_layers))

    def is_answered_by(self, found: Selection) -> bool:
        """Whether `found` came from this very task."""
        as_many = self.spending is not None or len(found.kept) == self.count
        return as_many and found == self.selection(found.order, found.scores, found.planned_windows)


def plan_selection(teacher: Teacher, options: SelectOptions, table: LayerTable) -> SelectionTask:
    """Checks a selection.

    Args:
        table: the layers of a conversion of every layer; a budget in bytes counts their caches, and plans how long
            their windows are (`Kind.takes_plan`).

    Raises:
        UserError: the budget makes no sense for this teacher, its heads cannot be told apart, or with --exportable, it
            can be exported in no format.
    """
    config = teacher.config
    kind = table.only_kind
    plans_windows = options.measured and kind.takes_plan
    budget = options.keep or Budget.usual(
        Candidates.of(config, options.unit or "layer"), plans_windows and table.cache_bits < 16
    )
    at = budget.at
    planned = at is not None and plans_windows
    attention: Any = teacher.model.model.layers[0].self_attn  # type: ignore[union-attr, index]
    if options.unit == "kv_head":
        check_heads_part(attention, config)
        if kind.mixer.keeps_all_tokens:
            raise UserError(f"--unit kv_head: {kind.mixer.name} keeps all tokens in every head; give --unit layer")
    elif options.unit is None:
        single = planned and heads_part(attention)
        options = options.model_copy(update={"unit": "kv_head" if single else "layer"})
    assert options.unit is not None
    candidates = Candidates.of(config, options.unit)
    notes = [note for note in (candidates.note(),) if note]
    sizes = spending = None
    if at is None:
        count = budget.units(candidates)
    else:
        sizes = CacheSizes(teacher, candidates, at, table.cache_bits, kind)
        spending = Spending(budget, sizes) if planned else None
        if spending is None:
            count = budget.units_of_bytes(sizes)
        else:
            count = spending.usual_count() if options.method == "gradient" else spending.most
        longest = int(config.max_position_embeddings)
        if at > longest:
            notes.append(f"{budget.said}: the teacher's positions end at {longest}; only the bytes count.")
    spread = None if options.measured else tuple(evenly(candidates.units, count))
    if options.exportable:
        spread = tuple(every_nth(int(config.num_hidden_layers), count))
        if found := teacher_obstacles(config, [layer for (layer,) in spread]):
            raise UserError(f"--exportable: the result could not be exported: {'; '.join(map(str, found))}")
    # Heads that lose their positions have to be trained before they retrieve anything.
    positions = table.positions if table.positions is not None and table.positions.kind == "yarn" else None
    return SelectionTask(teacher, options, candidates, budget, count, spread, sizes, spending, tuple(notes), positions)
