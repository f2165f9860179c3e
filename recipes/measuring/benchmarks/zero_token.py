"""Measures converted models before any training.

    python -m measuring.benchmarks.zero_token MODEL_DIR --eval wikitext2-test.txt [--text wikipedia.jsonl]
        [--layers every:6]

Converts MODEL_DIR to states alone in 16 bits: as for training, with `--no-training` and with `--profile qwen3_5`. For
each, it prints

- the relative squared error of the attention output, mean over the converted layers, on the teacher's inputs of the
  held-out part of the calibration text;
- the perplexity on the evaluation text, in windows of 1024 tokens without overlap, and the KL divergence from the
  teacher there.
"""

from __future__ import annotations

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
from transformers import AutoTokenizer

from deltanet_convert.calibration_text import read_text
from deltanet_convert.conversion import convert
from deltanet_convert.job import prepare
from deltanet_convert.options import ConvertOptions
from deltanet_hf.data import with_prefix
from deltanet_hf.exit_codes import run_command
from deltanet_hf.loading import load_model

WINDOW_TOKENS = 1024
STATES: dict[str, Any] = {"mixer": "gated_deltanet", "cache_bits": 16}
STARTS: dict[str, dict[str, Any]] = {
    "default": STATES,
    "--no-training": {**STATES, "training": False},
    "--profile qwen3_5": {"profile": "qwen3_5"},
}  # options of the conversions by their names in the table


def eval_windows(file: Path, model_folder: Path, limit: int) -> Tensor:
    """Token ids [n, 1024] of a text (.txt, .jsonl, .parquet) or of an array of token ids (.npy).

    Each window of a text follows the begin-of-text token, if the tokenizer has one.

    Args:
        model_folder: the folder of the tokenizer.
        limit: the largest number of windows.

    Raises:
        typer.BadParameter: the text has fewer than 1024 tokens.
    """
    tokenizer = None
    if file.suffix == ".npy":
        ids = torch.from_numpy(np.load(file).astype(np.int64))
    else:
        tokenizer = AutoTokenizer.from_pretrained(model_folder)
        text = "\n\n".join(read_text(file, limit * WINDOW_TOKENS))
        ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    count = min(limit, len(ids) // WINDOW_TOKENS)
    if count == 0:
        raise typer.BadParameter(f"{file} has {len(ids)} tokens, a window needs {WINDOW_TOKENS}", param_hint="--eval")
    rows = ids[: count * WINDOW_TOKENS].view(count, WINDOW_TOKENS)
    return rows if tokenizer is None else with_prefix(rows, tokenizer)


@torch.inference_mode()
def measure(model: Any, teacher: Any, windows: Tensor, name: str) -> tuple[float, float]:
    """Perplexity, and KL(teacher || model) in nats per token, over all tokens but the first of each window.

    Args:
        windows: token ids [n, T].
        name: what the progress bar calls the model.
    """
    loss = kl = 0.0
    for row in track(windows, f"perplexity, {name}", transient=True):
        got, want = (m(row[None], use_cache=False).logits[0, :-1].float().log_softmax(-1) for m in (model, teacher))
        loss += float(F.nll_loss(got, row[1:]))
        kl += float(F.kl_div(got, want, log_target=True, reduction="batchmean"))
    return math.exp(loss / len(windows)), kl / len(windows)


def main(
    model: Annotated[Path, typer.Argument(help="The teacher's folder.")],
    eval_file: Annotated[Path, typer.Option("--eval", help="Evaluation text, or a .npy file of token ids.")],
    text: Annotated[
        Path | None, typer.Option(help="Calibration text.", show_default="text shipped with deltanet-hf")
    ] = None,
    calibration_tokens: Annotated[int, typer.Option(help="Number of tokens to fit on.")] = 8192,
    windows: Annotated[int, typer.Option(help="Largest number of windows of 1024 tokens to score.")] = 64,
    layers: Annotated[str, typer.Option(help="Layers to convert, as in `deltanet-hf convert`.")] = "all",
) -> None:
    """Convert a model in three ways, without training, and measure each."""
    ids = eval_windows(eval_file, model, windows)
    title = f"{model.name}, --layers {layers}, {len(ids)} windows"
    table = Table("options", "relative MSE", "perplexity", "KL to the teacher", "conversion, s", title=title)
    teacher = load_model(str(model), model, torch.float32)
    table.add_row("softmax teacher", "-", f"{measure(teacher, teacher, ids, 'teacher')[0]:.2f}", "0", "-")
    for name, start in STARTS.items():
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "converted"
            options = ConvertOptions(layers=layers, text=text, calibration_tokens=calibration_tokens, **start)
            begin = time.perf_counter()
            report = convert(prepare(str(model), out, options), out, lambda *_: None)
            seconds = time.perf_counter() - begin
            student = load_model(name, out, torch.float32)
            found, kl = measure(student, teacher, ids, name)
        errors = [layer["relative_mse"] for layer in report["layers"]]
        table.add_row(name, f"{sum(errors) / len(errors):.3f}", f"{found:.1f}", f"{kl:.3f}", f"{seconds:.0f}")
    Console().print(table)


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
