"""Loads a folder's tokenizer with an error that says what to add."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from deltanet_hf.errors import UserError


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
