"""Writes the final model of a run: weights, tokenizer, recipe, conversion report and model card."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from deltanet_hf.mixers import FLOAT32_NAMES
from deltanet_hf.publish import Workspace, publish_folder
from deltanet_hf.safe_write import writing
from deltanet_recipes.schema import Recipe
from deltanet_recipes.training.logbook import read_log
from deltanet_recipes.training.model_card import write_card

FROM_STUDENT = ("conversion.json", "generation_config.json", "chat_template.jinja", "LICENSE*", "NOTICE*")


def save_final(
    folder: Path,
    student: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
    dtype: torch.dtype,
    data: list[dict[str, Any]],
) -> None:
    """Save the trained model; whatever happens, `folder` is absent, holds an earlier result, or is complete.

    Args:
        folder: the folder to be written; an earlier result is replaced.
        student: the trained model. Its weights are converted to `dtype` in place, except for those that its mixers
            keep in float32.
        recipe: with the stages that the model was trained by.
        dtype: the dtype of the saved weights.
        data: the reports of the corpora.
    """
    for name, parameter in student.named_parameters():
        if name.rpartition(".")[2] not in FLOAT32_NAMES:
            parameter.data = parameter.data.to(dtype)
    student.config.use_cache = True
    student.config.dtype = dtype

    def fill(workspace: Workspace) -> dict[str, Any]:
        model = workspace.model
        with writing(model):
            student.save_pretrained(model)
            tokenizer.save_pretrained(model)
            (model / "recipe.json").write_text(json.dumps(recipe.model_dump(mode="json"), indent=1))
            for pattern in FROM_STUDENT:
                for source in Path(recipe.student).glob(pattern):
                    if source.is_file() and not (model / source.name).is_file():
                        shutil.copy(source, model / source.name)
            write_card(model, recipe, read_log(Path(recipe.output)), data, student.config)
            for weights in model.glob("*.safetensors"):  # safetensors makes files that only their owner can read
                weights.chmod((model / "config.json").stat().st_mode)
        return {}

    # The stages are saved already, so an interrupted call has nothing to resume: it is repeated.
    publish_folder(folder, {}, fill, resume=False, overwrite=True, what="training run")
