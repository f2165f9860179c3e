"""The `model_type` of converted models, and what is peculiar to those of some families."""

from __future__ import annotations

from typing import Any

PREFIX = "deltanet_"
QWEN3_5_TYPE = "deltanet_qwen3_5_text"
QWEN3_5_MODEL = "DeltaNetQwen3_5ForCausalLM"

HALF_ANGLES = ("gpt_oss",)  # their rotary embedding has one cos and sin per pair of channels, not per channel

UNPACKABLE = ("gpt_oss",)  # transformers makes their masks without positions, so packed sequences see each other


def family_type(config: Any) -> str:
    """The `model_type` of the family, of a teacher or of a converted model."""
    return str(config.model_type).removeprefix(PREFIX)
