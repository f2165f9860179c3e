"""How good a converted model is before any training.

    python -m deltanet_convert.benchmarks.zero_token MODEL_DIR --eval wikitext2-test.txt [--text wikipedia.jsonl]

Converts MODEL_DIR with every layer, once per profile, and prints the mean over the layers of the relative squared error
of the attention output (teacher-forced, on the held-out part of the calibration text) and the perplexity on the
evaluation text, in windows of 1024 tokens without overlap, beside the teacher's.
"""

import math
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from deltanet_convert.convert import convert, prepare
from deltanet_convert.options import ConvertOptions
from deltanet_convert.text import read_text

WINDOW = 1024


def eval_windows(file: Path, model_folder: Path, limit: int) -> Tensor:
    """Token ids [n, 1024] of a text (.txt, .jsonl, .parquet) or of an array of token ids (.npy)."""
    if file.suffix == ".npy":
        ids = torch.from_numpy(np.load(file).astype(np.int64))
    else:
        tokenizer = AutoTokenizer.from_pretrained(model_folder)
        text = "\n\n".join(read_text(file, limit * WINDOW))
        ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    count = min(limit, len(ids) // WINDOW)
    if count == 0:
        raise typer.BadParameter(f"{file} has {len(ids)} tokens, a window needs {WINDOW}", param_hint="--eval")
    return ids[: count * WINDOW].view(count, WINDOW)


@torch.inference_mode()
def perplexity(model: Any, windows: Tensor, name: str) -> float:
    """exp of the mean loss over every token but the first of each window."""
    losses = [
        float(F.cross_entropy(model(row[None], use_cache=False).logits[0, :-1].float(), row[1:]))
        for row in track(windows, f"perplexity, {name}", transient=True)
    ]
    return math.exp(sum(losses) / len(losses))


def main(
    model: Annotated[Path, typer.Argument(help="The teacher's folder.")],
    eval_file: Annotated[Path, typer.Option("--eval", help="Evaluation text, or .npy of token ids.")],
    text: Annotated[Path | None, typer.Option(help="Calibration text; without it, the text shipped.")] = None,
    calibration_tokens: Annotated[int, typer.Option(help="Tokens to fit on.")] = 8192,
    windows: Annotated[int, typer.Option(help="Windows of 1024 tokens to score, at most.")] = 64,
) -> None:
    """Convert without training, per profile, and measure."""
    ids = eval_windows(eval_file, model, windows)
    table = Table("start", "relative MSE", "perplexity", "conversion, s", title=f"{model.name}, {len(ids)} windows")
    teacher = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    table.add_row("softmax teacher", "-", f"{perplexity(teacher, ids, 'teacher'):.2f}", "-")
    del teacher
    for profile in ("teacher", "native"):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "converted"
            options = ConvertOptions(profile=profile, text=text, calibration_tokens=calibration_tokens)
            begin = time.perf_counter()
            report = convert(prepare(str(model), out, options), lambda *_: None)
            seconds = time.perf_counter() - begin
            student = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
            found = perplexity(student, ids, profile)
        errors = [layer["relative_mse"] for layer in report["layers"]]
        table.add_row(profile, f"{sum(errors) / len(errors):.3f}", f"{found:.1f}", f"{seconds:.0f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
