"""Measures how fast teachers and converted models read prompts and decode, with random weights of real shapes in bf16.

    python -m measuring.benchmarks.end_to_end --output end_to_end_h200.json

Kinds: the softmax teacher as transformers runs it (`transformers`, eagerly), in the fast form (`teacher`), and with a
cache of 4 bits (`teacher4bit`); `all` layers Gated DeltaNet; `hybrid25`, every fourth layer softmax; `window25`, the
same with a window and a state in each other layer, and `window25_4bit`, its softmax and windows in 4 bits; and what
`convert` makes, all in 4 bits: `windows4bit`, every fourth layer softmax and windows elsewhere, `heads10`, every tenth
key/value head, `by_layer`, the same with the windows of the shipped plan, and `states_by_layer`, with those of the
plan with states.
`deltanet_hf.evaluation.measures.decoding_mode` has the modes.
Rows are measured as by `deltanet-hf bench`: before its first row, each model and mode decodes greedily beside complete
forward passes, and times are medians of 3 runs after one that loads the kernels, each with 64 decoding steps (16 by
separate launches). In place of its figures a row may have `error`.

Each row is written as soon as it is measured, and the same command adds those that the file does not have. Delete a row
to have it measured again.
"""

from __future__ import annotations

import argparse
import gc
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from deltanet_hf.evaluation.measures.decoding_mode import EAGER, GRAPH, MODES
from deltanet_hf.evaluation.speed.bench import figures
from deltanet_hf.evaluation.speed.check_decoding import check_decoding
from deltanet_hf.evaluation.speed.random_models import KINDS, SHAPES, random_model
from deltanet_hf.exit_codes import run_command
from deltanet_hf.loading import chosen_device
from measuring.rows import Row, RowFile, fill, machine

POINTS = [(1, 2048), (16, 2048), (1, 32768), (16, 16384)]  # sequences, tokens of each prompt
REPEATS = 3
STEPS = {EAGER.name: 16, GRAPH.name: 64}
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
    measure = Measure()
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
    """Measures one row after the other; rows of one model share it."""

    def __init__(self) -> None:
        self._of: tuple[str, str] | None = None
        self._model: PreTrainedModel | None = None
        self._checked: set[str] = set()

    def __call__(self, labels: Row) -> Row:
        of, mode = (labels["shape"], labels["kind"]), MODES[labels["mode"]]
        if self._model is None or self._of != of:
            self.forget()
            self._of, self._model = of, random_model(*of, torch.bfloat16, chosen_device(None))
        if mode.name not in self._checked:
            check_decoding(self._model, mode)
            self._checked.add(mode.name)
        return figures(self._model, mode, labels["batch"], labels["context"], REPEATS, STEPS[mode.name])

    def forget(self) -> None:
        """Give back the memory of the model: modules and graphs refer to themselves."""
        self._model, self._checked = None, set()
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
