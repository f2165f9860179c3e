"""Writes a tiny teacher, its converted student, a tokenizer and a text to disk, and recipes that use them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from deltanet_hf import LayerTable, converted_config
from deltanet_hf.mixers.layer.parts import Opening
from deltanet_hf.models.factory import model_class
from deltanet_hf.models.families import FAMILIES
from deltanet_recipes.config import load_recipe
from deltanet_recipes.schema import Recipe
from deltanet_recipes.training.logbook import read_log
from deltanet_recipes.training.trainer import Trainer

WORDS = 60
LAYERS = 3
SHAPE: dict[str, Any] = {
    "vocab_size": WORDS + 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.15,
    "tie_word_embeddings": True,
}
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ 'w50 ' if m.role == 'user' else 'w51 ' }}{{ m.content }} w52 {% endfor %}"
    "{% if add_generation_prompt %}{{ 'w51 ' }}{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2, "<unk>": 3, **{f"w{i}": 4 + i for i in range(WORDS)}}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


def make_models(
    folder: Path, layers: tuple[int, ...] = tuple(range(LAYERS)), family: str = "llama", **wiring: Any
) -> None:
    """Write FOLDER/teacher and FOLDER/student, which has the teacher's weights and untrained new parameters.

    Parts that would begin at zero are opened, or there would be nothing to learn from the teacher.
    """
    torch.manual_seed(0)
    config = FAMILIES[family].config_class(**SHAPE)
    teacher = FAMILIES[family].model_class(config)
    softmax = tuple(index for index in range(LAYERS) if index not in layers)
    table = LayerTable.preset(LAYERS, softmax=softmax, **wiring)
    student = model_class(family)(converted_config(config, table))
    student.load_state_dict(teacher.state_dict(), strict=False)
    for module in student.modules():
        if isinstance(module, Opening):
            torch.nn.init.constant_(module.opening, 0.5)
    tokenizer = make_tokenizer()
    for name, model in (("teacher", teacher), ("student", student)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "student" / "conversion.json").write_text(json.dumps({"teacher": {"path": str(folder / "teacher")}}))


def make_text(path: Path, documents: int = 120, seed: int = 0) -> None:
    """Write a .jsonl file of random documents of 20 to 60 words."""
    generator = torch.Generator().manual_seed(seed)
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(documents):
            length = int(torch.randint(20, 60, (1,), generator=generator))
            words = torch.randint(0, WORDS, (length,), generator=generator).tolist()
            file.write(json.dumps({"text": " ".join(f"w{word}" for word in words)}) + "\n")


def make_workplace(folder: Path, **kwargs: Any) -> Path:
    make_models(folder, **kwargs)
    make_text(folder / "text.jsonl")
    return folder


def recipe_tree(folder: Path, stages: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """A recipe over the files in `folder`, as a YAML file holds it."""
    data = {"sources": [{"path": str(folder / "text.jsonl")}], "holdout_tokens": 256, "repeat": True}
    return {
        "student": str(folder / "student"),
        "output": str(folder / "run"),
        "data": {**data, **changes.pop("data", {})},
        "stages": stages,
        "engine": {"device": "cpu"},
        "log": {"every": 1, "evaluate_every": 100, "checkpoint_every": 2},
        **changes,
    }


def write_recipe(folder: Path, tree: dict[str, Any]) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def tiny_recipe(workplace: Path, out: Path, *stages: dict[str, Any], **changes: Any) -> Recipe:
    """The recipe of a run in `out`, from a file beside it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    return load_recipe(write_recipe(out.parent, recipe_tree(workplace, list(stages), output=str(out), **changes)))


def losses(out: Path) -> list[tuple[str, int, float]]:
    """The losses in the log of a run, by stage and step."""
    return [(row["stage"], row["step"], row["loss"]) for row in read_log(out) if "loss" in row]


@contextmanager
def interrupted_at(step: int) -> Iterator[None]:
    """A run that Ctrl-C ends before this step of a stage."""
    real = Trainer.optimiser_step

    def stop(self: Trainer) -> Any:
        if self.step == step:
            raise KeyboardInterrupt
        return real(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "optimiser_step", stop)
        with pytest.raises(KeyboardInterrupt):
            yield


NO_CHECKPOINTS = {"every": 1, "evaluate_every": 100, "checkpoint_every": 100}
ALIGN: dict[str, Any] = {
    "kind": "align",
    "tokens": 64 * 2 * 12,
    "sequence_length": 64,
    "batch_tokens": 128,
    "optimizer": {"mixer_lr": 3e-3},
}
DISTIL: dict[str, Any] = {
    "kind": "distil",
    "tokens": 64 * 2 * 12,
    "sequence_length": 64,
    "batch_tokens": 128,
    "loss_chunk": 50,
    "lora_rank": 4,
    "optimizer": {"mixer_lr": 3e-3, "rest_lr": 1e-3},
}
