"""`export --verify`: compares the export in every installed runtime with deltanet-hf's model in float32.

In float32, a runtime may differ only by the order of its sums. In fewer bits it also rounds. The size of that rounding
is measured: with the runtime itself in float32 on the same tokens if it supports float32, otherwise with deltanet-hf's
model. On a CPU that has no bfloat16, what PyTorch computes is compared in float32 only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM

from deltanet_hf import __version__
from deltanet_hf.cpu_dtype import native_bfloat16
from deltanet_hf.data import shipped_texts
from deltanet_hf.errors import QualityError
from deltanet_hf.models.cache_bits import use_cache_bits

from ..storage.saved_tokenizer import load_tokenizer
from .comparison import OURS, Comparison, differences_table, speeds_table
from .model_folder import ConvertedModel
from .runtimes import BFLOAT16, FLOAT32, RUNTIMES, STORED, Runtime, Step, Transformers, describe, generated, installed

PROMPT_LENGTHS = (2, 7, 33, 130)  # in tokens: shorter than the convolution, shorter than a chunk, longer
NEW_TOKENS = 16
SPEED_TOKENS = (256, 32)  # tokens read at once, tokens decoded after them
TRANSCRIPT_TOKENS = 32


@dataclass(frozen=True)
class Reference:
    """deltanet-hf's model, with the prompts for the comparison."""

    folder: Path
    float32: Any
    prompts: list[list[int]]
    speed_prompt: list[int]
    speed_tokens: int
    transcript: list[int]  # tokens of the prompt to continue; empty if there is none
    tokenizer: Any

    @classmethod
    def load(cls, model: ConvertedModel, rounded: torch.dtype, transcript: str | None) -> Reference:
        """Loads the model in float32; `rounded`: the dtype to which the export rounded its weights."""
        ours = _ours(model.folder, rounded).float()
        tokenizer = load_tokenizer(model.folder)
        text = shipped_texts()[0].read_text(encoding="utf-8")[5000:15000]
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        longest = int(model.config.max_position_embeddings)
        prompts = [ids[: min(length, longest - NEW_TOKENS)] for length in PROMPT_LENGTHS]
        read, decoded = (min(count, longest // 2 - 1) for count in SPEED_TOKENS)
        continued = tokenizer(transcript)["input_ids"] if transcript else []
        return cls(model.folder, ours, prompts, ids[:read], decoded, continued, tokenizer)

    def in_dtype(self, dtype: torch.dtype) -> Any:
        return _ours(self.folder, dtype)


def _ours(folder: Path, dtype: torch.dtype) -> Any:
    """deltanet-hf's model with keys and values in 16 bits, as runtimes have them."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, trust_remote_code=False, use_safetensors=True
    )
    use_cache_bits(model, 16)
    return model.eval()


def verify_export(
    model: ConvertedModel,
    export: Path,
    style: str,
    rounded: torch.dtype,
    dtype: torch.dtype | None,
    console: Console,
    prompt: str | None = None,
) -> None:
    """Compares the export with the model in every installed runtime and prints tables of differences and speeds.

    Args:
        rounded: the dtype to which the export rounded the model's weights.
        dtype: dtype of the export's weights; None if they are quantised, which makes any difference acceptable.
        prompt: a text that every runtime continues; the continuations are printed.

    Raises:
        QualityError: a difference is larger than rounding explains.
    """
    reference = Reference.load(model, rounded, prompt)
    found = []
    for module, runtime in RUNTIMES[style].items():
        if not installed(module):
            console.print(f"{module}: not installed, skipped", highlight=False)
            continue
        found += compare_modes(reference, runtime, export, describe(module), dtype)
    if not found:
        return
    ours = _ourselves(reference, dtype)
    console.print(differences_table(found))
    console.print(speeds_table([*ours, *found]))
    for one in [*ours, *found] if prompt else []:
        console.print(f"[bold]{one.runtime}, {one.mode}[/bold]")
        console.print(one.text, highlight=False, markup=False)
    wrong = [f"{one.runtime} ({one.mode})" for one in found if not one.within]
    if wrong:
        raise QualityError(f"{export}: differs from {model.folder} in {', '.join(wrong)}; see the table above")


def compare_modes(
    reference: Reference, runtime: type[Any], export: Path, name: str, dtype: torch.dtype | None
) -> list[Comparison]:
    """Runs a runtime in each of its modes. float32 comes last and measures the rounding of the others."""
    found = []
    low: list[list[Step]] = []
    for mode in sorted(modes_to_run(runtime, dtype), key=FLOAT32.__eq__):
        running = runtime(export, mode)
        steps = [running.follow(prompt, NEW_TOKENS) for prompt in reference.prompts]
        used = {FLOAT32: torch.float32, BFLOAT16: torch.bfloat16, STORED: dtype}[mode]
        noise = None if used is None else 0.0
        if used is not None and used != torch.float32:
            low, noise = steps, our_noise(reference, used, steps)
        text = ""
        if reference.transcript:
            text = running.write(reference.transcript, TRANSCRIPT_TOKENS, reference.tokenizer)
        figures = compare(reference, steps)
        speed = measure_speed(running.write, reference)
        found.append(Comparison(name, mode, **figures, ours=noise, speed=speed, text=text))
        if mode == FLOAT32 and low:
            own = own_noise(running, reference.prompts, low)
            found = [one if one.mode == FLOAT32 else replace(one, own=own) for one in found]
        del running
    return found[::-1]


def modes_to_run(runtime: type[Any], dtype: torch.dtype | None) -> list[str]:
    """The modes to run: float32 once, and nothing that this CPU emulates."""
    once = len(runtime.modes) > 1 and (dtype == torch.float32 or (runtime is Transformers and not native_bfloat16()))
    return [mode for mode in runtime.modes if not (once and mode == STORED)]


def compare(reference: Reference, steps_per_prompt: Sequence[list[Step]]) -> dict[str, Any]:
    """Compares log-probabilities along the runtime's tokens; returns fields of `Comparison`."""
    read: list[float] = []
    decoded: list[float] = []
    equal, margin, tokens = 0, 0.0, 0
    for prompt, steps in zip(reference.prompts, steps_per_prompt, strict=True):
        for place, (step, wanted) in enumerate(
            zip(steps, logprobs_along(reference.float32, prompt, steps), strict=True)
        ):
            differences = read if place == 0 else decoded
            differences += [abs(value - float(wanted[token])) for token, value in step.logprobs.items()]
            equal += int(wanted.argmax()) == step.token
            margin = max(margin, float(wanted.max() - wanted[step.token]))
        tokens += len(steps)
    mean = sum(read + decoded) / max(1, len(read) + len(decoded))
    largest = {"read": max(read, default=0.0), "decoded": max(decoded, default=0.0)}
    return {"tokens": tokens, "equal": equal, **largest, "mean": mean, "margin": margin}


@torch.no_grad()
def logprobs_along(model: Any, prompt: list[int], steps: Sequence[Step]) -> Tensor:
    """Log-probabilities [steps, vocab] of `model` at the position of each of the runtime's tokens."""
    ids = torch.tensor([[*prompt, *(step.token for step in steps[:-1])]])
    logits: Tensor = model(ids, use_cache=False).logits[0, len(prompt) - 1 :]
    return logits.float().log_softmax(-1)[: len(steps)]


def our_noise(reference: Reference, dtype: torch.dtype, steps_per_prompt: Sequence[list[Step]]) -> float:
    """Mean difference between deltanet-hf's model in `dtype` and in float32, at the same positions."""
    rounded, found = reference.in_dtype(dtype), []
    for prompt, steps in zip(reference.prompts, steps_per_prompt, strict=True):
        wanted, got = (logprobs_along(model, prompt, steps) for model in (reference.float32, rounded))
        for step, one, other in zip(steps, wanted, got, strict=True):
            tokens = list(step.logprobs)
            found += (one[tokens] - other[tokens]).abs().tolist()
    return sum(found) / max(1, len(found))


def own_noise(float32: Runtime, prompts: Sequence[list[int]], low: Sequence[list[Step]]) -> float:
    """Mean difference between the runtime's steps in fewer bits and in float32, along the same tokens."""
    found = []
    for prompt, steps in zip(prompts, low, strict=True):
        for step, wanted in zip(steps, float32.follow(prompt, len(steps), steps), strict=True):
            found += [abs(value - wanted.logprobs[token]) for token, value in step.logprobs.items()]
    return sum(found) / max(1, len(found))


def measure_speed(write: Callable[..., str], reference: Reference) -> tuple[float, float]:
    """Tokens per second of reading a prompt at once and of decoding after it; one sequence. 0 if noise hides it.

    `write` continues a prompt, as of `Runtime`.
    """
    prompt, tokens = reference.speed_prompt, reference.speed_tokens

    def seconds(new: int) -> float:
        started = time.perf_counter()
        write(prompt, new, reference.tokenizer)
        return time.perf_counter() - started

    read = min(seconds(1), seconds(1))  # the first warms up
    decoding = seconds(1 + tokens) - read
    return len(prompt) / max(read, 1e-9), tokens / decoding if decoding > 0 else 0.0


def _ourselves(reference: Reference, dtype: torch.dtype | None) -> list[Comparison]:
    """Rows for deltanet-hf's own model: its speed and its text."""
    found = []
    stored = dtype if dtype is not None and native_bfloat16() else torch.float32
    for used in dict.fromkeys((torch.float32, stored)):
        write = partial(generated, reference.float32 if used == torch.float32 else reference.in_dtype(used))
        text = write(reference.transcript, TRANSCRIPT_TOKENS, reference.tokenizer) if reference.transcript else ""
        mode = str(used).removeprefix("torch.")
        found.append(Comparison(f"{OURS} {__version__}", mode, speed=measure_speed(write, reference), text=text))
    return found
