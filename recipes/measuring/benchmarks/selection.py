"""Times `deltanet-hf select` on a Llama of random weights with the shape of an 8B model, made in memory.

    python -m measuring.benchmarks.selection [--unit layer] [--method forward] [--keep 25%]

The probes have the number and length of the defaults, with random tokens and 42 answer tokens each. What is chosen
means nothing; the time does not depend on it. Prints one line per round and, at the end, a line of JSON with seconds
and the peak memory of the GPU.
"""

import argparse
import json
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from deltanet_convert.select.budget import Budget
from deltanet_convert.select.methods import Forward, Gradient, Round
from deltanet_convert.select.objectives import AnswerLoss, TextKL
from deltanet_convert.select.probe_text import FORMATS
from deltanet_convert.select.probes import Probe
from deltanet_convert.select.scoring import Scale, Scorer
from deltanet_convert.select.select_options import SelectOptions
from deltanet_convert.select.switchable import SwitchableModel
from deltanet_convert.select.task import TEXT_ROWS
from deltanet_convert.select.units import UNITS, Candidates, Unit
from deltanet_convert.storage.versions import versions
from deltanet_hf.evaluation.speed.random_models import SHAPES

SHAPE: dict[str, Any] = {**SHAPES["8B"], "max_position_embeddings": 8192}
QUESTIONS, QUESTION, ANSWER = 6, 12, 7  # per probe; tokens of a question and of its answer


def random_probes(count: int, length: int, vocabulary: int) -> list[Probe]:
    """`count` probes of each format, with random tokens and the questions at the end."""
    generator = torch.Generator().manual_seed(0)
    ends = [length - i * (QUESTION + ANSWER) for i in range(QUESTIONS)]
    answers = tuple((end - ANSWER, end) for end in reversed(ends))
    rows = torch.randint(vocabulary, (count * len(FORMATS), length), generator=generator).tolist()
    return [Probe(FORMATS[place // count].name, tuple(row), answers) for place, row in enumerate(rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unit", choices=UNITS, default="layer")
    parser.add_argument("--method", choices=("forward", "gradient", "kl"), default="forward")
    parser.add_argument("--keep", default="25%")
    parser.add_argument("--shape", type=json.loads, default={}, help="keys of the Llama config that differ, as JSON")
    arguments = parser.parse_args()
    options = SelectOptions(Budget.parse(arguments.keep), unit=arguments.unit, method=arguments.method)
    device = options.torch_device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = LlamaConfig(**{**SHAPE, **arguments.shape})
    with device:
        teacher = LlamaForCausalLM._from_config(config, dtype=dtype, attn_implementation="sdpa")
    candidates = Candidates.of(config, options.unit)
    model = SwitchableModel(teacher.eval().requires_grad_(False), candidates, options.window, options.sinks)
    scorer = Scorer(model)
    started = time.perf_counter()
    objective: AnswerLoss | TextKL
    if options.method == "kl":
        shape = (TEXT_ROWS * options.probes, options.length)
        objective = TextKL(torch.randint(config.vocab_size, shape), options.window, options.sinks)
    else:
        objective = AnswerLoss(random_probes(options.probes, options.length, config.vocab_size))
    scorer.losses(objective, None)
    scorer.losses(objective, ())
    parts = len(objective.names)
    scale = Scale(torch.zeros(parts), torch.ones(parts))
    if isinstance(objective, AnswerLoss) and options.method == "gradient":
        next_unit: Any = Gradient(scorer, objective, scale, candidates.units)
    else:
        next_unit = Forward(scorer, objective, scale, candidates.units)
    kept: list[Unit] = []
    known: dict[Unit, float] = {}
    count = options.budget.units(candidates, None)
    while len(kept) < count:
        step: Round = next_unit(kept, known)
        kept.append(step.unit)
        known |= step.gains
        print(f"{len(kept)}/{count}: {time.perf_counter() - started:.1f} s", flush=True)
    result = {
        "unit": options.unit,
        "method": options.method,
        "units": len(candidates.units),
        "kept": count,
        "seconds": round(time.perf_counter() - started, 1),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "peak_gb": round(torch.cuda.max_memory_allocated(device) / 1e9, 1) if device.type == "cuda" else None,
        "versions": versions(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
