"""`python -m measuring.kernels NAME --help`: times the operators beside other implementations."""

from __future__ import annotations

import importlib
import sys

import torch

from deltanet_hf.errors import UserError
from deltanet_hf.exit_codes import run_command
from measuring.kernels.harness import run

NAMES = (
    *("chunk", "group", "channel_gates", "window"),
    *("decode", "window_step", "decode_attention", "packed_attention", "cpu"),
)


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in NAMES:
        raise UserError(f"python -m measuring.kernels NAME: give one of {', '.join(NAMES)}")
    if sys.argv[1] != "cpu" and not torch.cuda.is_available() and "--help" not in sys.argv:
        raise UserError(f"python -m measuring.kernels {sys.argv[1]}: no CUDA device")
    module = importlib.import_module(f"measuring.kernels.{sys.argv[1]}")
    run(sys.argv[1], module.BENCHMARK, sys.argv[2:])


if __name__ == "__main__":
    run_command(main)
