"""Names a model in the rows of a benchmark, by its shape and its kind."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from deltanet_hf.models.families import FAMILIES

TEACHER = "teacher"
CONVERTED = "converted"
PLAIN = "transformers"
"""The kind of a teacher that is measured as transformers runs it."""


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
