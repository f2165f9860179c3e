"""How good a converted model is before any training.

    python -m deltanet_convert.benchmarks.zero_token MODEL_DIR --eval wikitext2-test.txt [--text wikipedia.jsonl]
        [--layers every:6]

Converts MODEL_DIR once per profile, and with `--no-training`. Prints the relative squared error of the attention
output, mean over the converted layers, on the teacher's inputs of the held-out part of the calibration text. On the evaluation
text, in windows of 1024 tokens without overlap, it prints the perplexity of teacher and converted model and the KL
divergence between them.
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

from deltanet_convert.calibration_text import read_text
from deltanet_convert.convert import convert
from deltanet_convert.job import prepare
from deltanet_convert.options import ConvertOptions
from deltanet_hf.data import with_prefix
from deltanet_hf.exit_codes import run_command

WINDOW = 1024


def eval_windows(file: Path, model_folder: Path, limit: int) -> Tensor:
    """Token ids [n, 1024] of a text (.txt, .jsonl, .parquet) or of an array of token ids (.npy).

    Those of a text stand behind the begin-of-text token, if the tokenizer has one.
    """
    tokenizer = None
    if file.suffix == ".npy":
        ids = torch.from_numpy(np.load(file).astype(np.int64))
    else:
        tokenizer = AutoTokenizer.from_pretrained(model_folder)
        text = "\n\n".join(read_text(file, limit * WINDOW))
        ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    count = min(limit, len(ids) // WINDOW)
    if count == 0:
        raise typer.BadParameter(f"{file} has {len(ids)} tokens, a window needs {WINDOW}", param_hint="--eval")
    rows = ids[: count * WINDOW].view(count, WINDOW)
    return rows if tokenizer is None else with_prefix(rows, tokenizer)


@torch.inference_mode()
def measure(model: Any, teacher: Any, windows: Tensor, name: str) -> tuple[float, float]:
    """exp of the mean loss over every token but the first of each window, and KL(teacher || model), nats a token."""
    loss = kl = 0.0
    for row in track(windows, f"perplexity, {name}", transient=True):
        got, want = (m(row[None], use_cache=False).logits[0, :-1].float().log_softmax(-1) for m in (model, teacher))
        loss += float(F.nll_loss(got, row[1:]))
        kl += float(F.kl_div(got, want, log_target=True, reduction="batchmean"))
    return math.exp(loss / len(windows)), kl / len(windows)


def main(
    model: Annotated[Path, typer.Argument(help="The teacher's folder.")],
    eval_file: Annotated[Path, typer.Option("--eval", help="Evaluation text, or .npy of token ids.")],
    text: Annotated[Path | None, typer.Option(help="Calibration text; without it, the text shipped.")] = None,
    calibration_tokens: Annotated[int, typer.Option(help="Tokens to fit on.")] = 8192,
    windows: Annotated[int, typer.Option(help="Windows of 1024 tokens to score, at most.")] = 64,
    layers: Annotated[str, typer.Option(help="As in `deltanet-hf convert`.")] = "all",
) -> None:
    """Convert without training, per profile, and measure."""
    ids = eval_windows(eval_file, model, windows)
    title = f"{model.name}, --layers {layers}, {len(ids)} windows"
    table = Table("start", "relative MSE", "perplexity", "KL to the teacher", "conversion, s", title=title)
    teacher = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    table.add_row("softmax teacher", "-", f"{measure(teacher, teacher, ids, 'teacher')[0]:.2f}", "0", "-")
    for profile, training in (("faithful", True), ("faithful", False), ("qwen3_5", True)):
        name = profile if training else f"{profile}, --no-training"
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "converted"
            options = ConvertOptions(
                layers=layers,
                profile=profile,
                training=training,
                text=text,
                calibration_tokens=calibration_tokens,
            )
            begin = time.perf_counter()
            report = convert(prepare(str(model), out, options), lambda *_: None)
            seconds = time.perf_counter() - begin
            student = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
            found, kl = measure(student, teacher, ids, name)
        errors = [layer["relative_mse"] for layer in report["layers"]]
        table.add_row(name, f"{sum(errors) / len(errors):.3f}", f"{found:.1f}", f"{kl:.3f}", f"{seconds:.0f}")
    Console().print(table)


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
