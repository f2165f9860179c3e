"""Which models `deltanet-hf bench` measures, and their names in its rows."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from deltanet_hf.cpu_dtype import check_dtype, loading_dtype
from deltanet_hf.decoding.served import serve
from deltanet_hf.errors import UserError
from deltanet_hf.evaluation.measures.decoding_mode import EAGER, MODES
from deltanet_hf.evaluation.speed.bench import Conditions, Subject
from deltanet_hf.evaluation.speed.random_models import KINDS, SHAPES, random_model
from deltanet_hf.hub import loadable_folder
from deltanet_hf.loading import chosen_device, load_config, load_model
from deltanet_hf.mixers import MIXER_NAMES, unknown_mixer
from deltanet_hf.models.families import FAMILIES

TEACHER = "teacher"
CONVERTED = "converted"
PLAIN = "transformers"
"""The kind of a teacher that is measured as transformers runs it."""
BENCHED = (PLAIN, TEACHER, "windows4bit", "window25")  # with --random-weights
MOST = 10**9  # tokens of a prompt, and prompts


def check_conditions(conditions: Conditions) -> None:
    """Refuse lengths, batch sizes and modes that do not exist, with UserError."""
    for option, values in (("--context", conditions.contexts), ("--batch", conditions.batches)):
        for value in values:
            if not 1 <= value <= MOST:
                raise UserError(f"{option}: got {value}, expected 1 to {MOST:,}")
    for mode in conditions.modes:
        if mode not in MODES:
            raise UserError(f"--mode: got {mode!r}, expected one of {', '.join(MODES)}")


def subjects(
    model: str | None, teacher: str | None, random_weights: str | None, mixer: str, dtype: str, device: str | None
) -> Iterator[Subject]:
    """The models, each loaded when it is measured.

    Raises:
        UserError: neither or both of `model` and `random_weights`, or an unknown shape, mixer, dtype or model.
    """
    if (model is None) == (random_weights is None):
        raise UserError("MODEL: give either a model or --random-weights SHAPE")
    check_dtype(dtype)
    place = chosen_device(device)
    if random_weights is None:
        assert model is not None
        return _saved([name for name in (teacher, model) if name is not None], loading_dtype(dtype, place), place)
    if teacher is not None:
        raise UserError("--teacher: --random-weights makes its own teacher; leave out one of the two")
    if random_weights not in SHAPES:
        raise UserError(f"--random-weights: got {random_weights!r}, expected one of {', '.join(SHAPES)}")
    if mixer not in MIXER_NAMES:
        raise UserError(f"--{unknown_mixer(mixer)}")
    weights = torch.bfloat16 if dtype == "auto" else getattr(torch, dtype)
    make = functools.partial(random_model, random_weights, mixer=mixer, dtype=weights, device=place)
    return (Subject(random_weights, kind, functools.partial(make, kind), _only(kind)) for kind in BENCHED)


def _saved(names: list[str], dtype: str, place: torch.device) -> Iterator[Subject]:
    for name in names:
        folder = loadable_folder(name)
        load_config(name, folder)
        loaded = [load_model(name, folder, dtype)]
        shape, kind = shape_of(loaded[0]), kind_of(loaded[0])
        if kind == TEACHER:
            yield Subject(shape, PLAIN, functools.partial(_placed, loaded, place), _only(PLAIN))
        yield Subject(shape, kind, functools.partial(_handed_over, loaded, place))


def _only(kind: str) -> str | None:
    """The one mode in which models of a kind are measured; None for any."""
    return None if KINDS[kind].served else EAGER.name


def _placed(loaded: list[Any], place: torch.device) -> PreTrainedModel:
    model: PreTrainedModel = loaded[0].to(place)
    return model


def _handed_over(loaded: list[Any], place: torch.device) -> PreTrainedModel:
    """The model, to which nothing else refers from now on, so that its memory is free after its measurement."""
    return serve(loaded.pop().to(place))


def kind_of(model: PreTrainedModel) -> str:
    """`teacher` or `converted`."""
    return TEACHER if getattr(model.config, "deltanet", None) is None else CONVERTED


def shape_of(model: PreTrainedModel) -> str:
    """The number of parameters of the softmax model with this one's shape, such as `135M` or `8.0B`."""
    count = _parameters(model)
    return f"{count / 1e6:.0f}M" if count < 999.5e6 else f"{count / 1e9:.1f}B"


def _parameters(model: PreTrainedModel) -> int:
    values = model.config.to_dict()
    family = FAMILIES.get(str(values.pop("model_type")).removeprefix("deltanet_"))
    if family is not None:
        for key in ("deltanet", "auto_map", "architectures", "dtype", "transformers_version"):
            values.pop(key, None)
        with torch.device("meta"):
            model = family.model_class(family.config_class(**values))
    return sum(parameter.numel() for parameter in model.parameters())
