"""Default targets of PEFT's methods for converted models, so that `LoraConfig()` works without `target_modules`."""

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
    from peft.utils import constants

    for name, targets_of in vars(constants).items():
        if not name.endswith("_MODULES_MAPPING") or "llama" not in targets_of:
            continue
        usual = targets_of["llama"]  # for families that PEFT does not know, whose names are Llama's
        for family in FAMILIES.values():
            targets = targets_of.get(family.model_type, usual)
            # Layers that keep the family's attention have `qkv_proj` where it has (Phi 3), the others never do.
            more = ["qkv_proj"] if targets is usual and "v_proj" in targets else []
            more = ["q_proj", "v_proj"] if "qkv_proj" in targets else more
            targets_of[family.converted_model_type] = list(dict.fromkeys([*targets, *more]))
        targets_of["deltanet_qwen3_5_text"] = list(usual)
