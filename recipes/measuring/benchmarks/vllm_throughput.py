"""Tokens per second of vLLM, how many sequences fit, and the bytes that each takes.

    python -m measuring.benchmarks.vllm_throughput --model teacher=FOLDER --model student=FOLDER --out FILE
    python -m measuring.benchmarks.vllm_throughput --shapes 8B --kinds teacher windows4bit --out FILE

Needs vLLM. The first command times models on the disk, teachers or converted ones; the second one models of real shapes
whose random weights vLLM makes. Prompts are random tokens. Nothing is downloaded or written but FILE.

A row has the seconds in which all prompts were read, the tokens per second of `--steps` decoding steps once all
sequences have begun, and how many sequences of that length fit at a time. Where fewer fit than are asked for, as many
as fit run, and the row says how many. `page_mb` are the MB of vLLM's pages that one sequence takes, and `layout_mb`
those of its keys, values and states. The same command continues after an interruption.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from deltanet_hf.evaluation.speed.random_models import KINDS, SHAPES, random_config
from deltanet_hf.exit_codes import run_command
from deltanet_hf.models.cache_bits import cache_bits_of, stored_bytes
from deltanet_hf.vllm_plugin import register
from measuring.rows import Row, RowFile, fill, machine

PART = 8192  # tokens of a step
KEY = ("model", "shape", "kind", "kv_cache_dtype", "tokens", "sequences", "steps", "eager")
PROMPTS = tuple((count, tokens) for tokens in (2048, 16384) for count in (1, 16, 64, 256))
CACHE_DTYPES = {"auto": torch.bfloat16, "fp8": torch.float8_e4m3fn}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model",
        action="append",
        type=_named,
        metavar="NAME=FOLDER",
        help="in place of random weights; may be given again",
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["135M", "8B"])
    served = [kind for kind, layout in KINDS.items() if layout.served]  # not a teacher as transformers runs it
    parser.add_argument("--kinds", nargs="+", choices=served, default=["teacher", "window25", "windows4bit", "heads10"])
    parser.add_argument("--kv-cache-dtype", choices=CACHE_DTYPES, default="auto", help="of a teacher")
    parser.add_argument(
        "--prompts",
        nargs="+",
        type=_prompts,
        default=PROMPTS,
        metavar="COUNTxTOKENS",
        help="sequences at a time, and tokens of each prompt; default: 1, 16, 64 and 256 x 2048 and x 16384",
    )
    parser.add_argument("--steps", type=int, default=64, help="decoding steps that are timed")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--memory", type=float, default=0.9, help="share of the GPU's memory; default: 0.9")
    parser.add_argument("--minutes", type=float, help="begin no engine after so many; default: no limit")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    run_command(lambda: benchmark(parser.parse_args()))


def _named(text: str) -> tuple[str, Path]:
    name, given, folder = text.partition("=")
    if not given or not Path(folder).is_dir():
        raise argparse.ArgumentTypeError(f"{text}: expected NAME=FOLDER with a folder that exists")
    return name, Path(folder)


def _prompts(text: str) -> tuple[int, int]:
    count, _, tokens = text.partition("x")
    return int(count), int(tokens)


def benchmark(options: argparse.Namespace) -> None:
    """Measure the rows that the file lacks, with an engine per model, each in a process of its own.

    An engine leaves state behind in vLLM's modules: after one with vLLM's first model runner, which serves converted
    models, its second one, which serves teachers, may not record CUDA graphs (vLLM 0.25).
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # read when vLLM is imported
    head = machine("vllm", "transformers", "triton") | {"dtype": "bfloat16"}
    file = RowFile(options.out, KEY, head)
    end = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    models: list[Row] = [{"model": name} for name, _ in options.model or ()]
    models = models or [{"shape": shape, "kind": kind} for shape in options.shapes for kind in options.kinds]
    settings = {"kv_cache_dtype": options.kv_cache_dtype, "steps": options.steps, "eager": options.eager}
    for model in models:
        rows = [model | settings | {"sequences": count, "tokens": tokens} for count, tokens in options.prompts]
        if all(file.find(row) for row in rows):
            continue
        if end is not None and time.monotonic() >= end:
            return print("the time is over; the file lacks rows", flush=True)
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            process.submit(_fill, file, rows, options).result()


