"""The runtimes in which an export can be tried, behind one protocol.

`follow` decodes token by token and returns log-probabilities; `write` continues a text as users do. A runtime's package
is imported only when the runtime is used. Per step, the `TOP` most likely tokens are compared, because not every
runtime returns more.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cached_property
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from deltanet_hf.mixers.cache.argument import CACHE

from ..storage.safetensors_folder import read_json

TOP = 10
FLOAT32, BFLOAT16, STORED = "float32", "bfloat16", "as stored"
CONTEXT = 2048  # largest number of tokens in a sequence


class Step(NamedTuple):
    """One token and the log-probabilities of the most likely tokens at its position."""

    token: int
    logprobs: dict[int, float]


class Runtime(Protocol):
    """A loaded export. `modes` lists the dtypes it can run in: float32 for a sharp comparison, or as users run it."""

    modes: tuple[str, ...]

    def follow(self, prompt: Sequence[int], tokens: int, forced: Sequence[Step] = ()) -> list[Step]:
        """Decodes `tokens` tokens after `prompt` greedily, one at a time with the runtime's own cache.

        The result is shorter if the runtime stops returning log-probabilities.

        Args:
            forced: steps whose tokens are used instead of the greedy ones, and for whose tokens the log-probabilities
                are returned. Only runtimes with two modes support it.
        """

    def write(self, prompt: Sequence[int], tokens: int, tokenizer: Any) -> str:
        """Continues `prompt` greedily by `tokens` tokens through the interface that users call; returns the text."""


def _step(logprobs: torch.Tensor, forced: Sequence[Step], index: int) -> Step:
    """Makes the `index`-th step from log-probabilities [vocab]."""
    if forced:
        given = forced[index]
        return Step(given.token, {token: float(logprobs[token]) for token in given.logprobs})
    best = logprobs.topk(TOP)
    return Step(int(best.indices[0]), dict(zip(best.indices.tolist(), best.values.tolist(), strict=True)))


class Transformers:
    """transformers' own Qwen3.5 class."""

    modes = (FLOAT32, STORED)

    def __init__(self, export: Path, mode: str) -> None:
        from transformers import AutoModelForCausalLM

        dtype = torch.float32 if mode == FLOAT32 else "auto"
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            export, dtype=dtype, trust_remote_code=False, use_safetensors=True
        ).eval()

    @torch.no_grad()
    def follow(self, prompt: Sequence[int], tokens: int, forced: Sequence[Step] = ()) -> list[Step]:
        ids, cache, steps = torch.tensor([prompt]), None, []
        for index in range(tokens):
            out = self.model(ids, use_cache=True, logits_to_keep=1, **{CACHE: cache})
            cache = out[CACHE]
            steps.append(_step(out.logits[0, -1].float().log_softmax(-1), forced, index))
            ids = torch.tensor([[steps[-1].token]])
        return steps

    def write(self, prompt: Sequence[int], tokens: int, tokenizer: Any) -> str:
        return generated(self.model, prompt, tokens, tokenizer)


def generated(model: Any, prompt: Sequence[int], tokens: int, tokenizer: Any) -> str:
    """The text that a transformers model generates greedily after `prompt`, exactly `tokens` tokens."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        pad_token_id=0,
    )
    return str(tokenizer.decode(out[0, len(prompt) :], skip_special_tokens=True))


class MlxLm:
    """mlx-lm, on MLX's default device."""

    modes = (FLOAT32, STORED)

    def __init__(self, export: Path, mode: str) -> None:
        import mlx.core as mx
        from mlx_lm import load

        self.model: Any = load(str(export))[0]
        if mode == FLOAT32:
            self.model.set_dtype(mx.float32)

    def follow(self, prompt: Sequence[int], tokens: int, forced: Sequence[Step] = ()) -> list[Step]:
        import mlx.core as mx
        from mlx_lm.models.cache import make_prompt_cache

        cache, ids, steps = make_prompt_cache(self.model), list(prompt), []
        for index in range(tokens):
            logits = self.model(mx.array([ids]), cache=cache)[0, -1].astype(mx.float32)
            steps.append(_step(torch.tensor(logits.tolist()).log_softmax(-1), forced, index))
            ids = [steps[-1].token]
        return steps

    def write(self, prompt: Sequence[int], tokens: int, tokenizer: Any) -> str:
        import mlx.core as mx
        from mlx_lm.generate import generate_step

        steps = generate_step(mx.array(list(prompt)), self.model, max_tokens=tokens)
        return str(tokenizer.decode([int(token) for token, _ in steps], skip_special_tokens=True))


