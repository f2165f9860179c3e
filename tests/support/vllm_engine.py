"""Greedy tokens of a tiny model by vLLM, in this process, and by `generate`."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Sequence
from typing import Any

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

TOKENS = 16
SMALL_STEPS = {"max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 32}
"""Prompts are read in parts of at most 32 tokens, beside the sequences that are being continued."""


def served_model(model_type: str, table: LayerTable, **changes: Any) -> PreTrainedModel:
    """A tiny converted model with random weights and heads of 32 channels, the least that vLLM's attention takes."""
    config = teacher_config(
        model_type, **{"hidden_size": 64, "head_dim": 32, "max_position_embeddings": 512, **changes}
    )
    model = model_class(model_type)(converted_config(config, table))
    randomise(model, 0)
    return model.eval()


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 97, (length,), generator=generator).tolist() for length in lengths]


def by_generate(model: PreTrainedModel, texts: Sequence[Sequence[int]], tokens: int = TOKENS) -> list[list[int]]:
    """The tokens that `generate` appends to each prompt alone, whatever they are."""
    model.generation_config.eos_token_id = None
    model.set_attn_implementation("eager")  # SDPA leaves out the capped scores of Gemma 2
    with torch.no_grad():
        rows = [model.generate(torch.tensor([text]), max_new_tokens=tokens, do_sample=False) for text in texts]
    return [row[0, len(text) :].tolist() for row, text in zip(rows, texts, strict=True)]


def by_vllm(
    model: PreTrainedModel, texts: Sequence[Sequence[int]], tokens: int = TOKENS, **settings: Any
) -> tuple[list[list[int]], list[int]]:
    """The tokens that vLLM appends to the prompts, all requested at once, and how many of each it found cached."""
    from vllm import LLM, SamplingParams

    register()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        settings = {"dtype": "float32", "skip_tokenizer_init": True, **SMALL_STEPS, **settings}
        engine: Any = LLM(model=folder, **settings)
    try:
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        requests = [{"prompt_token_ids": list(text)} for text in texts]
        found = engine.generate(requests, sampling, use_tqdm=False)
        return [list(result.outputs[0].token_ids) for result in found], [result.num_cached_tokens for result in found]
    finally:
        engine.llm_engine.engine_core.shutdown()
        del engine
        gc.collect()
