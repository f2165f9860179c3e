"""The operators of a prompt without the checks of their arguments, which cost the host as much time as a launch.

They are for layers that have made all arguments themselves; the public operator of the same name documents them and
checks them first. Arguments that do not fit end in wrong numbers or in an error of the device.
"""

from __future__ import annotations

import torch

from deltanet_kernels import dispatch
from deltanet_kernels.arguments import PromptInputs, PromptInputsCall, RuleCall, WindowCall, WindowMixtureCall
from deltanet_kernels.gated_delta_rule.cpu import chunked
from deltanet_kernels.prompt.cpu import torch_gate_values, torch_prompt_inputs
from deltanet_kernels.reference import torch_gated_rms_norm, torch_rms_norm, torch_silu_product
from deltanet_kernels.window.cpu import torch_window_attention
from deltanet_kernels.window.cpu_prompt import torch_window_keep, torch_window_mixture


def chunk_gated_delta_rule(call: RuleCall) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Takes what `checks.check_delta_rule` accepts without `drop_in`."""
    return dispatch.call("chunk_gated_delta_rule", chunked, call.q, call)  # type: ignore[no-any-return]


def prompt_inputs(call: PromptInputsCall) -> PromptInputs:
    return dispatch.call("prompt_inputs", torch_prompt_inputs, call.q, call)  # type: ignore[no-any-return]


def gate_values(
    a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, limit: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return dispatch.call("gate_values", torch_gate_values, a, a, b, A_log, dt_bias, limit)  # type: ignore[no-any-return]


def window_attention(call: WindowCall) -> tuple[torch.Tensor, torch.Tensor]:
    return dispatch.call("window_attention", torch_window_attention, call.q, call)  # type: ignore[no-any-return]


def window_keep(
    k: torch.Tensor, v: torch.Tensor, window: int, sinks: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return dispatch.call("window_keep", torch_window_keep, k, k, v, window, sinks)  # type: ignore[no-any-return]


def window_mixture(call: WindowMixtureCall) -> torch.Tensor:
    return dispatch.call("window_mixture", torch_window_mixture, call.near, call)  # type: ignore[no-any-return]


def gated_rms_norm(x: torch.Tensor, z: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return dispatch.call("gated_rms_norm", torch_gated_rms_norm, x, x, z, weight, eps)  # type: ignore[no-any-return]


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    offset: float,
    round_first: bool,
    residual: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
) -> torch.Tensor:
    return dispatch.call(  # type: ignore[no-any-return]
        "rms_norm", torch_rms_norm, x, x, weight, eps, offset, round_first, residual, total
    )


def silu_product(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return dispatch.call("silu_product", torch_silu_product, gate, gate, up)  # type: ignore[no-any-return]
