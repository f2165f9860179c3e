"""The operators of a prompt's elementwise work. They have no gradients."""

# mypy: allow-untyped-defs
from __future__ import annotations

from deltanet_kernels.dispatch import Operator
from deltanet_kernels.prompt.calls import GateValuesCall, PromptInputsCall, check_gate_values, check_prompt_inputs
from deltanet_kernels.prompt.cpu import torch_gate_values, torch_prompt_inputs


def _inputs():
    from deltanet_kernels.prompt.inputs import prompt_inputs_triton

    return prompt_inputs_triton


def _gates():
    from deltanet_kernels.prompt.gates import gate_values_triton

    return gate_values_triton


prompt_inputs = Operator(
    "prompt_inputs", PromptInputsCall, check=check_prompt_inputs, cpu=torch_prompt_inputs, triton=_inputs
)
gate_values = Operator("gate_values", GateValuesCall, check=check_gate_values, cpu=torch_gate_values, triton=_gates)
