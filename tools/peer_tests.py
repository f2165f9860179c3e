"""flash-linear-attention's tests of the gated delta rule, with the operators of this package in the place of theirs.

    python tools/peer_tests.py CHECKOUT/tests/ops/test_gdn.py --shrink 8

flash-linear-attention has to be installed in the version of the checkout. `--shrink n` divides batches and numbers of
tokens by n: without a GPU the tests run in PyTorch, where their sizes take long. The tests of FlashQLA and of functions
inside flash-linear-attention are left out.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
import typer

import deltanet_kernels

OPERATORS = ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")
CHOSEN = "(test_chunk or test_fused_recurrent) and not guard"


class Replaced:
    """A pytest plugin that puts the operators where the tests import them from, and makes the tests smaller."""

    def __init__(self, shrink: int) -> None:
        self.shrink = shrink

    def pytest_configure(self, config: pytest.Config) -> None:
        import fla.ops.gated_delta_rule as theirs
        import fla.utils

        config.addinivalue_line("markers", "smoke: a marker of flash-linear-attention")
        if not torch.cuda.is_available():
            fla.utils.device = "cpu"
        for name in OPERATORS:
            setattr(theirs, name, getattr(deltanet_kernels, name))

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: Any) -> None:
        module, sizes = pyfuncitem.module, pyfuncitem.funcargs
        assert all(getattr(module, name) is getattr(deltanet_kernels, name) for name in OPERATORS)
        for name in ("B", "T"):
            if name in sizes:
                sizes[name] = -(-sizes[name] // self.shrink)
        if "cu_seqlens" in sizes:
            sizes["cu_seqlens"] = [-(-offset // self.shrink) for offset in sizes["cu_seqlens"]]


def main(
    tests: Annotated[Path, typer.Argument(help="The file test_gdn.py of flash-linear-attention.", exists=True)],
    shrink: Annotated[int, typer.Option(help="Divides the batch and the numbers of tokens.", min=1)] = 1,
    only: Annotated[str, typer.Option(help="Another expression for pytest's -k.")] = "test",
) -> None:
    """Run the tests; the exit status is pytest's."""
    os.environ["FLA_DISABLE_BACKEND_DISPATCH"] = "1"  # they leave out shared key heads otherwise
    options = ["--noconftest", "-p", "no:cacheprovider", "-q", "-c", os.devnull, f"--rootdir={tests.parent}"]
    raise typer.Exit(pytest.main([*options, "-k", f"({CHOSEN}) and ({only})", str(tests)], plugins=[Replaced(shrink)]))


if __name__ == "__main__":
    typer.run(main)
