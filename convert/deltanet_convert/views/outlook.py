"""The last words of a conversion: how near the model is to its teacher, and what training makes of it."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import Any

from deltanet_hf.models.layers import SOFTMAX

from .conversion_card import keeps_tokens, verdict

SMALL = 300_000_000  # parameters up to which the rates of SmolLM2-135M's recipes are not too high
VOCABULARY = 49152  # tokens of SmolLM2, whose recipes name the one that ends a document
OTHERS = {  # recipes of larger models, and of Gemma 3, by their parameters; of other families, those of qwen3
    "gemma3_text": {0.27e9: "gemma-3-270m-32k", 1.0e9: "qwen3-0.6b"},
    "llama": {1.2e9: "llama-3.2-1b", 8.0e9: "llama-3.1-8b"},
    "qwen2": {0.6e9: "qwen2.5-coder-0.5b", 1.8e9: "qwen2.5-coder-1.5b"},
    "qwen3": {0.6e9: "qwen3-0.6b", 2.0e9: "qwen3-1.7b", 8.2e9: "qwen3-8b"},
}
# Recipes, and what they were measured to do (docs/results.md, docs/gated-deltanet.md, docs/mixers.md).
WINDOWS = "smollm2-135m-windows", "9.9M tokens halved SmolLM2-135M's KL on texts of 8k tokens"
FURTHER = "smollm2-135m-32k", "9.8M tokens raised the needles that SmolLM2-135M finds in 16k from 28 to 47%"
FURTHER_FROM_TO = 8192, 32768  # positions of the teacher and of the model, for the rows of this recipe
WITH_STATES = "smollm2-135m", "98.3M tokens brought SmolLM2-135M with ten full-attention heads to 0.007"
STATES = "smollm2-135m-pure", "9.9M tokens brought SmolLM2-135M to 0.26, with attention in every fourth layer to 0.16"
ADDED = "smollm2-135m-pure stages.distil.ce_weight=1", "on the text, since it begins as its teacher"
MORE_BITS = "its keys and values need more bits, by deltanet_hf.set_cache_bits(model, 8)"
OWN = {  # of these recipes, what they did to their own model
    "gemma-3-270m-32k": "12.5M tokens lowered Gemma 3 270M's KL on texts of 32k tokens from 0.015 to 0.011",
    "qwen2.5-coder-0.5b": "9.9M tokens brought Qwen2.5-Coder-0.5B to 0.02",
    "qwen2.5-coder-1.5b": "9.9M tokens brought Qwen2.5-Coder-1.5B to 0.014",
}


def outlook(report: dict[str, Any], out: Path, vocabulary: int) -> str:
    """One line; `report` is the contents of `conversion.json`, `out` the folder of a model of so many tokens."""
    plan, kl = report["plan"], report["held_out"]["kl"]
    converted = [layer for layer in plan["layers"] if layer["kind"] != SOFTMAX]
    positions = plan["positions"]
    if not converted and positions is None:
        return f"{verdict(kl, MORE_BITS)}. Its weights are the teacher's, so there is nothing to train."
    if positions is not None and (positions["teacher"], positions["context"]) == FURTHER_FROM_TO:
        recipe, measured = FURTHER
    elif not any(layer["created"] for layer in converted):
        recipe, measured = WINDOWS
    elif keeps_tokens(converted):
        recipe, measured = ADDED
    else:
        recipe, measured = WITH_STATES if all("window" in layer["title"] for layer in converted) else STATES
    model_type, parameters = report["teacher"]["model_type"], plan["teacher_parameters"]
    if parameters > SMALL or model_type == "gemma3_text":
        name, space, override = recipe.partition(" ")
        alone = name == STATES[0] and model_type != "llama"  # which only those of Llama and Qwen3 align and distil
        recipes = OTHERS["qwen3"] if alone else OTHERS.get(model_type, OTHERS["qwen3"])
        nearest = recipes[min(recipes, key=lambda size: abs(math.log(size / parameters)))]
        recipe, measured = nearest + space + override, OWN.get(nearest, measured)
    elif vocabulary != VOCABULARY:
        recipe += " data.separator=null"
    folders = " ".join(shlex.quote(f"{key}={value}") for key, value in (("student", out), ("output", f"{out}-trained")))
    return (
        f"{verdict(kl)}. Training on a GPU ({measured}): deltanet-hf distill {recipe} {folders} "
        "'data.decontaminate=[]' 'data.sources=[{path: TEXT}]'"
    )
