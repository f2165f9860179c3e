"""The operators of attention over a window."""

# mypy: allow-untyped-defs
from __future__ import annotations

from deltanet_kernels.dispatch import Operator
from deltanet_kernels.window.calls import (
    WindowCall,
    WindowKeepCall,
    WindowMixtureCall,
    WindowStepCall,
    check_window_attention,
    check_window_keep,
    check_window_mixture,
    check_window_step,
)
from deltanet_kernels.window.cpu import torch_window_attention
from deltanet_kernels.window.cpu_prompt import torch_window_keep, torch_window_mixture
from deltanet_kernels.window.cpu_step import torch_window_step_


def _attention():
    from deltanet_kernels.window.attention import window_attention_triton

    return window_attention_triton


def _step():
    from deltanet_kernels.window.step import window_step_triton_

    return window_step_triton_


def _mixture():
    from deltanet_kernels.window.mixture import window_mixture_triton

    return window_mixture_triton


def _keep():
    from deltanet_kernels.window.keep import window_keep_triton

    return window_keep_triton


window_attention = Operator(
    "window_attention", WindowCall, check=check_window_attention, cpu=torch_window_attention, triton=_attention
)
window_step_ = Operator("window_step_", WindowStepCall, check=check_window_step, cpu=torch_window_step_, triton=_step)
window_mixture = Operator(
    "window_mixture", WindowMixtureCall, check=check_window_mixture, cpu=torch_window_mixture, triton=_mixture
)
window_keep = Operator("window_keep", WindowKeepCall, check=check_window_keep, cpu=torch_window_keep, triton=_keep)
