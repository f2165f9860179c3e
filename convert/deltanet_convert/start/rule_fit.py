"""The fit of Gated DeltaNet's start for a rule with more gates and parameters than its decay and write strength."""

from __future__ import annotations

from torch import Tensor, nn

from deltanet_hf.mixers.gated_rule import GatedRule

from .gate_fit import GateFit
from .samples import Samples


class RuleFit(GateFit):
    """As `GateFit`; the layer's `rule_parameters` are fitted in place, and its `further_gates` are read as they are."""

    def __init__(self, layer: GatedRule, samples: Samples, fit_memory: bool = True) -> None:
        super().__init__(layer, samples, fit_memory)
        self.rule = [layer]  # in a list, as `self.layer`
        self.rule_parameters = nn.ParameterList(parameter.requires_grad_() for parameter in layer.rule_parameters())

    def further_gates(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.rule[0].further_gates(x)
