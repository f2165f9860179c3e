"""Writes all token ids of a text file: `python -m measuring.study.text_array TEXT TOKENIZER OUT.npy`.

`deltanet-hf data` makes the arrays that are cut from a recipe's own sources.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from transformers import AutoTokenizer

from deltanet_hf.data.text_files import TextFile
from deltanet_hf.exit_codes import run_command


def main(
    text: Annotated[Path, typer.Argument(help="Text file: .txt, .jsonl (also as .gz or .xz) or .parquet.")],
    tokenizer: Annotated[str, typer.Argument(help="Folder of the tokenizer.")],
    out: Annotated[Path, typer.Argument(help=".npy file to write, uint16 or uint32 token ids.")],
) -> None:
    """Write the token ids of a text; the end-of-text token stands between its documents."""
    encoder = AutoTokenizer.from_pretrained(tokenizer)
    ids: list[int] = []
    for document in TextFile(text).documents():
        ids += [encoder.eos_token_id] if ids else []
        ids += encoder(document, add_special_tokens=False, verbose=False)["input_ids"]
    array = np.asarray(ids, dtype=np.uint16 if len(encoder) <= 1 << 16 else np.uint32)
    np.save(out, array)
    typer.echo(f"{out}: {array.size:,} tokens")


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
