"""The operators of a prompt without their checks: `Operator.unchecked` under the names that layers call."""

from __future__ import annotations

from typing import Any

from deltanet_kernels import operators
from deltanet_kernels.arguments import GatedNormCall, RMSNormCall, SiluProductCall
from deltanet_kernels.gated_delta_rule.operators import chunk_rule
from deltanet_kernels.prompt import operators as prompt
from deltanet_kernels.prompt.calls import GateValuesCall
from deltanet_kernels.window import operators as window
from deltanet_kernels.window.calls import WindowKeepCall

chunk_gated_delta_rule = chunk_rule.unchecked
prompt_inputs = prompt.prompt_inputs.unchecked
window_attention = window.window_attention.unchecked
window_mixture = window.window_mixture.unchecked


def gate_values(*args: Any, **kwargs: Any) -> Any:
    return prompt.gate_values.unchecked(GateValuesCall(*args, **kwargs))


def window_keep(*args: Any, **kwargs: Any) -> Any:
    return window.window_keep.unchecked(WindowKeepCall(*args, **kwargs))


def gated_rms_norm(*args: Any, **kwargs: Any) -> Any:
    return operators.gated_rms_norm.unchecked(GatedNormCall(*args, **kwargs))


def rms_norm(*args: Any, **kwargs: Any) -> Any:
    return operators.rms_norm.unchecked(RMSNormCall(*args, **kwargs))


def silu_product(*args: Any, **kwargs: Any) -> Any:
    return operators.silu_product.unchecked(SiluProductCall(*args, **kwargs))
