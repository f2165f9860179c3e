"""The numbers of a row: errors, then times of the forward pass and of both passes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch

from measuring.kernels.first_results import OverTime, compiled_ahead, time_limit
from measuring.kernels.table import Row, one_line
from measuring.kernels.timing import median_ms, peak_gib

MOST = 0.05  # relative error of right results


def check_and_time(
    run: Callable[[], torch.Tensor],
    leaves: Sequence[torch.Tensor],
    do: torch.Tensor,
    wanted: Sequence[torch.Tensor],
    options: argparse.Namespace,
) -> Row:
    """Compare, then time if the results are right.

    Args:
        run: computes o from the leaves.
        leaves: get gradients.
        do: gradient of o.
        wanted: o and the gradients of the leaves in the first head of the first row, float64.
        options: those of `table.add_options`.

    Returns:
        rel_error, the largest relative L2 error of o and the gradients, fwd_ms, fwdbwd_ms and peak_gib; without times
        and with `failed` if o is wrong. If the gradients are wrong or missing (rel_error is then that of o), only the
        forward pass is timed, and `failed` or `unfinished` says why.
    """
    with time_limit(options.first_seconds), compiled_ahead():
        found, refusal = [run()], {}
        try:
            found += torch.autograd.grad(found[0], leaves, do)
        except OverTime as error:
            refusal = {"unfinished": f"backward: {error}"}
        except Exception as error:
            refusal = {"failed": f"backward: {one_line(error)}"}
    errors = relative_errors(found, wanted[: len(found)])
    row: Row = {"rel_error": max(errors)}
    if errors[0] > MOST:
        return row | {"failed": "wrong results"}
    if max(errors) > MOST:
        refusal = {"failed": "backward: wrong results"}
    del found

    def forward() -> None:
        with torch.no_grad():
            run()

    def both() -> None:
        torch.autograd.grad(run(), leaves, do)

    row["fwd_ms"] = round(median_ms(forward, options.repeats), 4)
    if refusal:
        return row | refusal
    row["fwdbwd_ms"] = round(median_ms(both, options.repeats), 4)
    return row | {"peak_gib": round(peak_gib(both), 4)}


def relative_errors(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> list[float]:
    """Relative L2 errors of the first head of the first row; NaN counts as infinite."""
    errors = [
        ((x.detach()[:1, :, :1].double() - y).norm() / y.norm()).item() for x, y in zip(found, wanted, strict=True)
    ]
    return [e if e == e else float("inf") for e in errors]
