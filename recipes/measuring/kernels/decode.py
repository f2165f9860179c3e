"""Times one decoding step of the gated delta rule in a CUDA graph: `python -m measuring.kernels decode --peers`.

32 heads, K = V = 128, float32 state in place, gate, sigmoid and L2 norm in the kernel; "whole layer" also includes the
short convolution, SiLU, the norm and the output gate. The least that a step moves is the state, read and written once.
Each step is first compared with float64. The peer is flash-linear-attention's recurrent kernel, whose gate and sigmoid
are applied outside and not timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from deltanet_kernels import gated_delta_step_, naive_gated_delta_rule
from deltanet_kernels.arguments import StepCall
from deltanet_kernels.gated_delta_rule.cpu_step import torch_gated_delta_step_
from deltanet_kernels.gated_delta_rule.recurrent import gated_delta_rule_step_
from measuring.kernels.harness import Benchmark, relative_error, several_caches, time_steps
from measuring.rows import Row

HEADS, SIZE = 32, 128
WHOLE = "deltanet, whole layer"
Inputs = dict[str, Tensor]


def make(batch: int) -> Inputs:
    """Arguments of one step."""
    torch.manual_seed(0)
    x = {n: torch.randn(batch, 1, HEADS, SIZE, device="cuda", dtype=torch.bfloat16) for n in ("q", "k", "v")}
    x |= {n: torch.randn(batch, 1, HEADS, device="cuda") for n in ("g", "beta")}
    x |= {n: torch.randn(HEADS, device="cuda") for n in ("A_log", "dt_bias")}
    return x


def make_layer(batch: int) -> Inputs:
    """Arguments of one step of a whole layer with convolution and SiLU on v, without its state."""
    torch.manual_seed(0)
    channels = 3 * HEADS * SIZE
    shapes: dict[str, tuple[int, ...]] = {n: (batch, 1, HEADS * SIZE) for n in ("q", "k", "v", "z")}
    shapes |= {n: (batch, 1, HEADS) for n in ("a", "b")}
    shapes |= {"conv_weight": (channels, 4), "conv_tail": (batch, channels, 3), "norm_weight": (SIZE,)}
    x = {n: torch.randn(shape, device="cuda", dtype=torch.bfloat16) for n, shape in shapes.items()}
    return x | {n: torch.randn(HEADS, device="cuda") for n in ("A_log", "dt_bias")}


def step(x: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """o, and the state, which is changed in place."""
    o = gated_delta_rule_step_(
        x["q"], x["k"], x["v"], x["g"], x["beta"], state, use_qk_l2norm_in_kernel=True,
        A_log=x["A_log"], dt_bias=x["dt_bias"], use_beta_sigmoid_in_kernel=True,
    )  # fmt: skip
    return o, state


def layer_step(x: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """o of a whole layer, and the state; both the state and the tail of the convolution are changed in place."""
    arguments: dict[str, Any] = {**x, "state": state, "qk_silu": True, "v_silu": True}
    return gated_delta_step_(**arguments), state


def peer_step(x: Inputs) -> Callable[[Inputs, Tensor], tuple[Tensor, Tensor]]:
    """flash-linear-attention's step: o and a new state."""
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    g = -x["A_log"].exp() * torch.nn.functional.softplus(x["g"] + x["dt_bias"])
    beta = x["beta"].sigmoid()

    def run(x: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
        o, final = fused_recurrent_gated_delta_rule(
            x["q"], x["k"], x["v"], g=g, beta=beta, initial_state=state, output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        return o, final

    return run


def wanted_step(x: Inputs, state: Tensor) -> tuple[Tensor, Tensor | None]:
    """o and the state after a step, by the recurrence in float64."""
    w = {n: t.double() for n, t in x.items()}
    return naive_gated_delta_rule(
        w["q"], w["k"], w["v"], w["g"], w["beta"], None, state.double(), True, True, A_log=w["A_log"],
        dt_bias=w["dt_bias"], use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
    )  # fmt: skip


def wanted_layer_step(x: Inputs, state: Tensor) -> tuple[Tensor, Tensor | None]:
    """o and the state after a step of a whole layer, in PyTorch and float64."""
    final = state.double()
    given: dict[str, Any] = {n: t.double() for n, t in x.items()} | {"state": final}
    o = torch_gated_delta_step_(StepCall(**given | {"eps": 1e-6, "qk_silu": True, "v_silu": True}))
    return o, final


def measure(labels: Row, options: argparse.Namespace) -> Row:
    """The figures of the row with these labels."""
    batch, impl = labels["shape"][0], labels["impl"]
    x = make_layer(batch) if impl == WHOLE else make(batch)
    run = peer_step(x) if impl == "fla" else layer_step if impl == WHOLE else step
    size = 4 * batch * HEADS * SIZE * SIZE  # bytes of a state
    states = several_caches(lambda: torch.randn(batch, HEADS, SIZE, SIZE, device="cuda"), size)
    wanted = (wanted_layer_step if impl == WHOLE else wanted_step)(x, states[0])
    copies = {name: tensor.clone() for name, tensor in x.items()}
    found = run(copies, states[0].clone())
    error = max(relative_error(a, b) for a, b in zip(found, wanted, strict=True) if b is not None)
    return time_steps(lambda state: run(x, state), states, error, 2 * size)


def rows(peers: bool) -> Iterator[Row]:
    """Labels of the rows."""
    for batch in (1, 8, 64, 256):
        for impl in ("deltanet", WHOLE, *(("fla",) if peers else ())):
            yield {"shape": [batch, HEADS, SIZE], "impl": impl}


BENCHMARK = Benchmark(rows, measure, {"shape": "B, heads, K = V; float32 state"}, bandwidth=True)
