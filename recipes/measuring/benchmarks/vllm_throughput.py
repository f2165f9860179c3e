"""Tokens per second of vLLM with models of real shapes and random weights, and how many sequences fit.

    python -m measuring.benchmarks.vllm_throughput --shapes 8B --kinds teacher windows4bit --out FILE

Needs vLLM. Nothing is downloaded or written but FILE: vLLM makes the weights. A row has the seconds in which all
prompts were read, the tokens per second of `--steps` decoding steps once all sequences have begun, and how many
sequences of that length fit at a time. Where fewer fit than are asked for, as many as fit run, and the row says how
many. The same command continues after an interruption.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from deltanet_hf.evaluation.speed.random_models import KINDS, SHAPES, random_config
from deltanet_hf.exit_codes import run_command
from deltanet_hf.vllm_plugin import register
from measuring.rows import Row, RowFile, fill, machine

PART = 8192  # tokens of a step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["135M", "8B"])
    served = [kind for kind, layout in KINDS.items() if layout.served]  # not a teacher as transformers runs it
    parser.add_argument("--kinds", nargs="+", choices=served, default=["teacher", "window25", "windows4bit", "heads10"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[2048, 16384], help="of each prompt")
    parser.add_argument("--sequences", nargs="+", type=int, default=[1, 16, 64, 256], help="at a time")
    parser.add_argument("--steps", type=int, default=64, help="decoding steps that are timed")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--memory", type=float, default=0.9, help="share of the GPU's memory; default: 0.9")
    parser.add_argument("--minutes", type=float, help="begin no engine after so many; default: no limit")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    run_command(lambda: benchmark(parser.parse_args()))


def benchmark(options: argparse.Namespace) -> None:
    """Measure the rows that the file lacks, with an engine per shape, kind and length, each in a process of its own.

    An engine leaves state behind in vLLM's modules: after one with vLLM's first model runner, which serves converted
    models, its second one, which serves teachers, may not record CUDA graphs (vLLM 0.25).
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # read when vLLM is imported
    head = machine("vllm", "transformers", "triton") | {"dtype": "bfloat16"}
    file = RowFile(options.out, ("shape", "kind", "tokens", "sequences", "steps", "eager"), head)
    end = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    for shape in options.shapes:
        for kind in options.kinds:
            for tokens in options.tokens:
                labels = {
                    "shape": shape,
                    "kind": kind,
                    "tokens": tokens,
                    "steps": options.steps,
                    "eager": options.eager,
                }
                rows = [labels | {"sequences": count} for count in options.sequences]
                if all(file.find(row) for row in rows):
                    continue
                if end is not None and time.monotonic() >= end:
                    return print("the time is over; the file lacks rows", flush=True)
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                    process.submit(_fill, file, rows, options, shape, kind, tokens).result()


def _fill(file: RowFile, rows: list[Row], options: argparse.Namespace, shape: str, kind: str, tokens: int) -> None:
    fill(file, rows, Engine(options, shape, kind, tokens).measure)


class Engine:
    """vLLM with one model, for prompts of one length.

    Args:
        options: of the command.
        shape, kind: see `random_models.py`.
        tokens: of each prompt.
    """

    def __init__(self, options: argparse.Namespace, shape: str, kind: str, tokens: int) -> None:
        from vllm import LLM

        register()  # the entry point does so where the package is installed
        self._tokens, self._steps = tokens, options.steps
        sequences = max(options.sequences)
        # Sequences whose prompts are read first decode until the last one has been read.
        self._new = options.steps + 32 + sequences * (tokens + 1) // PART
        config = random_config(shape, kind)
        config.architectures = config.architectures or ["LlamaForCausalLM"]
        self._vocabulary = config.vocab_size
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            self._model: Any = LLM(
                folder,
                dtype="bfloat16",
                load_format="dummy",
                skip_tokenizer_init=True,
                enable_prefix_caching=False,
                max_model_len=tokens + self._new,
                max_num_seqs=sequences,
                max_num_batched_tokens=PART,
                enforce_eager=options.eager,
                compilation_config={} if kind == "teacher" else {"cudagraph_mode": "FULL_DECODE_ONLY"},
                gpu_memory_utilization=options.memory,
            )
        self.fits = self._capacity()

    def _capacity(self) -> int:
        """Sequences of prompt and new tokens that the cache holds."""
        from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

        core = self._model.llm_engine.engine_core.engine_core
        return int(get_max_concurrency_for_kv_cache_config(core.vllm_config, core.scheduler.kv_cache_config))

    def measure(self, row: Row) -> Row:
        """The figures of a row; the run before it compiles, also what only some of the steps need."""
        count = min(row["sequences"], self.fits)
        self._run(min(count, 2), self._steps)
        seconds, decoding = self._run(count, self._steps)
        return {
            "fits": self.fits,
            "running": count,
            "prompts_seconds": round(seconds, 3),
            "tokens_per_second": round(count * self._steps / decoding, 1),
            "step_ms": round(1e3 * decoding / self._steps, 3),
        }

    def _run(self, count: int, steps: int) -> tuple[float, float]:
        """Seconds until all sequences have a token, and of so many steps after that."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine = self._model.llm_engine
        sampling = SamplingParams(
            temperature=0,
            max_tokens=self._new,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        names = {f"{time.monotonic_ns()}-{index}" for index in range(count)}
        for name in sorted(names):
            prompt = torch.randint(self._vocabulary, (self._tokens,)).tolist()
            engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        waiting, began = set(names), time.perf_counter()
        while waiting:
            waiting -= {output.request_id for output in engine.step()}
        read = time.perf_counter()
        made = 0
        while made < count * steps:
            made += sum(len(output.outputs[0].token_ids) for output in engine.step())
        end = time.perf_counter()
        engine.abort_request(list(names))
        while engine.has_unfinished_requests():
            engine.step()
        return read - began, (end - read) * count * steps / made


if __name__ == "__main__":
    main()
