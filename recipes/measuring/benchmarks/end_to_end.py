"""Measures how fast teachers and converted models read prompts and decode, with random weights of real shapes in bf16.

    python -m measuring.benchmarks.end_to_end --output end_to_end_h200.json

Kinds: the softmax teacher as transformers runs it (`transformers`, eagerly), in the fast form (`teacher`), and with a
cache of 4 bits (`teacher4bit`); `all` layers Gated DeltaNet; `hybrid25`, every fourth layer softmax; `window25`, the
same with a window and a state in each other layer, and `window25_4bit`, its softmax and windows in 4 bits; and what
`convert` makes, all in 4 bits: `windows4bit`, every fourth layer softmax and windows elsewhere, `heads10`, every tenth
key/value head, `by_layer`, the same with the windows of the shipped plan, and `states_by_layer`, with those of the
plan with states.
`deltanet_hf.evaluation.measures.decoding_mode` has the modes.
Before its first row, each model and mode decodes greedily beside complete forward passes. A row has

- prefill_tokens_per_s, of all sequences together: the median of `repeats` runs after one that loads the kernels, as
  `graph` reads prompts (short ones are captured). It is measured once per model and point, and belongs to the rows of
  all modes;
- decode_ms, per step of the whole batch: the median of 3 runs of 64 steps (of 16 by separate launches) after one that
  is not timed, all of them on one cache, which they lengthen;
- cache_mb: the cache after the prompt;
- or error, in place of these.

Each row is written as soon as it is measured, and the same command adds those that the file does not have. Delete a row
to have it measured again.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from deltanet_hf.evaluation.measures.decoding_mode import EAGER, GRAPH, MODES
from deltanet_hf.evaluation.speed.random_models import KINDS, SHAPES, random_model
from deltanet_hf.exit_codes import run_command
from deltanet_hf.loading import chosen_device
from measuring.benchmarks.model_at_points import ModelAtPoints, Point, Prefill, free_memory
from measuring.rows import Row, RowFile, fill, machine

POINTS: list[Point] = [(1, 2048), (16, 2048), (1, 32768), (16, 16384)]  # sequences, tokens of each prompt
KEY = ("shape", "kind", "mode", "batch", "context")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the file that gets the rows")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="default: all")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="default: all")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="default: all")
    parser.add_argument("--minutes", type=float, help="begin no further row after so many minutes")
    run_command(lambda: benchmark(parser.parse_args()))


def benchmark(options: argparse.Namespace) -> None:
    """Measure what the file lacks, in order, until the time is over."""
    command = f"python -m measuring.benchmarks.end_to_end --output {options.output.name}"
    head = {"machine": machine("transformers"), "command": command, "dtype": "bfloat16"}
    file = RowFile(options.output, KEY, head)
    measure = Measure(file)
    try:
        fill(file, labels(options.shapes, options.kinds, options.modes), measure, options.minutes)
    finally:
        measure.forget()


def labels(shapes: Sequence[str], kinds: Sequence[str], modes: Sequence[str]) -> Iterator[Row]:
    """The labels of all rows in the order of measurement."""
    for shape, kind, (batch, context) in itertools.product(shapes, kinds, POINTS):
        for mode in modes if KINDS[kind].served else [EAGER.name]:
            yield {"shape": shape, "kind": kind, "mode": mode, "batch": batch, "context": context}


class Measure:
    """Measures one row after the other; rows of one model share it, and its prefill with those that the file has."""

    def __init__(self, file: RowFile) -> None:
        self._file = file
        self._of: tuple[str, str] | None = None
        self._model: ModelAtPoints | None = None

    def __call__(self, labels: Row) -> Row:
        shape, kind = of = labels["shape"], labels["kind"]
        if self._model is None or self._of != of:
            self.forget()
            model = random_model(shape, kind, torch.bfloat16, chosen_device(None))
            prompts = GRAPH if KINDS[kind].served else EAGER
            self._of, self._model = of, ModelAtPoints(model, self._prefills(shape, kind), prompts)
        return self._model.measure(MODES[labels["mode"]], (labels["batch"], labels["context"]))

    def _prefills(self, shape: str, kind: str) -> dict[Point, Prefill]:
        """Those that rows of this model have, in any mode."""
        return {
            (row["batch"], row["context"]): Prefill(row["prefill_tokens_per_s"], row["cache_mb"], row["repeats"])
            for row in self._file.rows()
            if (row["shape"], row["kind"]) == (shape, kind) and "error" not in row
        }

    def forget(self) -> None:
        """Give back the memory of the model."""
        if self._model is not None:
            self._model = None
            free_memory()


if __name__ == "__main__":
    main()
