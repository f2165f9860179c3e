"""What transformers' Auto classes make of a converted model: AutoModelForCausalLM loads it, all others say so.

Otherwise they end with a list of all configurations, and pipelines take the causal model for one of embeddings or
classes.
"""

from __future__ import annotations

from typing import Any, NoReturn

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto import modeling_auto

from deltanet_hf.errors import UserError


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


def register(config_class: Any) -> None:
    """Register a converted family's configuration with AutoConfig, and what is no causal model of it elsewhere."""
    AutoConfig.register(config_class.model_type, config_class)
    for auto in vars(modeling_auto).values():
        maps = isinstance(auto, type) and getattr(auto, "_model_mapping", None) is not None
        if maps and auto is not AutoModelForCausalLM:
            auto.register(config_class, NoOtherHead, exist_ok=True)
