"""Which models `deltanet-hf bench` measures."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from deltanet_hf.errors import UserError
from deltanet_hf.evaluation.measures.decoding_mode import MODES
from deltanet_hf.evaluation.speed.bench import Conditions, Subject
from deltanet_hf.evaluation.speed.naming import kind_of, shape_of
from deltanet_hf.evaluation.speed.random_models import KINDS, SHAPES, random_model
from deltanet_hf.generate import load_for_inference
from deltanet_hf.mixers import MIXER_NAMES


def check_conditions(conditions: Conditions) -> None:
    """Refuse lengths, batch sizes and modes that do not exist, with UserError."""
    for option, values in (("--context", conditions.contexts), ("--batch", conditions.batches)):
        if min(values) < 1:
            raise UserError(f"{option}: got {min(values)}, expected 1 or more")
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
    if random_weights is None:
        assert model is not None
        return _saved([name for name in (teacher, model) if name is not None], dtype, device)
    if teacher is not None:
        raise UserError("--teacher: --random-weights makes its own teacher; leave out one of the two")
    if random_weights not in SHAPES:
        raise UserError(f"--random-weights: got {random_weights!r}, expected one of {', '.join(SHAPES)}")
    if mixer not in MIXER_NAMES:
        raise UserError(f"--mixer: got {mixer!r}, expected one of {', '.join(MIXER_NAMES)}")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    weights = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if dtype not in weights:
        raise UserError(f"--dtype: got {dtype!r}, expected {', '.join(weights)}")
    make = functools.partial(
        random_model, random_weights, mixer=mixer, dtype=weights[dtype], device=torch.device(device or default)
    )
    return (Subject(random_weights, kind, functools.partial(make, kind)) for kind in KINDS)


def _saved(names: list[str], dtype: str, device: str | None) -> Iterator[Subject]:
    for name in names:
        loaded: list[PreTrainedModel] = [load_for_inference(name, dtype, device)[0]]
        yield Subject(shape_of(loaded[0]), kind_of(loaded[0]), loaded.pop)
