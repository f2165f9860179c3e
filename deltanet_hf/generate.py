"""`deltanet-hf generate MODEL --prompt TEXT`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
)

from deltanet_hf.cpu_dtype import loading_dtype
from deltanet_hf.errors import UserError
from deltanet_hf.mixers.quantized_cache import BITS, quantized_cache
from deltanet_hf.mixers.state import cache_bytes

COMPILING_TOKENS = 4  # generated before the clock starts, while the steps are compiled and recorded as CUDA graphs


class _CountingStreamer(TextStreamer):
    """Prints text as it is generated and records the time of each token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)  # type: ignore[arg-type]
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        super().put(value)


class _After(StoppingCriteria):
    """Stops generation after a number of tokens."""

    def __init__(self, tokens: int) -> None:
        self.left = tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        self.left -= 1
        return torch.full((len(input_ids),), self.left <= 0, device=input_ids.device)


def load_for_inference(model: str, dtype: str = "auto", device: str | None = None) -> tuple[Any, Any]:
    """Load a model in eval mode and its tokenizer from a folder or hub id; UserError if there is none."""
    if not Path(model).exists() and model.count("/") > 1:
        raise UserError(f"{model}: no such folder; give a converted model's folder or a hub id")
    if Path(model).is_dir() and not (Path(model) / "config.json").exists():
        raise UserError(f"{model}/config.json: missing; give the folder that `deltanet-hf convert` wrote")
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise UserError(f"--dtype: got {dtype!r}, expected auto, float32, bfloat16 or float16")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        AutoConfig.from_pretrained(model)
        dtype = loading_dtype(dtype, torch.device(device))
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        loaded = loaded.to(device).eval()
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise UserError(f"{model}: cannot be loaded: {str(error).splitlines()[0]}") from error
    return loaded, tokenizer


def generate_command(
    model: Annotated[str, typer.Argument(help="Folder or hub id of a converted model or a softmax model.")],
    prompt: Annotated[
        str, typer.Option(help="Text to continue, or the message to answer if the model has a chat template.")
    ],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Largest number of tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 decodes greedily.")] = 0.0,
    top_p: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Sample from the likeliest tokens that together have this probability (with --temperature).",
        ),
    ] = 0.95,
    seed: Annotated[int, typer.Option(help="Random seed for sampling.")] = 0,
    chat: Annotated[bool, typer.Option(help="Use the tokenizer's chat template if it has one.")] = True,
    stats: Annotated[bool, typer.Option("--stats", help="Print tokens per second and the size of the cache.")] = False,
    compiled: Annotated[
        bool,
        typer.Option("--compile", help="Compile the model first, which makes decoding several times faster on CUDA."),
    ] = False,
    cache_bits: Annotated[
        int | None,
        typer.Option(
            help="Keep the keys and values of softmax attention in 8 or 4 bits; states and windows stay as they are.",
            show_default="as computed",
        ),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            help="Dtype of weights and arithmetic: float32, bfloat16, float16, or auto (as saved; float32 on a CPU "
            "that has no bfloat16)."
        ),
    ] = "auto",
    device: Annotated[
        str | None, typer.Option(help="Device, such as cpu, cuda or cuda:1 [default: a GPU if there is one].")
    ] = None,
) -> None:
    """Continue a prompt and print the text as it is generated."""
    if not prompt:
        raise UserError("--prompt: empty; give some text to continue")
    if cache_bits is not None and compiled:
        raise UserError("--cache-bits: --compile keeps keys and values at fixed addresses; leave out one of the two")
    if cache_bits is not None and cache_bits not in BITS:
        raise UserError(f"--cache-bits: got {cache_bits}, expected {' or '.join(map(str, BITS))}")
    loaded, tokenizer = load_for_inference(model, dtype, device)
    if chat and tokenizer.chat_template:
        turns = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    streamer = _CountingStreamer(tokenizer)
    sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p} if temperature else {"do_sample": False}
    options: dict[str, Any] = {
        **inputs.to(loaded.device),
        "max_new_tokens": max_new_tokens,
        "pad_token_id": tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        "return_dict_in_generate": True,
        **sampling,
    }
    if cache_bits is not None:
        options["past_key_values"] = quantized_cache(loaded.config, cache_bits)
    if compiled:  # transformers compiles the steps of static caches
        options["cache_implementation"] = "static"
        typer.echo("compiling ...", err=True)
        loaded.generate(**options, stopping_criteria=StoppingCriteriaList([_After(COMPILING_TOKENS)]))
    torch.manual_seed(seed)
    started = time.perf_counter()
    cache = loaded.generate(**options, streamer=streamer).past_key_values
    if stats:
        # The streamer is first handed the prompt itself.
        prefill, tokens = inputs["input_ids"].shape[1], len(streamer.times) - 1
        first = streamer.times[1] - started
        decoding = streamer.times[-1] - streamer.times[1]
        speed = f"{(tokens - 1) / decoding:.1f} tokens/s" if tokens > 1 else "no further tokens"
        typer.echo(
            f"prompt {prefill} tokens, first token after {first:.2f} s, then {speed}; "
            f"state {cache_bytes(cache):,} bytes after {int(cache.get_seq_length())} tokens",
            err=True,
        )
