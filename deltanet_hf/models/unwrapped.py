"""The causal language model inside what PEFT puts around it."""

from __future__ import annotations

from typing import Any


def unwrapped(model: Any) -> Any:
    """`model` itself, or the model that a `PeftModel` wraps, with the adapters in it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
