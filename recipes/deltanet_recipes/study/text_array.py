"""Writes a token array from a text file: `python -m deltanet_recipes.study.text_array TEXT TOKENIZER OUT.npy`.

The documents are taken from places spread evenly over the file, some in a row from each, so that the array has many
authors and long passages that hang together.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from transformers import AutoTokenizer

from deltanet_hf.data.text_files import TextFile
from deltanet_hf.errors import UserError
from deltanet_hf.exit_codes import run_command


def main(
    text: Annotated[Path, typer.Argument(help="Text file: .txt, .jsonl (also as .gz or .xz) or .parquet.")],
    tokenizer: Annotated[str, typer.Argument(help="Folder of the tokenizer.")],
    out: Annotated[Path, typer.Argument(help=".npy file to write, uint16 or uint32 token ids.")],
    tokens: Annotated[int, typer.Option(min=1, help="Largest number of tokens to write.")] = 600_000,
    places: Annotated[int, typer.Option(min=1, help="Number of places in the file.")] = 24,
) -> None:
    """Write a token array; a passage of `tokens / places` tokens from each place, joined by the end-of-text token."""
    documents = list(TextFile(text).documents())
    encoder = AutoTokenizer.from_pretrained(tokenizer)
    begins = np.linspace(0, len(documents), places + 1).astype(int)
    each = tokens // places - 1
    ids: list[int] = []
    for begin, end in pairwise(begins):
        passage: list[int] = []
        for document in documents[begin:end]:
            passage += encoder(document, add_special_tokens=False, verbose=False)["input_ids"]
            if len(passage) >= each:
                break
        ids += [*passage[:each], encoder.eos_token_id]
    if not ids:
        raise UserError(f"{text}: holds no text")
    array = np.asarray(ids, dtype=np.uint16 if len(encoder) <= 1 << 16 else np.uint32)
    np.save(out, array)
    typer.echo(f"{out}: {array.size:,} tokens")


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
