"""Measures what states in few bits cost a model: python -m measuring.study.state_rounding STUDENT TEACHER TOKENS.npy

A converted model reads prompts in one call and the tokens after them one by one through its cache, once per row of
SETTINGS, in float32 arithmetic on a CPU. Divergences are KL(teacher || student) of the decoded tokens, errors those of
the logits, without their mean, relative to float32 states. On a CPU late writes wait in float32.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

from deltanet_hf.evaluation.measures.scores import mean_score
from deltanet_hf.evaluation.measures.text_scores import token_divergences
from deltanet_hf.exit_codes import run_command
from deltanet_hf.mixers.layer.late_writes import NAMES, LateSettings
from measuring.markdown import figure, lines
from measuring.study.results_row import load_for_measure

SETTINGS = {  # state_dtype and late_writes
    "float32": ("float32", 0),
    "bfloat16": ("bfloat16", 0),
    "int8, `late_writes=2`": ("int8", 2),
    "int8, `late_writes=4`": ("int8", 4),
    "int8, `late_writes=8`": ("int8", 8),
    "int8, `late_writes=16`": ("int8", 16),
}
HEAD = ("state", "bytes", "KL, nats", "change of KL, %", "error in the first quarter, %", "in the last quarter, %")


def layers_with_states(student: Any) -> list[Any]:
    """The layers whose states may have 8 bits."""
    return [module for module in student.modules() if isinstance(getattr(module, "settings", None), LateSettings)]


def use_states(student: Any, state_dtype: str, late_writes: int) -> None:
    """Let the layers keep their states this way in caches that are made from now on."""
    for layer in layers_with_states(student):
        layer.settings = replace(layer.settings, state_dtype=state_dtype, late_writes=late_writes)


def state_bytes(student: Any) -> int:
    """Bytes of one sequence's states, and of the writes beside them, where the model has 16 bits."""
    shapes = [layer.state_shapes(torch.bfloat16) for layer in layers_with_states(student)]
    return sum(layer[name].nbytes for layer in shapes for name in NAMES if name in layer)


def texts_in(tokens: Path, count: int, length: int) -> Tensor:
    """Read [count, length] int64 from a token array, texts that begin at equal distances in it."""
    array = np.load(tokens).astype(np.int64)
    return torch.from_numpy(array[: len(array) // count * count].reshape(count, -1)[:, :length])


@torch.inference_mode()
def measure(student: Any, teacher: Any, ids: Tensor, prompt: int) -> tuple[Tensor, Tensor]:
    """Divergences from the teacher and errors of the logits [settings, B, T - prompt] for ids [B, T] int64."""
    taught = teacher(ids, use_cache=False, logits_to_keep=ids.shape[1] - prompt).logits
    caches: list[Any] = [None] * len(SETTINGS)

    def read(new: Tensor) -> Tensor:
        """Logits [settings, B, V] after the next tokens [B, n]."""
        logits = []
        for index, setting in enumerate(SETTINGS.values()):
            use_states(student, *setting)
            output = student(new, past_key_values=caches[index], use_cache=True, logits_to_keep=1)
            caches[index] = output.past_key_values
            logits.append(output.logits[:, -1])
        return torch.stack(logits)

    read(ids[:, :prompt])
    divergences, errors = [], []
    for at, token in enumerate(ids[:, prompt:].split(1, dim=1)):
        logits = read(token)
        divergences.append(token_divergences(taught[:, at].expand_as(logits), logits))
        logits -= logits.mean(-1, keepdim=True)
        errors.append((logits - logits[0]).norm(dim=-1) / logits[0].norm(dim=-1))
    return torch.stack(divergences, -1).double(), torch.stack(errors, -1).double()


def main(
    student: Annotated[str, typer.Argument(help="Folder of a converted model.")],
    teacher: Annotated[str, typer.Argument(help="Folder of its teacher.")],
    tokens: Annotated[Path, typer.Argument(help="Token array; the texts begin at equal distances in it.")],
    prompt: Annotated[int, typer.Option(help="Tokens of a text to read at once.")] = 256,
    count: Annotated[int, typer.Option(help="Tokens to decode after them.")] = 1024,
    texts: Annotated[int, typer.Option(help="Texts, decoded as one batch.")] = 8,
) -> None:
    """Print a table with a row per setting of the states; the errors of means are over texts."""
    ids = texts_in(tokens, texts, prompt + count)
    model, taught_by = (load_for_measure(folder, torch.device("cpu")) for folder in (student, teacher))
    divergences, errors = measure(model, taught_by, ids, prompt)
    kl, exact, quarter = divergences.mean(-1), divergences[0].mean(-1), errors.shape[-1] // 4
    cells = []
    for index, (name, setting) in enumerate(SETTINGS.items()):
        use_states(model, *setting)
        mean, change = mean_score(kl[index].tolist()), mean_score((100 * (kl[index] / exact - 1)).tolist())
        early, late = (100 * float(part.mean()) for part in (errors[index, :, :quarter], errors[index, :, -quarter:]))
        cells.append([name, f"{state_bytes(model):,}", figure(mean.value, mean.stderr, 4)])
        cells[-1] += [figure(change.value, change.stderr, 2), figure(early, digits=2), figure(late, digits=2)]
    typer.echo(lines(HEAD, cells))


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
