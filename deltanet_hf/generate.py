"""`deltanet-hf generate MODEL --prompt TEXT`, and `--session FILE` to go on with it in the next call."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deltanet_hf.errors import UserError
from deltanet_hf.publish import LONGEST_NAME

if TYPE_CHECKING:  # its help imports neither torch nor transformers
    from transformers.cache_utils import Cache

LEAST_TEMPERATURE = 1e-4  # logits divided by less have no finite exponentials


def load_for_inference(model: str, dtype: str = "auto", device: str | None = None) -> tuple[Any, Any]:
    """Load a model in eval mode and its tokenizer from a folder or hub id; UserError if there is none."""
    from deltanet_hf.cpu_dtype import check_dtype, loading_dtype
    from deltanet_hf.decoding.served import serve
    from deltanet_hf.hub import loadable_folder
    from deltanet_hf.loading import chosen_device, load_config, load_model, load_tokenizer

    check_dtype(dtype)
    place, folder = chosen_device(device), loadable_folder(model)
    load_config(model, folder)
    tokenizer = load_tokenizer(model, folder)  # before the weights, because it takes no time
    loaded: Any = load_model(model, folder, loading_dtype(dtype, place))
    return serve(loaded.to(place)), tokenizer


def generate_command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder or Hub id of a converted model or of a softmax model.")
    ],
    prompt: Annotated[
        str | None,
        typer.Option(
            help="Text to continue, or the message to answer if the model has a chat template.",
            show_default="what standard input says",
        ),
    ] = None,
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
    seed: Annotated[int, typer.Option(min=0, help="Random seed for sampling.")] = 0,
    no_chat: Annotated[
        bool, typer.Option("--no-chat", help="Continue the prompt as it is, without the tokenizer's chat template.")
    ] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print tokens per second and the size of the cache.")] = False,
    no_graph: Annotated[
        bool,
        typer.Option("--no-graph", help="Decode on GPUs without CUDA graphs."),
    ] = False,
    cache_bits: Annotated[
        int | None,
        typer.Option(
            help="Keep the keys and values of softmax layers, heads and windows in 8 or 4 bits, or in 16.",
            show_default="the model's setting",
        ),
    ] = None,
    session: Annotated[
        Path | None,
        typer.Option(
            help="Go on with the conversation in this file, if it exists, and save it there with the answer.",
            show_default="start afresh and save nothing",
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
        str | None, typer.Option(help="Device, such as cpu, cuda or cuda:1.", show_default="a GPU if there is one")
    ] = None,
) -> None:
    """Continue a prompt and print the text as it is generated."""
    import torch

    from deltanet_hf.decoding import decoded_by
    from deltanet_hf.mixers.cache.argument import CACHE
    from deltanet_hf.mixers.cache.cache_bytes import cache_bytes
    from deltanet_hf.models.cache_bits import set_cache_bits
    from deltanet_hf.sessions import save_session
    from deltanet_hf.sessions.conversation import continued, first_turn
    from deltanet_hf.token_times import CountingStreamer

    if prompt is None and sys.stdin.isatty():
        raise UserError("--prompt: missing; give some text, here or by standard input")
    if prompt is None:
        prompt = sys.stdin.read()
    if not prompt:
        raise UserError("--prompt: empty; give some text to continue")
    if prompt.encode(errors="ignore").decode() != prompt:
        raise UserError("--prompt: is not UTF-8 text; convert it to UTF-8")
    if cache_bits not in (None, 16, 8, 4):
        raise UserError(f"--cache-bits: got {cache_bits}, expected 16, 8 or 4")
    if session is not None and not os.path.isdir(session.absolute().parent):
        raise UserError(f"--session: {session.parent} is no folder; create it first")
    if session is not None and (len(os.fsencode(f"{session.name}.partial")) > LONGEST_NAME or session.is_dir()):
        raise UserError(f"--session: {session} is a folder, or too long a name; choose another one")
    if 0 < temperature < LEAST_TEMPERATURE:
        raise UserError(
            f"--temperature: got {temperature}, expected 0, which decodes greedily, or at least {LEAST_TEMPERATURE}"
        )
    if seed >= 2**63:
        raise UserError(f"--seed: got {seed}, expected less than 2**63")
    loaded, tokenizer = load_for_inference(model, dtype, device)
    if cache_bits is not None:
        set_cache_bits(loaded, cache_bits)
    cache: Cache | None = None
    if session is not None and session.exists():
        before = continued(session, loaded, tokenizer, prompt, not no_chat)
        input_ids, attention_mask, cache = before.input_ids, before.attention_mask, before.cache
    else:
        input_ids = first_turn(tokenizer, prompt, not no_chat).to(loaded.device)
        attention_mask = torch.ones_like(input_ids)
    read = 0 if cache is None else int(cache.get_seq_length())
    if input_ids.shape[1] == 0:
        raise UserError(f"--prompt: {prompt!r} has no tokens for this tokenizer; give some text to continue")
    streamer = CountingStreamer(tokenizer)
    sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p} if temperature else {"do_sample": False}
    options: dict[str, Any] = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "max_new_tokens": max_new_tokens,
        "pad_token_id": tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        "return_dict_in_generate": True,
        # One answer, token by token, whatever the model's generation_config.json prefers.
        **dict.fromkeys(("cache_implementation", "penalty_alpha", "dola_layers", "force_words_ids")),
        "is_assistant": False,
        "use_cache": True,
        "num_beams": 1,
        "num_return_sequences": 1,
        "tokenizer": tokenizer,  # for its stop_strings
        **sampling,
    }
    if cache is not None:
        options[CACHE] = cache
    if no_graph:
        options["disable_compile"] = True
    torch.manual_seed(seed)
    started = time.perf_counter()
    result = loaded.generate(**options, streamer=streamer)
    cache = result[CACHE]
    if session is not None:
        answered = torch.ones_like(result.sequences[:, input_ids.shape[1] :])
        save_session(session, loaded, cache, result.sequences, torch.cat([attention_mask, answered], dim=1))
    if stats:
        # The streamer is first handed the prompt itself.
        prefill, tokens = input_ids.shape[1] - read, len(streamer.times) - 1
        first = streamer.times[1] - started
        decoding = streamer.times[-1] - streamer.times[1]
        speed = f"{(tokens - 1) / decoding:.1f} tokens/s" if tokens > 1 else "no further tokens"
        typer.echo(
            f"prompt {prefill} tokens, first token after {first:.2f} s, then {speed}; "
            f"cache {cache_bytes(cache):,} bytes after {int(cache.get_seq_length())} tokens"
            + f"; decoded by {decoded_by(loaded)}"
            * (loaded.device.type == "cuda"),
            err=True,
        )
