"""The inputs of a training benchmark: a random teacher, random tokens, and the converted student.

    python -m measuring.benchmarks.random_inputs 8B FOLDER

Benchmarks call this themselves. Finished parts are kept, and processes that need the same folder wait for the one that
makes it.
"""

from __future__ import annotations

import argparse
import fcntl
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig

from deltanet_hf.evaluation.speed.random_models import SHAPES
from measuring.benchmarks.random_teacher import write_teacher

TOKENS = 1 << 22
DOCUMENT = 1000  # mean length in tokens
END = 1  # id of the end-of-text token in the random tokenizer
HYBRID = ("--layers", "every:4")  # as many as `auto` keeps; a search would find nothing in random weights
CONVERSION = {"135M": ("--pure",)}
"""Options of `convert` for the students that the recipes of the shapes name; `HYBRID` for all others."""
LITTLE = ("--calibration-tokens", "512")


@dataclass(frozen=True)
class Inputs:
    """The parts in `folder`."""

    folder: Path

    @property
    def teacher(self) -> Path:
        return self.folder / "teacher"

    @property
    def student(self) -> Path:
        return self.folder / "student"

    @property
    def tokens(self) -> Path:
        return self.folder / "tokens.npy"


def prepare(shape: str, folder: Path) -> Inputs:
    """Make what is missing in `folder`: the teacher (16 GB for 8B), the tokens, the student (18 GB for 8B)."""
    inputs = Inputs(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        config = LlamaConfig(**SHAPES[shape], max_position_embeddings=131072, bos_token_id=None, eos_token_id=END)
        write_teacher(inputs.teacher, config, device)
        if not inputs.tokens.is_file():
            _write_tokens(inputs.tokens, config.vocab_size)
        if not (inputs.student / "config.json").is_file():
            command = [
                sys.executable,
                "-m",
                "deltanet_recipes.cli",
                "convert",
                str(inputs.teacher),
                str(inputs.student),
            ]
            subprocess.run([*command, *CONVERSION.get(shape, HYBRID), *LITTLE, "--overwrite"], check=True)
    return inputs


def _write_tokens(path: Path, vocabulary: int) -> None:
    """Documents of random ids, which nothing can predict: the cross-entropy stays at about log(vocabulary)."""
    generator = np.random.default_rng(0)
    ids = generator.integers(END + 1, vocabulary, TOKENS).astype(np.uint32)
    ids[generator.random(TOKENS) < 1 / DOCUMENT] = END
    partial = path.with_suffix(".partial.npy")
    np.save(partial, ids)
    shutil.move(partial, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    prepare(options.shape, options.folder)
