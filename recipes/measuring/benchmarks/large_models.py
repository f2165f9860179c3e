"""Trains a model of real shape and random weights by its shipped recipe, stage by stage.

    python -m measuring.benchmarks.large_models 1B --output FOLDER
    python -m measuring.benchmarks.large_models 8B --processes 2 --micro-batches 1 --output FOLDER

Random weights are enough to measure: the student learns its teacher's outputs, and the loss falls. Teacher and student
are made in FOLDER/SHAPE (34 GB for 8B), the run works in FOLDER/SHAPE-TRAIN-PROCESSES. At its end, each stage has a row
in FOLDER/large_models.json: speed, share of the chip's peak (`training/estimate.py`), peak memory beside the expected,
first and last loss; or an error. The weights of the run are deleted at the end. The same command continues after an
interruption. Run several at a time by CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

from transformers import AutoConfig

import deltanet_hf  # noqa: F401 (registers converted models)
from deltanet_hf.errors import UserError
from deltanet_hf.evaluation.speed.random_models import SHAPES
from deltanet_hf.exit_codes import run_command
from deltanet_recipes.config import read_recipe
from deltanet_recipes.schema import Align, Recipe, Stage, stage_name
from deltanet_recipes.training.feeds import micro_batch_rows
from deltanet_recipes.training.model_pair import without_alignment
from measuring.benchmarks.random_inputs import Inputs
from measuring.benchmarks.stage_row import stage_figures
from measuring.rows import RowFile

RECIPES = {"135M": "smollm2-135m-pure-100m", "1B": "llama-3.2-1b", "8B": "llama-3.1-8b"}
RESULTS = "large_models.json"
KEY = ("shape", "stage", "train", "gpus", "run")
CACHED_STEPS = 16  # of layerwise alignment: steps whose activations are kept on disk; 3 GB for 8B
HELD_OUT = 16384  # tokens
WEIGHTS = ("stages", "checkpoints", "final", "tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--stages", nargs="+", help="kinds of the recipe's stages to run; default: all that train")
    parser.add_argument("--train", choices=("lora", "full"), default="lora", help="`train` of the distillation")
    parser.add_argument("--steps", type=int, default=200, help="optimiser steps of each stage")
    parser.add_argument("--processes", type=int, default=1, help="number of GPUs; several share the model by FSDP2")
    parser.add_argument(
        "--micro-batches", type=int, help="micro-batches per step and GPU, for a shorter run; default: the recipe's"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the recipe; repeatable")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    run_command(lambda: benchmark(parser.parse_args()))


def benchmark(options: argparse.Namespace) -> None:
    """Run everything; an error of training is a row and then raised."""
    name = f"{options.shape}-{options.train}-{options.processes}"
    run, results = options.output / name, RowFile(options.output / RESULTS, KEY)
    began = time.perf_counter()
    inputs = make_inputs(options.shape, options.output / options.shape)
    _say(f"teacher, tokens and student: {time.perf_counter() - began:.0f} s")
    recipe_name = RECIPES[options.shape]
    shipped = read_recipe(recipe_name)
    if options.stages is None:
        student = AutoConfig.from_pretrained(inputs.student)
        options.stages = [stage.kind for stage in without_alignment(shipped, student, list(shipped.stages))]
    changes = recipe_changes(options, shipped, inputs, run)
    recipe = read_recipe(recipe_name, changes)
    common = {
        "shape": options.shape,
        "train": options.train,
        "gpus": options.processes,
        "run": name,
        "command": " ".join(["python -m measuring.benchmarks.large_models", *sys.argv[1:]]),
    }
    code = subprocess.run(train_command(recipe_name, changes, options.processes)).returncode
    if code:
        error = f"training ended with exit code {code}; see the lines above"
        results.add({**common, "stage": "error", "error": error})
        raise UserError(error)
    for stage in recipe.stages:
        sizes = {"steps": stage.steps, "rows": stage.sequence_length, "batch_tokens": stage.batch_tokens}
        results.add({**common, "stage": stage_name(stage), **sizes, **stage_figures(run, stage_name(stage))})
    for part in WEIGHTS:
        shutil.rmtree(run / part, ignore_errors=True)
    _say(f"results: {results.path}")


def train_command(recipe: str, changes: list[str], processes: int) -> list[str]:
    """The command that runs a recipe with overrides on so many GPUs."""
    training = ["-m", "deltanet_recipes.distill", recipe, *changes]
    if processes == 1:
        return [sys.executable, *training]
    launch = ["-m", "accelerate.commands.launch", "--num_processes", str(processes), "--num_machines", "1"]
    return [sys.executable, *launch, "--multi_gpu", "--mixed_precision", "no", "--dynamo_backend", "no", *training]


def make_inputs(shape: str, folder: Path) -> Inputs:
    """Make teacher, tokens and student in a process of its own, so that no memory of a GPU stays in use."""
    command = [sys.executable, "-m", "measuring.benchmarks.random_inputs", shape, str(folder)]
    if subprocess.run(command).returncode:
        raise UserError(f"{folder}: the models could not be made; see the lines above")
    return Inputs(folder)


def recipe_changes(options: argparse.Namespace, recipe: Recipe, inputs: Inputs, run: Path) -> list[str]:
    """The overrides that make the shipped recipe work on random inputs for so many steps."""
    chosen = options.stages or [stage.kind for stage in recipe.stages]
    unknown = set(chosen) - {stage.kind for stage in recipe.stages}
    if unknown:
        raise UserError(
            f"--stages: {RECIPES[options.shape]} has no stage {', '.join(sorted(unknown))}; it has "
            + ", ".join(stage.kind for stage in recipe.stages)
        )
    kept = [stage for stage in recipe.stages if stage.kind in chosen]
    changes = [
        f"student={inputs.student}",
        f"teacher={inputs.teacher}",
        f"output={run}",
        f"data.sources=[{{path: {inputs.tokens}}}]",
        f"data.holdout_tokens={HELD_OUT}",
        "data.repeat=true",
        f"engine.sharding={'none' if options.processes == 1 else 'fsdp2'}",
        f"log.every={max(1, options.steps // 20)}",
        f"log.evaluate_every={10**9}",
        f"log.checkpoint_every={10**9}",
        "log.keep=1",
        "log.stop_when_worse=false",  # random tokens teach little, and what is measured is speed
    ]
    for stage in kept:
        changes += _stage_changes(options, stage)
    left_out = [f"stages.{stage_name(stage)}=null" for stage in recipe.stages if stage not in kept]
    return [*changes, *options.set, *left_out]


def _stage_changes(options: argparse.Namespace, stage: Stage) -> list[str]:
    key, changes = f"stages.{stage_name(stage)}", []
    batch = stage.batch_tokens
    if options.micro_batches is not None:
        rows = micro_batch_rows(stage, 1)
        batch = options.micro_batches * rows * stage.sequence_length * options.processes
        changes += [f"{key}.batch_tokens={batch}", f"{key}.micro_batch_rows={rows}"]
    changes.append(f"{key}.tokens={options.steps * batch}")
    if isinstance(stage, Align):
        if stage.layerwise:
            changes.append(f"{key}.cached_tokens={CACHED_STEPS * batch}")
        return changes
    changes.append(f"{key}.train={options.train}")
    if options.train == "full":  # adapters take twice the rate of full weights
        changes.append(f"{key}.optimizer.rest_lr={stage.optimizer.rest_lr / 2}")
    return changes


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
