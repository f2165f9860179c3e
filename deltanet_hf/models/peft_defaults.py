"""Default LoRA targets for converted models, so that `LoraConfig()` works without `target_modules`."""

from __future__ import annotations

import functools
import sys

from deltanet_hf.models.families import FAMILIES


def register_peft_defaults() -> None:
    """Tell PEFT, where it is imported, the teacher's default targets by the names they have in converted layers.

    PEFT reads a configuration's dictionary before it looks for a model's default targets, so the configurations call
    this in `to_dict`; PEFT itself is never imported for it.
    """
    if "peft" in sys.modules:
        _register()


@functools.cache
def _register() -> None:
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as TARGETS

    for family in FAMILIES.values():
        # Layers that keep the family's attention have `qkv_proj` where it has (Phi 3), the others never do.
        targets = TARGETS.get(family.model_type, ["qkv_proj"])
        split = ["q_proj", "v_proj"] if "qkv_proj" in targets else []
        TARGETS[family.converted_model_type] = list(dict.fromkeys([*targets, *split]))
    TARGETS["deltanet_qwen3_5_text"] = ["q_proj", "v_proj"]
