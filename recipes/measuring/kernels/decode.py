"""Times one decoding step in a CUDA graph: `python -m measuring.kernels.decode --peers`.

32 heads, K = V = 128, float32 state in place, gate, sigmoid and L2 norm in the kernel; "whole layer" also includes the
short convolution, SiLU, the norm and the output gate. The floor is reading and writing the state once at the copy
bandwidth measured in the same run. Each step is first compared with the recurrence in float64.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from deltanet_kernels import gated_delta_step_, naive_gated_delta_rule
from deltanet_kernels.arguments import StepCall
from deltanet_kernels.gated_delta_rule.cpu_step import torch_gated_delta_step_
from deltanet_kernels.gated_delta_rule.recurrent import gated_delta_rule_step_
from measuring.kernels.timing import copy_bandwidth, graph_us, write

HEADS, SIZE = 32, 128
Step = Callable[[dict[str, torch.Tensor], torch.Tensor], torch.Tensor]


def make(batch: int) -> dict[str, torch.Tensor]:
    """Arguments of one step."""
    torch.manual_seed(0)
    x = {n: torch.randn(batch, 1, HEADS, SIZE, device="cuda", dtype=torch.bfloat16) for n in ("q", "k", "v")}
    x |= {n: torch.randn(batch, 1, HEADS, device="cuda") for n in ("g", "beta")}
    x |= {n: torch.randn(HEADS, device="cuda") for n in ("A_log", "dt_bias")}
    return x


def step(x: dict[str, torch.Tensor], state: torch.Tensor) -> torch.Tensor:
    return gated_delta_rule_step_(
        x["q"], x["k"], x["v"], x["g"], x["beta"], state, use_qk_l2norm_in_kernel=True,
        A_log=x["A_log"], dt_bias=x["dt_bias"], use_beta_sigmoid_in_kernel=True,
    )  # fmt: skip


def next_step(run: Step, x: dict[str, torch.Tensor], states: Iterator[torch.Tensor]) -> torch.Tensor:
    """Run a step on the next of several states."""
    return run(x, next(states))


def worst(*pairs: tuple[torch.Tensor, torch.Tensor]) -> float:
    """The largest relative L2 error of a tensor beside the true one."""
    return max(((found.double() - true).norm() / true.norm()).item() for found, true in pairs)


def error_of(x: dict[str, torch.Tensor], state: torch.Tensor, o: torch.Tensor, final: torch.Tensor) -> float:
    """Relative L2 error of o and the state after a step from `state` against the recurrence in float64."""
    w = {n: t.double() for n, t in x.items()}
    true_o, true_final = naive_gated_delta_rule(
        w["q"], w["k"], w["v"], w["g"], w["beta"], None, state.double(), True, True, A_log=w["A_log"],
        dt_bias=w["dt_bias"], use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
    )  # fmt: skip
    assert true_final is not None
    return worst((o, true_o), (final, true_final))


def make_layer(batch: int) -> dict[str, torch.Tensor]:
    """Arguments of one step of a whole layer with convolution and SiLU on v, without its state."""
    torch.manual_seed(0)
    channels = 3 * HEADS * SIZE
    shapes: dict[str, tuple[int, ...]] = {n: (batch, 1, HEADS * SIZE) for n in ("q", "k", "v", "z")}
    shapes |= {n: (batch, 1, HEADS) for n in ("a", "b")}
    shapes |= {"conv_weight": (channels, 4), "conv_tail": (batch, channels, 3), "norm_weight": (SIZE,)}
    x = {n: torch.randn(shape, device="cuda", dtype=torch.bfloat16) for n, shape in shapes.items()}
    return x | {n: torch.randn(HEADS, device="cuda") for n in ("A_log", "dt_bias")}


def layer_step(x: dict[str, torch.Tensor], state: torch.Tensor) -> torch.Tensor:
    arguments: dict[str, Any] = {**x, "state": state, "qk_silu": True, "v_silu": True}
    return gated_delta_step_(**arguments)


def layer_error_of(x: dict[str, torch.Tensor], state: torch.Tensor) -> float:
    """Relative L2 error of o and the state against the same step in float64."""
    w, final, moved = {n: t.double() for n, t in x.items()}, state.double(), state.clone()
    names = ("q", "k", "v", "a", "b", "state", "A_log", "dt_bias", "conv_weight", "conv_tail", "z", "norm_weight")
    w["state"] = final
    given: dict[str, Any] = {n: w[n] for n in names}
    o = torch_gated_delta_step_(StepCall(**given | {"eps": 1e-6, "qk_silu": True, "v_silu": True}))
    found = layer_step(x | {"conv_tail": x["conv_tail"].clone()}, moved)
    return worst((found, o), (moved, final))


def measure_peer(x: dict[str, torch.Tensor], states: list[torch.Tensor]) -> dict[str, Any]:
    """flash-linear-attention's recurrent kernel; gate and sigmoid applied outside, not timed."""
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    g = -x["A_log"].exp() * torch.nn.functional.softplus(x["g"] + x["dt_bias"])
    beta = x["beta"].sigmoid()

    def run(state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        o, final = fused_recurrent_gated_delta_rule(
            x["q"], x["k"], x["v"], g=g, beta=beta, initial_state=state, output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        return o, final

    turns = itertools.cycle(states)
    error = error_of(x, states[0], *run(states[0]))
    return {"rel_error": error, "us": round(graph_us(lambda: run(next(turns)), 64), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", action="store_true", help="also time flash-linear-attention")
    parser.add_argument("--output", type=Path, help="folder of the result file; the package's own by default")
    args = parser.parse_args()
    bandwidth = copy_bandwidth()
    rows: list[dict[str, Any]] = []
    for batch in (1, 8, 64, 256):
        # Several states in turn: a small one would stay in the L2 cache.
        x = make(batch)
        states = [torch.randn(batch, HEADS, SIZE, SIZE, device="cuda") for _ in range(max(1, 64 // batch))]
        moved = 2 * states[0].numel() * 4
        whole = make_layer(batch)
        state = states[0].clone()
        for impl, run, inputs, error in (
            ("deltanet", step, x, error_of(x, states[0], step(x, state), state)),
            ("deltanet, whole layer", layer_step, whole, layer_error_of(whole, states[0])),
        ):
            row: dict[str, Any] = {"shape": [batch, HEADS, SIZE], "impl": impl, "rel_error": error}
            row["us"] = round(graph_us(functools.partial(next_step, run, inputs, itertools.cycle(states)), 64), 3)
            row["share_of_copy_bandwidth"] = round(moved / (row["us"] * 1e-6) / bandwidth, 3)
            rows.append(row)
            print(row, flush=True)
        if args.peers:
            try:
                peer = measure_peer(x, states)
            except Exception as error:
                peer = {"failed": repr(error)[:200]}
            rows.append({"shape": [batch, HEADS, SIZE], "impl": "fla", **peer})
            print(rows[-1], flush=True)
    notes = {"copy_bytes_per_s": bandwidth, "shape": "B, heads, K = V; float32 state"}
    write("decode_h200.json", rows, notes, args.output)


if __name__ == "__main__":
    main()
