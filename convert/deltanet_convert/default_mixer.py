"""Where `convert` and `select` make windows alone, although their default is windows and states."""

from __future__ import annotations

from deltanet_hf.mixers.layer.masks import sliding_window
from deltanet_hf.mixers.window import WindowAttention
from deltanet_hf.models.layers import Kind

from .keep_option import file_selection
from .options import ConvertOptions
from .select.cache_sizes import CacheSizes
from .select.for_convert import budget_of
from .select.spending import SHORTEST
from .select.units import Candidates
from .teacher_model import Teacher

LARGEST_STATE_SHARE = 1 / 6
"""Of a budget. With 8 and 13% of the bytes in states, SmolLM2-135M was ahead of windows alone, with 21% far behind."""


def makes_windows_alone(teacher: Teacher, options: ConvertOptions) -> bool:
    """Whether windows alone take the place of windows and states.

    They do with --context, where an untrained state is further from the text; where layers slide, which allows no state
    of what has left a window; for a selection that was planned for them; and where states would take more than
    `LARGEST_STATE_SHARE` of a budget in bytes.
    """
    slides = any(sliding_window(teacher.config, layer) is not None for layer in range(teacher.num_layers))
    if options.context is not None or slides:
        return True
    if (selection := file_selection(options.keep, teacher.config)) is not None:
        return selection.planned_windows is not None and "kind" not in selection.settings
    return options.automatic and options.plans_windows and _states_take_too_much(teacher, options)


def _states_take_too_much(teacher: Teacher, options: ConvertOptions) -> bool:
    candidates = Candidates.of(teacher.config, "layer")
    budget = budget_of(options, candidates)
    if budget.at is None:
        return False
    kinds = options.table(1, (), teacher.config).only_kind, Kind(WindowAttention, WindowAttention.Settings())
    with_states, alone = (CacheSizes(teacher, candidates, budget.at, options.cache_bits, kind) for kind in kinds)
    windows = [SHORTEST] * teacher.num_layers
    return with_states.total((), windows) - alone.total((), windows) > LARGEST_STATE_SHARE * budget.allowed(alone)
