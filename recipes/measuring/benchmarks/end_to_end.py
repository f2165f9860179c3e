"""Measures how fast teachers and converted models read prompts and decode, with random weights of real shapes in bf16.

    python -m measuring.benchmarks.end_to_end --output end_to_end_h200.json

Kinds: the softmax teacher; `all` layers Gated DeltaNet; `hybrid25`, every fourth layer softmax; `window25`, the same
with a window beside each state, as `convert` makes it. `deltanet_hf.evaluation.measures.decoding_mode` has the modes.
Before its first row, each model and mode decodes greedily beside complete forward passes. A row has

- prefill_tokens_per_s, of all sequences together: the median of `repeats` runs after one that loads the kernels. It is
  measured once per model and point, and belongs to the rows of all modes;
- decode_ms, per step of the whole batch: the median of 3 runs of 64 steps (of 16 by separate launches) after one that
  is not timed, all of them on one cache, which they lengthen;
- cache_mb: the cache after the prompt;
- or error, in place of these.

Each row is written as soon as it is measured, and the same command adds those that the file does not have. Delete a row
to have it measured again. The modes without torch.compile come first.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from deltanet_hf.errors import QualityError, UserError, one_line
from deltanet_hf.evaluation.measures.decoding_mode import COMPILED, MODES
from deltanet_hf.evaluation.speed.bench import Row, write_rows
from deltanet_hf.evaluation.speed.random_models import SHAPES, random_model
from deltanet_hf.exit_codes import run_command
from deltanet_hf.loading import chosen_device
from measuring.benchmarks.model_at_points import ModelAtPoints, Point, Prefill, free_memory

POINTS: list[Point] = [(1, 2048), (16, 2048), (1, 32768), (16, 16384)]  # sequences, tokens of each prompt
KINDS = {
    **{kind: (kind, "gated_deltanet") for kind in ("teacher", "all", "hybrid25")},
    "window25": ("hybrid25", "gated_deltanet+window"),
}
"""The kind of random model and its mixer."""
KEY = ("shape", "kind", "mode", "batch", "context")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the file that gets the rows")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="default: all")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="default: all")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="default: all")
    parser.add_argument("--minutes", type=float, help="begin no further row after so many minutes")
    run_command(lambda: benchmark(parser.parse_args()))


class Results:
    """The rows of a file, which is written whenever one is added."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows: list[Row] = []
        if path.is_file():
            try:
                self._rows = json.loads(path.read_text())["rows"]
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"{path}: not a file of this benchmark; give another --output") from error

    def __contains__(self, labels: Row) -> bool:
        return any(all(row.get(key) == labels[key] for key in KEY) for row in self._rows)

    def add(self, row: Row) -> None:
        self._rows.append(row)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        command = f"python -m measuring.benchmarks.end_to_end --output {self.path.name}"
        write_rows(self.path, self._rows, {"command": command, "dtype": "bfloat16"})

    def prefills(self, shape: str, kind: str) -> dict[Point, Prefill]:
        """Those that rows of this model have, in any mode."""
        return {
            (row["batch"], row["context"]): Prefill(row["prefill_tokens_per_s"], row["cache_mb"], row["repeats"])
            for row in self._rows
            if (row["shape"], row["kind"]) == (shape, kind) and "error" not in row
        }


def benchmark(options: argparse.Namespace) -> None:
    """Measure what the file lacks, in order, until the time is over."""
    results = Results(options.output)
    end = float("inf") if options.minutes is None else time.monotonic() + 60 * options.minutes
    for shape, kind, modes in turns(options.shapes, options.kinds, options.modes):
        missing = [labels for labels in _labels(shape, kind, modes) if labels not in results]
        if missing and not _measure_model(missing, results, lambda: time.monotonic() >= end):
            print("the time is over; the same command goes on", flush=True)
            return


def turns(shapes: Sequence[str], kinds: Sequence[str], modes: Sequence[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Shape, kind and modes of each model in the order of measurement; models come again to be compiled."""
    compiled = [mode for mode in modes if mode == COMPILED.name]
    for chosen in ([mode for mode in modes if mode not in compiled], compiled):
        for shape in shapes:
            for kind in kinds:
                if chosen:
                    yield shape, kind, chosen


def _labels(shape: str, kind: str, modes: Sequence[str]) -> Iterator[Row]:
    for batch, context in POINTS:
        for mode in modes:
            yield {"shape": shape, "kind": kind, "mode": mode, "batch": batch, "context": context}


def _measure_model(missing: list[Row], results: Results, is_over: Callable[[], bool]) -> bool:
    """Add the missing rows of one model; False if the time was over before the last one."""
    if is_over():
        return False
    shape, kind = missing[0]["shape"], missing[0]["kind"]
    model = random_model(shape, *KINDS[kind], torch.bfloat16, chosen_device(None))
    measured = ModelAtPoints(model, results.prefills(shape, kind), check_compiled_at=POINTS[0])
    del model
    try:
        for labels in missing:
            if is_over():
                return False
            _add_row(labels, measured, results)
    finally:
        del measured
        torch.compiler.reset()
        free_memory()
    return True


def _add_row(labels: Row, measured: ModelAtPoints, results: Results) -> None:
    found: dict[str, Any]
    try:
        found = measured.measure(MODES[labels["mode"]], (labels["batch"], labels["context"]))
    except torch.OutOfMemoryError:
        found = {"error": "out of memory"}
    except (QualityError, UserError) as error:
        found = {"error": one_line(error, 400)}
    except Exception as error:  # the next run begins behind this row
        results.add(labels | {"error": f"{type(error).__name__}: {one_line(error, 400)}"})
        raise
    row = labels | found
    results.add(row)
    print(json.dumps(row), flush=True)
    if "error" in row and torch.cuda.is_available():
        torch.cuda.synchronize()  # ends the run if the device is unusable now


if __name__ == "__main__":
    main()
