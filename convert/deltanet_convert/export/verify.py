"""`export --verify`: the export in every runtime installed here, against our own model in float32."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from deltanet_hf.data import shipped_texts
from deltanet_hf.errors import QualityError

from .model_folder import ConvertedModel
from .runtimes import BFLOAT16, FLOAT32, RUNTIMES, STORED, TOP, Runtime, Step, describe, installed

PROMPT_LENGTHS = (2, 7, 33, 130)  # tokens: under the convolution's width, under a chunk ...
NEW_TOKENS = 16
# llama.cpp alone differs by up to 2e-3 in float32; a wrong rewrite shows as 1e-1 and more.
LEAST_TOLERANCE = 1e-2


@dataclass(frozen=True)
class Comparison:
    """One runtime's continuations against ours, teacher-forced along its own tokens."""

    runtime: str
    mode: str
    tokens: int
    equal: int  # tokens that are our most likely ones too
    largest: float  # difference of a log-probability
    mean: float
    margin: float  # by which our favourite beat the runtime's, where they differ
    tokens_per_second: float

    def within(self, noise: float) -> bool:
        """Whether rounding explains the differences.

        Args:
            noise: mean difference that rounding makes in our own model; 0 in float32, where every single difference
                is held against `LEAST_TOLERANCE`. In fewer bits single ones are unbounded, and the mean is judged.
        """
        if noise == 0.0:
            return self.tokens > 0 and max(self.largest, self.margin) <= LEAST_TOLERANCE
        return self.tokens > 0 and self.mean <= max(LEAST_TOLERANCE, 4 * noise)


def verify_export(
    model: ConvertedModel,
    export: Path,
    style: str,
    rounded: torch.dtype,
    dtype: torch.dtype | None,
    console: Console,
) -> None:
    """Prints the table of differences. Raises QualityError where one is larger than rounding explains.

    Args:
        rounded: the dtype that the model's weights were rounded to before the rewrite.
        dtype: of the export's weights; None when they are quantised: the differences are then only printed.
    """
    ours: Any = AutoModelForCausalLM.from_pretrained(model.folder, dtype=rounded).float().eval()
    prompts = prompts_for(model)
    found = []
    for module, runtime in RUNTIMES[style].items():
        if not installed(module):
            console.print(f"{module}: not installed here, not tried", highlight=False)
            continue
        for mode in runtime.modes:
            if mode == STORED and dtype == torch.float32 and FLOAT32 in runtime.modes:
                continue  # the same twice
            found.append(compare(ours, runtime(export, mode), prompts, describe(module), mode))
    if not found:
        return
    dtypes = {FLOAT32: torch.float32, BFLOAT16: torch.bfloat16, STORED: dtype}
    noise = {
        mode: dtype_noise(ours, model, used, prompts)
        for mode, used in dtypes.items()
        if used is not None and any(one.mode == mode for one in found)
    }
    console.print(_table(found, noise))
    wrong = [one.runtime for one in found if one.mode in noise and not one.within(noise[one.mode])]
    if wrong:
        raise QualityError(f"{export}: differs from {model.folder} in {', '.join(wrong)}; see the table above")


def prompts_for(model: ConvertedModel) -> list[list[int]]:
    """Beginnings of the shipped text, of several lengths."""
    text = shipped_texts()[0].read_text(encoding="utf-8")[5000:8000]
    ids = AutoTokenizer.from_pretrained(model.folder)(text, add_special_tokens=False)["input_ids"]
    limit = int(model.config.max_position_embeddings) - NEW_TOKENS
    return [ids[: min(length, limit)] for length in PROMPT_LENGTHS]


@torch.no_grad()
def compare(ours: Any, runtime: Runtime, prompts: list[list[int]], name: str, mode: str = FLOAT32) -> Comparison:
    """Runs every prompt in the runtime and looks up our log-probabilities along its tokens."""
    differences, equal, margin, seconds, tokens = [], 0, 0.0, 0.0, 0
    for prompt in prompts:
        started = time.perf_counter()
        steps = runtime.follow(prompt, NEW_TOKENS)
        seconds += time.perf_counter() - started
        for step, wanted in zip(steps, _our_logprobs(ours, prompt, steps), strict=True):
            differences += [abs(value - float(wanted[token])) for token, value in step.logprobs.items()]
            equal += int(wanted.argmax()) == step.token
            margin = max(margin, float(wanted.max() - wanted[step.token]))
        tokens += len(steps)
    mean = sum(differences) / max(1, len(differences))
    largest = max(differences, default=0.0)
    return Comparison(name, mode, tokens, equal, largest, mean, margin, tokens / max(seconds, 1e-9))


def _our_logprobs(ours: Any, prompt: list[int], steps: list[Step]) -> Tensor:
    """[steps, vocab]: before each of the runtime's tokens."""
    ids = torch.tensor([[*prompt, *(step.token for step in steps[:-1])]])
    logits: Tensor = ours(ids, use_cache=False).logits[0, len(prompt) - 1 :]
    return logits.float().log_softmax(-1)[: len(steps)]


@torch.no_grad()
def dtype_noise(ours: Any, model: ConvertedModel, dtype: torch.dtype, prompts: list[list[int]]) -> float:
    """What our own model's likeliest log-probabilities move by, on average, in `dtype`; 0 for float32."""
    if dtype == torch.float32:
        return 0.0
    rounded: Any = AutoModelForCausalLM.from_pretrained(model.folder, dtype=dtype).eval()
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        wanted, got = (m(ids, use_cache=False).logits[0].float().log_softmax(-1) for m in (ours, rounded))
        best = wanted.topk(TOP, dim=-1).indices
        found.append((wanted - got).gather(-1, best).abs().flatten())
    return float(torch.cat(found).mean())


def _table(found: list[Comparison], noise: dict[str, float]) -> Table:
    title = "log-probabilities against ours in float32"
    if largest := max(noise.values(), default=0.0):
        title += f" (rounding alone moves ours by {largest:.1e} on average)"
    table = Table(title=title)
    for heading in ("runtime", "dtype", "same token", "largest", "mean", "tokens/s", ""):
        table.add_column(heading, justify="right" if heading in ("same token", "largest", "mean") else "left")
    for one in found:
        verdict = "quantised" if one.mode not in noise else "ok" if one.within(noise[one.mode]) else "differs"
        same, speed = f"{one.equal}/{one.tokens}", f"{one.tokens_per_second:.1f}"
        table.add_row(one.runtime, one.mode, same, f"{one.largest:.1e}", f"{one.mean:.1e}", speed, verdict)
    return table
