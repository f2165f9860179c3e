"""The defaults of `convert` and `select` that depend on the teacher: the mixer and the bits of the cache."""

from __future__ import annotations

from deltanet_hf.mixers import WINDOW_SUFFIX
from deltanet_hf.mixers.layer.masks import sliding_window
from deltanet_hf.mixers.window import WindowAttention
from deltanet_hf.models.layers import Kind
from deltanet_kernels.packed_cache.layout import takes_key_order

from ..options import DEFAULT_MIXER, ConvertOptions
from ..teacher_model import Teacher
from .cache_sizes import CacheSizes
from .for_convert import budget_of
from .selection_file import file_selection
from .spending import SHORTEST
from .units import Candidates

LARGEST_STATE_SHARE = 1 / 6
"""Of a budget. With 8 and 13% of the bytes in states, SmolLM2-135M was ahead of windows alone, with 21% far behind."""


def with_defaults(options: ConvertOptions, teacher: Teacher) -> ConvertOptions:
    """The options with the defaults for a teacher: `default_mixer`, and 16 bits for heads that have no form in 4."""
    given = options.model_fields_set
    if options.cache_bits == 4 and "cache_bits" not in given and not takes_key_order(teacher.head_dim):
        options = options.model_copy(update={"cache_bits": 16})
    if options.mixer == DEFAULT_MIXER and "mixer" not in given:
        options = options.model_copy(update={"mixer": default_mixer(options, teacher)})
    return options


def default_mixer(options: ConvertOptions, teacher: Teacher) -> str:
    """The mixer that a selection was planned for; without one windows and states, or windows alone.

    Windows are alone with --context, where an untrained state is further from the text; where layers slide, which
    allows no state of what has left a window; and where states would take more than `LARGEST_STATE_SHARE` of a budget
    in bytes.
    """
    slides = any(sliding_window(teacher.config, layer) is not None for layer in range(teacher.num_layers))
    if options.context is not None or slides:
        return WindowAttention.name
    if options.automatic:
        alone = options.plans_windows and _states_take_too_much(options, teacher)
        return WindowAttention.name if alone else DEFAULT_MIXER
    selection = file_selection(options.keep, teacher.config)
    if selection is None or selection.planned_windows is None:
        return DEFAULT_MIXER
    kind = selection.settings.get("kind")
    return WindowAttention.name if kind is None else f"{kind['mixer']}{WINDOW_SUFFIX}"


def _states_take_too_much(options: ConvertOptions, teacher: Teacher) -> bool:
    candidates = Candidates.of(teacher.config, "layer")
    budget = budget_of(options, candidates)
    if budget.at is None:
        return False
    kinds = options.table(1, (), teacher.config).only_kind, Kind(WindowAttention, WindowAttention.Settings())
    with_states, alone = (CacheSizes(teacher, candidates, budget.at, options.cache_bits, kind) for kind in kinds)
    windows = [SHORTEST] * teacher.num_layers
    return with_states.total((), windows) - alone.total((), windows) > LARGEST_STATE_SHARE * budget.allowed(alone)
