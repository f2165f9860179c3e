"""Registers converted models with transformers' Auto classes: AutoModelForCausalLM loads them, all others say so.

Otherwise these end with a list of all configurations, and pipelines take the causal model for one of embeddings or
classes. The module registers the models when it is imported.
"""

from __future__ import annotations

from typing import Any, NoReturn

from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto

from deltanet_hf.errors import UserError
from deltanet_hf.models.configurations import config_classes

# `transformers serve` asks AutoModelForDecision first, and loads the causal model after transformers' own error.
CAUSAL = ("AutoModelForCausalLM", "AutoModelForDecision")


class NoOtherHead:
    """In the place of a model class."""

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises UserError, which pipelines let through, while after other errors they try the next class."""
        source = name.model_type if isinstance(name, PreTrainedConfig) else name
        raise UserError(
            f"{source}: a converted model has the head of a language model only; load it "
            "with AutoModelForCausalLM, whose `.model` gives hidden states"
        )

    _from_config = from_pretrained


for _config_class in config_classes():
    for _auto in vars(modeling_auto).values():
        _maps = isinstance(_auto, type) and getattr(_auto, "_model_mapping", None) is not None
        if _maps and _auto.__name__ not in CAUSAL:
            _auto.register(_config_class, NoOtherHead, exist_ok=True)
