"""Uploads what belongs to a converted model besides weights and config: card, licence, report, pictures, tokenizer.

`push_to_hub` of transformers uploads a card without content and no tokenizer. A converted model takes these files from
the folder, or the repository, that it was loaded from.
"""

from __future__ import annotations

import json
import shutil
from os import PathLike
from pathlib import Path
from typing import Any

from transformers.utils import PushToHubMixin

from deltanet_hf.errors import UserError
from deltanet_hf.hub import small_files
from deltanet_hf.inside import inside
from deltanet_hf.models.same_weights import same_weights

CARD = "README.md"
CHANGED = "The weights were changed after the measurements that this card describes."
COMPANIONS = (
    CARD,
    "LICENSE*",
    "NOTICE*",
    "conversion.json",
    "recipe.json",
    "*.png",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "additional_chat_templates/*.jinja",
)


def upload_with_companions(self: Any, working_dir: str | PathLike, repo_id: str, *args: Any, **kwargs: Any) -> Any:
    """A method of the model: transformers calls it when everything that it uploads is in `working_dir`."""
    origin = _origin(self.name_or_path)
    if origin is not None and _holds(origin, self.config.model_type):
        add_companions(Path(working_dir), origin, repo_id)
    return PushToHubMixin._upload_modified_files(self, working_dir, repo_id, *args, **kwargs)


def _origin(name: str) -> Path | None:
    """The folder that a model was loaded from, by its name: a folder, or a hub id whose files are in the cache."""
    from huggingface_hub import try_to_load_from_cache

    if name and Path(name).is_dir():
        return Path(name)
    try:
        config = try_to_load_from_cache(name, "config.json")
        return small_files(name, Path(config).parent.name) if isinstance(config, str) else None
    except (UserError, ValueError):  # the hub does not answer, or the name is no hub id
        return None


def _holds(origin: Path, model_type: str) -> bool:
    """Whether a folder has a card and a model of this type; it may hold the teacher."""
    try:
        config = json.loads((origin / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return (origin / CARD).is_file() and config["model_type"] == model_type


def add_companions(folder: Path, origin: Path, repo: str) -> None:
    """Adds to `folder` what belongs to the model and is not there yet; its card replaces the one that is there.

    The card loses its figures if the weights in `folder` are not those of `origin`, which were measured.

    Args:
        origin: folder that the model was loaded from.
        repo: name of the new repository, under which the card says how to load the model.

    Raises:
        UserError: a file of `origin` is a link that leaves it.
    """
    if origin.resolve() == folder.resolve():
        return
    tags = _tags(folder / CARD)
    for pattern in COMPANIONS:
        for file in origin.glob(pattern):
            name = file.relative_to(origin)
            copy = folder / name
            inside(origin, str(name), origin, "file")
            if file.is_file() and (not copy.exists() or file.name == CARD):
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, copy)
    _finish_card(folder / CARD, tags, repo, same_weights(folder, origin))


def _tags(card: Path) -> list[str]:
    """The tags of the card that transformers wrote, which are those of the call and of the repository so far."""
    from huggingface_hub import ModelCard

    data: Any = ModelCard.load(card).data if card.is_file() else None
    return list(data.tags or []) if data is not None else []


def _finish_card(file: Path, tags: list[str], repo: str, measured: bool) -> None:
    from huggingface_hub import ModelCard

    card = ModelCard(file.read_text(encoding="utf-8").replace('"PATH"', f'"{repo}"'))
    data: Any = card.data
    own = data.tags or []
    data.tags = [*own, *(tag for tag in tags if tag not in own)]
    if not measured:
        data.eval_results = data.model_name = None
        card.text = f"\n> {CHANGED}\n{card.text}"
    card.save(file)
