"""Times a model on a CPU in float32 and bfloat16: `python tools/cpu_times.py MODEL`, the figures of docs/results.md.

CPUs without bfloat16 are imitated by ONEDNN_MAX_CPU_ISA=AVX512_CORE, or AVX2 with ATEN_CPU_CAPABILITY=avx2. How threads
wait is chosen by OMP_WAIT_POLICY=PASSIVE or ACTIVE, and their number by OMP_NUM_THREADS.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import deltanet_hf  # noqa: F401  (registers the converted families)

LENGTH, SEQUENCES, NEW_TOKENS = 512, 4, 24


def read(model: Any, ids: Tensor) -> None:
    for row in ids.split(1):
        model(row, use_cache=False)


def decode(model: Any, ids: Tensor) -> None:
    model.generate(ids[:1, :16], max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False)


def measured(run: Callable[[Any, Tensor], None], model: Any, ids: Tensor) -> str:
    """Wall-clock and CPU seconds of one call."""
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    run(model, ids)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    return f"{wall:.2f} s, {after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime:.2f} s of CPU time"


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    folder = parser.parse_args().model
    chosen = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "OMP_WAIT_POLICY")
    print(
        f"{torch.get_num_threads()} threads", *(f"{name}={os.environ[name]}" for name in chosen if name in os.environ)
    )
    for dtype in ("float32", "bfloat16"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        ids = torch.randint(0, model.config.vocab_size, (SEQUENCES, LENGTH))
        read(model, ids[:1])
        print(f"{dtype}: reading {SEQUENCES} x {LENGTH} tokens {measured(read, model, ids)}")
        print(f"{dtype}: decoding {NEW_TOKENS} tokens {measured(decode, model, ids)}")


if __name__ == "__main__":
    main()
