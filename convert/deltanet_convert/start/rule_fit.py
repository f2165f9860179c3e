"""The fit of Gated DeltaNet's start through the rule of another mixer with the same gates."""

from __future__ import annotations

from torch import Tensor, nn

from deltanet_hf.mixers.gated_rule import GatedRule

from .gate_fit import GateFit
from .samples import Sample, Samples


class RuleFit(GateFit):
    """As `GateFit`; the layer's own `mix` is the operator, and its `rule_parameters` are fitted in place."""

    def __init__(self, layer: GatedRule, samples: Samples, fit_memory: bool = True) -> None:
        super().__init__(layer, samples, fit_memory)
        self.rule, self.further_gates = layer.mix, layer.further_gates
        self.rule_parameters = nn.ParameterList(parameter.requires_grad_() for parameter in layer.rule_parameters())

    def read(self, s: Sample) -> tuple[Tensor, Tensor | None]:
        decay, strength, gate = self.gates(s.x)
        o, _ = self.rule(s.q, s.k, s.v, (decay, strength, *self.further_gates(s.x)), None, False, None)
        return o, gate
