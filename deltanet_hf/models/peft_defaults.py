"""Default LoRA targets for converted models, so that `LoraConfig()` works without `target_modules`."""

from __future__ import annotations

import functools

from deltanet_hf.models.families import FAMILIES


@functools.cache
def register_peft_defaults() -> None:
    """Tell PEFT the teacher's default targets, by the names they have in converted layers."""
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as TARGETS

    for family in FAMILIES.values():
        targets = TARGETS.get(family.model_type, ["q_proj", "v_proj"])
        split = ["q_proj", "v_proj"] if "qkv_proj" in targets else []
        TARGETS[family.converted_model_type] = list(dict.fromkeys([*targets, *split]))
    TARGETS["deltanet_qwen3_5_text"] = ["q_proj", "v_proj"]
