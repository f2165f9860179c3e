"""A model folder's tokenizer, and the files beside it that are copied as they are."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from deltanet_hf.errors import UserError

# Files that no `save_pretrained` writes but that other tools read.
COPIED = ("tokenizer.model", "vocab.json", "merges.txt", "chat_template.json", "LICENSE*", "NOTICE*")


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder, as transformers loads it; UserError if there is none or it is damaged."""
    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{folder}: its tokenizer cannot be loaded ({reason}); add the teacher's tokenizer.json and "
            "tokenizer_config.json"
        ) from error
