"""How a budget in bytes is spent: which units stay whole, and how long the windows of all others are.

The rounds of a selection give the order in which units are worth keeping. For every number of kept units there is one
longest window that fits; about ten such allocations are measured, from windows alone to as many units as the budget
holds, as models with keys and values in the bits of the cache, on texts of the length of the budget. The cost of an
allocation is the sum of its KL divergence and its score, each divided by that of windows alone; the cheapest is the
best. After two in a row that are worse than the best, no more are tried. Then the windows of the best are shared anew
among the layers (`window_shares.py`), twice, and the cheapest of all is taken.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from deltanet_hf.models.cache_bits import use_cache_bits
from deltanet_hf.models.restrict import change_windows, restrict_heads

from ..views.plan_view import shown_windows, size
from .cache_sizes import SINKS
from .objectives import AnswerLoss, TextKL
from .references import References
from .scoring import ScaledLoss, Scorer
from .switchable import SwitchableModel
from .task import SelectionTask
from .units import Candidates, Unit, whole_heads
from .window_shares import PASSES, window_shares

PATIENCE = 2  # allocations in a row that are worse than the best, after which none is tried
POSITIONS = 2048  # last tokens of a text that the KL divergence is taken on, at most
NOISE = 0.01  # of the score's scale; a smaller loss of windows alone is no measure for that of others


@dataclass(frozen=True)
class Allocation:
    """A way to spend the budget, and what it loses.

    Attributes:
        kept: number of units that stay whole, the first of the order.
        windows: tokens that all others see, by layer.
        nbytes: of the cache.
        kl: KL divergence from the teacher on running text, in nats per token.
        score: loss on the answers, 0 for the teacher and 1 for short windows everywhere; None where none are asked.
    """

    kept: int
    windows: tuple[int, ...]
    nbytes: int
    kl: float
    score: float | None

    def cost(self, uniform: Allocation) -> float:
        """The losses, each as a multiple of that of `uniform`, the allocation of windows alone."""
        cost = self.kl / max(uniform.kl, 1e-9)
        if self.score is not None and uniform.score is not None:
            cost += self.score / max(uniform.score, NOISE)
        return cost

    def __str__(self) -> str:
        score = "" if self.score is None else f", score {self.score:.3f}"
        what = f"{self.kept} whole, windows of {shown_windows(self.windows)} tokens elsewhere"
        return f"{what}: {size(self.nbytes)}, KL {self.kl:.4f}{score}"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "windows": list(self.windows)}

    @classmethod
    def from_json(cls, figures: dict[str, Any]) -> Allocation:
        """The inverse of `to_json`."""
        return cls(**{**figures, "windows": tuple(figures["windows"])})


def best_of(found: Sequence[Allocation]) -> Allocation:
    """The cheapest; the first is that of windows alone."""
    return min(found, key=lambda allocation: allocation.cost(found[0]))


def is_done(found: Sequence[Allocation]) -> bool:
    """Whether the last allocations were worse than the best."""
    return len(found) > PATIENCE and best_of(found) not in found[-PATIENCE:]


def allocations(
    task: SelectionTask,
    model: PreTrainedModel,
    scorer: Scorer,
    most_important: Callable[[int], list[Unit]],
    done: Sequence[Allocation],
    record: Callable[[Allocation], None],
) -> list[Allocation]:
    """The ways to spend a budget that are worth a try, measured; windows alone come first.

    Args:
        model: the teacher with its weights, which are shared; it is not changed.
        scorer: of the teacher with switched layers, which gives the score its scale.
        most_important: the units that are most worth keeping, as many as it is called with, in their order.
        done: those that an earlier run measured.
        record: called with every new one.

    Raises:
        UserError: the teacher answers no format of probes at the length of the budget.
    """
    assert task.spending is not None
    spending, found = task.spending, list(done)
    alike = [1.0] * task.teacher.num_layers
    passed = sum(len(set(allocation.windows)) > 1 for allocation in found)
    if passed == len(PASSES):
        return found
    measure = _Measure(task, model, scorer, task.text_length, spending.sizes.bits)

    def add(kept: list[Unit], windows: tuple[int, ...]) -> None:
        found.append(Allocation(len(kept), windows, spending.sizes.total(kept, windows), *measure(kept, windows)))
        record(found[-1])

    counts = [task.count] if task.options.method == "gradient" else spending.counts()
    for count in counts[len(found) :]:
        if passed or is_done(found):
            break
        kept = most_important(count)
        windows = spending.windows(kept, alike)
        if windows is None:
            break
        add(kept, windows)
    for shares in PASSES[passed:]:
        best = best_of(found)
        kept, before = most_important(best.kept), best.windows
        chosen = window_shares(spending, kept, before, shares, partial(measure.text_changes, kept, before))
        ratios = [share * window / min(before) for share, window in zip(chosen, before, strict=True)]
        shared = spending.windows(kept, ratios)
        if shared is not None and shared != before:
            add(kept, shared)
    return found


class _Measure:
    """Measures allocations as models, on running text and, where a selection is by `forward`, on answers."""

    def __init__(self, task: SelectionTask, model: PreTrainedModel, scorer: Scorer, length: int, bits: int) -> None:
        self.model, self.local, self.bits, self.tick = model, task.candidates.local, bits, scorer.tick
        options, tokenizer = task.options, task.teacher.tokenizer
        self.text = TextKL.of_texts(tokenizer, length, options.probes, min(length, POSITIONS), options.seed)
        scorer.losses(self.text, None)  # keeps the teacher's logits
        self.restricted: Scorer | None = None  # whose windows have derivatives
        if options.method == "gradient":
            switchable = SwitchableModel(sharing_copy(model), task.candidates, options.window, SINKS)
            self.restricted = Scorer(switchable, scorer.tick)
        self.answers: ScaledLoss | None = None
        if options.method == "forward":
            asked = AnswerLoss.of_texts(tokenizer, length, options.probes, options.window, options.seed)
            references = References.measure(scorer, asked)
            self.answers = references.score(scorer, asked, task.teacher.name)

    def __call__(self, kept: Sequence[Unit], windows: Sequence[int]) -> tuple[float, float | None]:
        """KL divergence and score of the teacher with these units whole and windows elsewhere."""
        scorer = self._scorer(kept, windows)
        kl = float(scorer.losses(self.text, ()))
        return kl, None if self.answers is None else replace(self.answers, scorer=scorer).of(())

    def text_changes(
        self, kept: Sequence[Unit], windows: Sequence[int], others: Sequence[Sequence[int]]
    ) -> list[float]:
        """The change of the KL divergence by each of other windows, which are not as in `windows` in one layer."""
        layers = [next(i for i, window in enumerate(windows) if other[i] != window) for other in others]
        if self.restricted is not None:
            return self._text_slopes(self.restricted, kept, windows, others, layers)
        scorer = self._scorer(kept, windows)

        def change(place: int | None) -> None:
            change_windows(scorer.model.model, windows if place is None else others[place])

        base, changed = scorer.with_each(self.text, layers, change)
        return (changed - base).squeeze(1).tolist()

    def _text_slopes(
        self,
        scorer: Scorer,
        kept: Sequence[Unit],
        windows: Sequence[int],
        others: Sequence[Sequence[int]],
        layers: Sequence[int],
    ) -> list[float]:
        """The same by derivatives, in 16 bits: of one other window per layer at a time, half way to all of them.

        As the layers' errors are small and mostly independent, the KL divergence is about a sum of their squares, whose
        changes these derivatives are; at `windows` themselves, shorter ones would seem to cost nothing. Layers take
        turns, so that some become longer while others become shorter and their sum stays about as it is.
        """
        model = scorer.model
        model.keep(kept)
        model.windows, found = windows, [0.0] * len(layers)
        half = torch.full(model.full.shape, 0.5)
        of_layer = {layer: [place for place, other in enumerate(layers) if other == layer] for layer in layers}
        for turn in range(max(map(len, of_layer.values()), default=0)):
            chosen = {layer: places[(turn + layer) % len(places)] for layer, places in of_layer.items()}
            model.others = [others[chosen[i]][i] if i in chosen else window for i, window in enumerate(windows)]
            slopes = scorer.gradients(self.text, half, torch.ones(1)).sum(1)
            for layer, place in chosen.items():
                found[place] = float(slopes[layer])
        return found

    def _scorer(self, kept: Sequence[Unit], windows: Sequence[int]) -> Scorer:
        model = sharing_copy(self.model)
        heads = whole_heads(kept, self.local, int(model.config.num_key_value_heads))
        restrict_heads(model, heads, windows, SINKS)
        use_cache_bits(model, self.bits)
        return Scorer(SwitchableModel(model, Candidates((), (), None), max(windows), SINKS), self.tick)


def sharing_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy whose modules are its own, and whose tensors are those of `model`."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
