"""A model folder's tokenizer, and the files beside it that are copied as they are."""

import os
from pathlib import Path
from typing import Any

from deltanet_hf import loading
from deltanet_hf.data import shipped_texts
from deltanet_hf.errors import QualityError, UserError, one_line
from deltanet_hf.inside import inside
from deltanet_hf.safe_write import writing

from .safetensors_folder import read_json
from .scratch import IF_FULL, scratch_folder

TOKENIZER_CONFIG = "tokenizer_config.json"
# Files that no `save_pretrained` writes but that other tools read.
COPIED = ("tokenizer.model", "vocab.json", "merges.txt", "chat_template.json", "LICENSE*", "NOTICE*")

SAMPLE = (
    "In 1859, 12 mice -- \n\tand a CAT'S 3.50 $ caf\u00e9, nai\u0308ve \u6771\u4eac <|im_end|>  did 2+2=4.\r\n\n"
    "def f(x):\n    return {'a': x_1 **2 }  # 100000\n\n\n"
)


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder, as transformers loads it without running code of the folder.

    Raises:
        UserError: there is none, it is damaged, or it names files outside of the folder.
    """
    if (folder / TOKENIZER_CONFIG).is_file():
        _check_named_files(folder)
    tokenizer: Any = loading.load_tokenizer(str(folder), folder)
    tokenizer.init_kwargs.pop("auto_map", None)  # names code, which a copy of the tokenizer would bring with it
    return tokenizer


def _check_named_files(folder: Path) -> None:
    """Raises UserError if the tokenizer's config names a file outside of the folder that exists.

    Configs of old versions name files of the machine that wrote them. Those are not read.
    """
    file = folder / TOKENIZER_CONFIG
    for key, value in read_json(file).items():
        names = value if isinstance(value, list) else [value]
        for name in names if key.endswith(("_file", "_files")) and key != "special_tokens_map_file" else ():
            if isinstance(name, str) and os.path.exists(folder / name):
                inside(folder, name, file, f"key '{key}':")


def check_saving(tokenizer: Any, folder: Path) -> None:
    """Raises UserError if a tokenizer, which was loaded from `folder`, cannot be saved."""
    with scratch_folder() as place:
        try:
            with writing(place, IF_FULL):
                tokenizer.save_pretrained(place)
        except UserError:
            raise
        except Exception as error:  # of any type, by transformers and the tokenizers library
            raise UserError(
                f"{folder}: its tokenizer cannot be saved again ({one_line(error, 200)}); correct tokenizer.json or "
                "tokenizer_config.json"
            ) from error


def check_saved(tokenizer: Any, folder: Path, source: Path) -> None:
    """Raises QualityError if the tokenizer that was saved to `folder` gives other tokens than that of `source`."""
    if not same_tokens(tokenizer, load_tokenizer(folder)):
        raise QualityError(f"{folder}: the saved tokenizer differs from the one in {source}; please report the model")


def same_tokens(one: Any, other: Any) -> bool:
    """Whether two tokenizers give the same tokens for a difficult sample and for plain text."""
    texts = (SAMPLE, shipped_texts()[0].read_text(encoding="utf-8")[:20000])
    return all(_tokens(one, text) == _tokens(other, text) for text in texts)


def _tokens(tokenizer: Any, text: str) -> list[int] | str:
    """The tokens of a text, or the error: some tokenizers read no characters that they do not know."""
    try:
        return tokenizer(text, verbose=False)["input_ids"]  # type: ignore[no-any-return]
    except Exception as error:  # of any type, by the tokenizers library
        return one_line(error)