class LlamaCpp:
    """llama.cpp through the Python bindings xllamacpp."""

    modes = (STORED,)  # the GGUF file fixes the dtype of the weights

    def __init__(self, export: Path, mode: str) -> None:
        self.export = export

    @cached_property
    def exact(self) -> Any:
        """A server for comparisons: its attention cache is float32, where llama.cpp's default is float16."""
        from xllamacpp import ggml_type, llama_flash_attn_type

        off = llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        wide = ggml_type.GGML_TYPE_F32
        return self._server(flash_attn_type=off, cache_type_k=wide, cache_type_v=wide)

    @cached_property
    def plain(self) -> Any:
        """A server with default settings; the memory and threads of the other server are released."""
        self.__dict__.pop("exact", None)
        return self._server()

    def _server(self, **changes: Any) -> Any:
        import xllamacpp

        settings = xllamacpp.CommonParams()
        settings.model.path = str(self.export)
        settings.n_ctx = CONTEXT
        settings.n_parallel = 1
        settings.warmup = False
        settings.verbosity = -1
        settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = torch.get_num_threads()
        for name, value in changes.items():
            setattr(settings, name, value)
        return xllamacpp.Server(settings)

    def follow(self, prompt: Sequence[int], tokens: int, forced: Sequence[Step] = ()) -> list[Step]:
        # One request per token, with the state kept between requests: longer requests omit tokens that end inside a
        # character.
        ids, steps = list(prompt), []
        for _ in range(tokens):
            request = {"prompt": ids, "max_tokens": 1, "temperature": 0, "logprobs": TOP, "cache_prompt": True}
            found = (self.exact.handle_completions(request)["choices"][0].get("logprobs") or {}).get("content")
            if not found:
                break
            logprobs = {entry["id"]: entry["logprob"] for entry in found[0]["top_logprobs"]}
            steps.append(Step(found[0]["id"], logprobs))
            ids.append(steps[-1].token)
        return steps

    def write(self, prompt: Sequence[int], tokens: int, tokenizer: Any) -> str:
        request = {"prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return str(self.plain.handle_completions({**request, "cache_prompt": False})["choices"][0]["text"])


class Vllm:
    """vLLM in this process."""

    modes = (BFLOAT16,)  # its CPU kernels support no other dtype

    def __init__(self, export: Path, mode: str) -> None:
        from vllm import LLM

        length = min(CONTEXT, read_json(export / "config.json")["max_position_embeddings"])
        self.model: Any = LLM(model=str(export), dtype=mode, max_model_len=length, enforce_eager=True)

    def follow(self, prompt: Sequence[int], tokens: int, forced: Sequence[Step] = ()) -> list[Step]:
        out = self._generate(prompt, tokens, TOP)
        return [
            Step(token, {i: entry.logprob for i, entry in logprobs.items()})
            for token, logprobs in zip(out.token_ids, out.logprobs, strict=True)
        ]

    def write(self, prompt: Sequence[int], tokens: int, tokenizer: Any) -> str:
        return str(self._generate(prompt, tokens, None).text)

    def _generate(self, prompt: Sequence[int], tokens: int, logprobs: int | None) -> Any:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=tokens, logprobs=logprobs, ignore_eos=True)
        return self.model.generate([{"prompt_token_ids": list(prompt)}], sampling, use_tqdm=False)[0].outputs[0]


RUNTIMES: dict[str, dict[str, type[Any]]] = {
    "transformers": {"transformers": Transformers, "vllm": Vllm},
    "mlx": {"mlx_lm": MlxLm},
    "gguf": {"xllamacpp": LlamaCpp},
}


def installed(module: str) -> bool:
    """Whether a runtime's package is installed; nothing is imported."""
    return importlib.util.find_spec(module) is not None


def describe(module: str) -> str:
    """Name and version of the distribution that contains a module (several distributions contain vllm)."""
    name = packages_distributions()[module][0]
    return f"{name} {version(name)}"
