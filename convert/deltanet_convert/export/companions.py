"""Writes the tokenizer, generation config, licence and card of an exported or imported folder."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import transformers

from deltanet_hf.safe_write import write_atomically, writing

from ..storage.generation_config import generation_config
from ..storage.safetensors_folder import read_json
from ..storage.saved_tokenizer import COPIED, check_saved, load_tokenizer

OWN_TOKENIZER = "own_tokenizer"  # name of a Python module that exports for mlx-lm contain
USE = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH")
tokenizer = AutoTokenizer.from_pretrained("PATH")
```"""


def write_companions(source: Path, folder: Path, config: Any, note: str) -> None:
    """Copies all files except weights and config from `source` into `folder`; safe to repeat.

    Args:
        config: the source's config, from which a generation config is made if it has none.
        note: a paragraph for the model card.

    Raises:
        QualityError: the copied tokenizer does not give the same tokens as the source's.
    """
    with writing(folder):
        generation_config(source, config).save_pretrained(folder)
        for pattern in COPIED:
            for file in sorted(source.glob(pattern)):
                shutil.copyfile(file, folder / file.name)
    if has_tokenizer(source):
        _save_tokenizer(source, folder)
    write_atomically(folder / "README.md", _card(source, note).encode())


USE_MLX = """```python
from mlx_lm import generate, load

model, tokenizer = load("PATH")
print(generate(model, tokenizer, prompt="..."))
```"""
EXPORTED = """This folder is a Gated DeltaNet model written as a Qwen3.5 dense text model (`Qwen3_5ForCausalLM`). It
computes exactly the same function, in an architecture that transformers, vLLM, mlx-lm and llama.cpp support. This copy
is {runtimes}; no other package is needed:

{use}

A layer whose weights are all 0 is idle and changes nothing. Some runtimes count tokens in the cache of an attention
layer, and some support attention layers at equal distances only; idle layers provide both. `export.json` holds the data
with which `deltanet-hf import` undoes the export.
"""


def export_note(style: str) -> str:
    """The paragraph of the model card that describes an exported folder; style: transformers or mlx."""
    if style == "mlx":
        return EXPORTED.format(runtimes="for mlx-lm", use=USE_MLX)
    return EXPORTED.format(runtimes="for transformers and vLLM", use=USE)


def _save_tokenizer(source: Path, folder: Path) -> None:
    """Saves the tokenizer that `source` loads; the model type, by which transformers finds its class, differs."""
    tokenizer = load_tokenizer(source)
    if (source / f"{OWN_TOKENIZER}.py").exists():  # an export for mlx-lm, which the import undoes
        tokenizer.init_kwargs.pop("auto_map", None)
    with writing(folder):
        tokenizer.save_pretrained(folder)
    check_saved(tokenizer, folder, source)


def keep_own_tokenizer(source: Path, folder: Path) -> None:
    """Makes transformers load the tokenizer of `folder` as it is stored, whatever its rule for the model_type is.

    For some model types, transformers ignores the stored tokenizer class and uses one of its own, unless `auto_map`
    names another class. It then uses the class in tokenizer_config.json or, with trust_remote_code=True, the class in
    the file that `auto_map` names. Here both are the same class.
    """
    if not has_tokenizer(source):
        return
    tokenizer = load_tokenizer(source)
    name = type(tokenizer).__name__
    if not hasattr(transformers, name):
        name = "PreTrainedTokenizerFast"
    file = folder / "tokenizer_config.json"
    named = {**read_json(file), "auto_map": {"AutoTokenizer": [None, f"{OWN_TOKENIZER}.Tokenizer"]}}
    # A subclass, because transformers marks the class and would save every later tokenizer of it with this file.
    module = f"from transformers import {name}\n\n\nclass Tokenizer({name}):\n    pass\n"
    write_atomically(folder / f"{OWN_TOKENIZER}.py", module.encode())
    write_atomically(file, (json.dumps(named, indent=2) + "\n").encode())
    check_saved(tokenizer, folder, source)


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder contains a tokenizer."""
    return any(folder.glob("tokenizer*")) or any(folder.glob("vocab*"))


def _card(source: Path, note: str) -> str:
    """The source's model card with `note` inserted after its header."""
    file = source / "README.md"
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    front = re.match(r"---\n.*?\n---\n", text, re.DOTALL)
    header = front[0] if front else "---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n"
    rest = text[front.end() :] if front else text
    return f"{header}\n{note}\n{rest.lstrip()}"
