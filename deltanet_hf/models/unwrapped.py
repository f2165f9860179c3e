"""The causal language model inside what PEFT and torch.compile put around it, and its decoder layers."""

from __future__ import annotations

from typing import Any


def unwrapped(model: Any) -> Any:
    """`model` itself, or the model that `torch.compile` or a `PeftModel` wraps, with the adapters in it."""
    model = getattr(model, "_orig_mod", model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def decoder_layers(model: Any) -> Any:
    """The decoder layers of a causal language model; none of a family that calls them otherwise than `model.layers`."""
    return getattr(getattr(model, "model", None), "layers", ())