def _fill(file: RowFile, rows: list[Row], options: argparse.Namespace) -> None:
    if "model" in rows[0]:
        return fill(file, rows, Engine(dict(options.model)[rows[0]["model"]], rows, options.memory).measure)
    config = random_config(rows[0]["shape"], rows[0]["kind"])
    config.architectures = config.architectures or ["LlamaForCausalLM"]
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        engine = Engine(Path(folder), rows, options.memory, load_format="dummy")
    fill(file, rows, engine.measure)


class Engine:
    """vLLM with one model.

    Args:
        folder: of the model.
        rows: that it measures; all have the same settings.
        memory: share of the GPU's memory.
        settings: further ones of vLLM.
    """

    def __init__(self, folder: Path, rows: Sequence[Row], memory: float, **settings: Any) -> None:
        from vllm import LLM

        register()  # the entry point does so where the package is installed
        config = AutoConfig.from_pretrained(folder)
        self._vocabulary = config.vocab_size
        with torch.device("meta"):
            self._shape = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        self._cache_dtype, eager = rows[0]["kv_cache_dtype"], rows[0]["eager"]
        self._model: Any = LLM(
            str(folder),
            dtype="bfloat16",
            kv_cache_dtype=self._cache_dtype,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=max(row["tokens"] + _new(row) for row in rows),
            max_num_seqs=max(row["sequences"] for row in rows),
            max_num_batched_tokens=PART,
            enforce_eager=eager,
            compilation_config={"cudagraph_mode": "FULL_DECODE_ONLY"} if getattr(config, "deltanet", None) else {},
            gpu_memory_utilization=memory,
            **settings,
        )

    def _room(self, tokens: int) -> tuple[int, float]:
        """Sequences of so many tokens that the cache holds, and the MB of its pages that one takes."""
        from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

        core = self._model.llm_engine.engine_core.engine_core
        settings, cache = copy.copy(core.vllm_config), core.scheduler.kv_cache_config
        settings.model_config = copy.copy(settings.model_config)
        settings.model_config.max_model_len = tokens
        fits = get_max_concurrency_for_kv_cache_config(settings, cache)
        return int(fits), sum(tensor.size for tensor in cache.kv_cache_tensors) / fits / 1e6

    def measure(self, row: Row) -> Row:
        """The figures of a row; the run before it compiles, also what only some of the steps need."""
        length = row["tokens"] + _new(row)
        fits, megabytes = self._room(length)
        count = min(row["sequences"], fits)
        self._run(row, min(count, 2))
        seconds, decoding = self._run(row, count)
        layout = stored_bytes(self._shape, length, cache_bits_of(self._shape), CACHE_DTYPES[self._cache_dtype])
        return {
            "fits": fits,
            "running": count,
            "prompts_seconds": round(seconds, 3),
            "tokens_per_second": round(count * row["steps"] / decoding, 1),
            "step_ms": round(1e3 * decoding / row["steps"], 3),
            "page_mb": round(megabytes, 2),
            "layout_mb": round(layout / 1e6, 2),
        }

    def _run(self, row: Row, count: int) -> tuple[float, float]:
        """Seconds until all sequences have a token, and of the steps after that."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine = self._model.llm_engine
        sampling = SamplingParams(
            temperature=0,
            max_tokens=_new(row),
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        names = {f"{time.monotonic_ns()}-{index}" for index in range(count)}
        for name in sorted(names):
            prompt = torch.randint(self._vocabulary, (row["tokens"],)).tolist()
            engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        waiting, began = set(names), time.perf_counter()
        while waiting:
            waiting -= {output.request_id for output in engine.step()}
        read = time.perf_counter()
        made, wanted = 0, count * row["steps"]
        while made < wanted:
            made += sum(len(output.outputs[0].token_ids) for output in engine.step())
        end = time.perf_counter()
        engine.abort_request(list(names))
        while engine.has_unfinished_requests():
            engine.step()
        return read - began, (end - read) * wanted / made


def _new(row: Row) -> int:
    """New tokens of a sequence at most: those whose prompts are read first decode until the last one has been read."""
    return int(row["steps"] + 32 + row["sequences"] * (row["tokens"] + 1) // PART)


if __name__ == "__main__":
    main()
