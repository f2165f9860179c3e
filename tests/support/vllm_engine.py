"""Greedy tokens of a tiny model by vLLM, in this process, and by `generate`."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from deltanet_hf import LayerTable, converted_config
from deltanet_hf.models.factory import model_class
from deltanet_hf.vllm_plugin import register
from support.tiny_models import randomise, teacher_config

# Read when vLLM is imported.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # vLLM's own attention on a GPU; tf32 is off by 1e-3

VLLM_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS = 16
SMALL_STEPS = {"max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 32}
"""Prompts are read in parts of at most 32 tokens, beside the sequences that are being continued."""


def served_model(model_type: str, table: LayerTable, **changes: Any) -> PreTrainedModel:
    """A tiny converted model with random weights and heads of 32 channels, the least that vLLM's attention takes."""
    hidden = 128 if model_type == "olmoe" else 64  # whose heads take the hidden size together
    config = teacher_config(
        model_type, **{"hidden_size": hidden, "head_dim": 32, "max_position_embeddings": 512, **changes}
    )
    model = model_class(model_type)(converted_config(config, table))
    randomise(model, 0)
    return model.eval()


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 97, (length,), generator=generator).tolist() for length in lengths]


class Answer(NamedTuple):
    """The tokens that follow a prompt, their log probabilities, and how much of the prompt was cached before."""

    tokens: list[int]
    logprobs: list[float]
    cached: int = 0


def by_generate(model: PreTrainedModel, texts: Sequence[Sequence[int]], device: Any = VLLM_DEVICE) -> list[Answer]:
    """Continue each prompt alone by `generate`, whatever the tokens are."""
    model = model.to(device)
    model.generation_config.eos_token_id = None
    model.set_attn_implementation("eager")  # SDPA leaves out the capped scores of Gemma 2
    settings: dict[str, Any] = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    answers = []
    for text in texts:
        with torch.no_grad():
            result: Any = model.generate(torch.tensor([text], device=device), max_new_tokens=TOKENS, **settings)
        tokens = result.sequences[0, len(text) :]
        logprobs = torch.cat(result.logits).float().log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)
        answers.append(Answer(tokens.tolist(), logprobs.tolist()))
    return answers


def let_numba_be() -> None:
    """Lets vLLM 0.32 make a second engine on a CPU after one with drafts.

    It looks for its kernels in every object of every module, and fails at a library of numba, which drafts import.
    """
    try:
        from vllm.triton_utils import dispatcher
    except ImportError:  # vLLM 0.25 does not look
        return
    search = dispatcher._rebind_kernels

    def beside_numba(overrides: Any) -> None:
        ffi: Any = sys.modules.get("llvmlite.binding.ffi")
        if ffi is None:
            return search(overrides)
        library, modules = ffi.lib, list(sys.modules.values())
        holders = [(module, name) for module in modules for name, value in vars(module).items() if value is library]
        for module, name in holders:
            delattr(module, name)
        search(overrides)
        for module, name in holders:
            setattr(module, name, library)

    dispatcher._rebind_kernels = beside_numba


let_numba_be()


def by_vllm(model: PreTrainedModel, texts: Sequence[Sequence[int]], **settings: Any) -> list[Answer]:
    """Continue the prompts by vLLM, all requested at once."""
    from vllm import LLM, SamplingParams

    register()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        settings = {"dtype": "float32", "skip_tokenizer_init": True, **SMALL_STEPS, **settings}
        if torch.cuda.is_available():  # which others may use too: nothing is concluded from its free memory
            settings = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 2**28, **settings}
        engine: Any = LLM(model=folder, **settings)
    try:
        sampling = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=0, ignore_eos=True, detokenize=False)
        requests = [{"prompt_token_ids": list(text)} for text in texts]
        return [_answer(result) for result in engine.generate(requests, sampling, use_tqdm=False)]
    finally:
        engine.llm_engine.engine_core.shutdown()
        del engine
        gc.collect()


def _answer(result: Any) -> Answer:
    found = result.outputs[0]
    tokens = list(found.token_ids)
    logprobs = [place[token].logprob for place, token in zip(found.logprobs, tokens, strict=True)]
    return Answer(tokens, logprobs, result.num_cached_tokens)
