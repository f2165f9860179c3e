"""Everything in an exported (or imported) folder besides weights and config: tokenizer, generation config, card."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from ..checkpoint import read_json
from ..files import write_atomically, writing
from ..output import TOKENIZER_FILES, load_tokenizer

USE = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH")
tokenizer = AutoTokenizer.from_pretrained("PATH")
```"""


def complete_with_companions(source: Path, folder: Path, config: Any, note: str) -> None:
    """Copies what belongs to the model from `source` into `folder`; safe to repeat.

    Args:
        config: the source's, for a generation config where it has none.
        note: a paragraph for the card.
    """
    with writing(folder):
        if (source / "generation_config.json").exists():
            GenerationConfig.from_pretrained(source).save_pretrained(folder)
        else:
            GenerationConfig.from_model_config(config).save_pretrained(folder)
        for name in TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        for pattern in ("LICENSE*", "NOTICE*"):
            for file in sorted(source.glob(pattern)):
                shutil.copyfile(file, folder / file.name)
    _name_tokenizer_class(source, folder)
    write_atomically(folder / "README.md", _card(source, note).encode())


EXPORTED = f"""This folder is a Gated DeltaNet model written as a Qwen3.5 dense text model (`Qwen3_5ForCausalLM`),
exactly: the same function, in an architecture that transformers, vLLM, mlx-lm and llama.cpp know. No other package is
needed:

{USE}

Where no layer keeps softmax attention, one idle layer (all weights 0) follows the last: it adds nothing, and gives
runtimes the attention cache from which they count tokens. `export.json` records what is needed to undo the rewrite
(`deltanet-hf convert` does).
"""


def _name_tokenizer_class(source: Path, folder: Path) -> None:
    """Names the tokenizer's class, which transformers would otherwise look up by the new model type."""
    file = folder / "tokenizer_config.json"
    settings = read_json(file) if file.exists() else {}
    if "tokenizer_class" not in settings and any((folder / name).exists() for name in TOKENIZER_FILES):
        settings["tokenizer_class"] = type(load_tokenizer(source)).__name__
        write_atomically(file, (json.dumps(settings, indent=2) + "\n").encode())


def _card(source: Path, note: str) -> str:
    """The source's card with a paragraph about this folder after its header."""
    file = source / "README.md"
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    front = re.match(r"---\n.*?\n---\n", text, re.DOTALL)
    header = front[0] if front else "---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n"
    rest = text[front.end() :] if front else text
    return f"{header}\n{note}\n{rest.lstrip()}"
