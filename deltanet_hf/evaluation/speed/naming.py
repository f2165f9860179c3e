"""Names a model in the rows of a benchmark, by its shape and its kind."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from deltanet_hf.models.families import FAMILIES
from deltanet_hf.models.layers import LayerTable

TEACHER = "teacher"
PLAIN = "transformers"
"""The kind of a teacher that is measured as transformers runs it."""


def kind_of(model: PreTrainedModel) -> str:
    """`teacher`, `all` where no layer is softmax, or `hybrid` and the percentage of layers that are."""
    if getattr(model.config, "deltanet", None) is None:
        return TEACHER
    table = LayerTable.of(model.config)
    return f"hybrid{100 * len(table.softmax) / len(table):.0f}" if table.softmax else "all"


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
