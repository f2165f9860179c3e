"""A rule of one's own in the place of attention: the delta rule with one learned decay per head.

    python examples/add_rule.py TEACHER OUT

converts every layer but each fourth, and generates: noise, because the layers have the teacher's projections, and gates
and norms that only training fits. A rule that is to become a part of the project is a file in deltanet_hf/mixers and a
row in its table (docs/contributing.md).
"""

from __future__ import annotations

import sys
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from deltanet_convert import convert
from deltanet_hf.mixers import MIXERS
from deltanet_hf.mixers.layer import DeltaRule, Projected, StepGates
from deltanet_hf.mixers.retention import ConstantDecay


class SteadyDeltaNet(DeltaRule):
    """S_t = exp(g) S_{t-1} + k_t beta_t (v_t - k_t^T exp(g) S_{t-1})^T: Gated DeltaNet with RetNet's decays."""

    name: ClassVar[str] = "steady_deltanet"
    title: ClassVar[str] = "DeltaNet with constant decays"
    decays = "by head"
    is_gated_delta_rule = True
    fp32: ClassVar[tuple[str, ...]] = ("log_half_life", *DeltaRule.fp32)

    def add_gates(self) -> None:
        self.decay = ConstantDecay(self.num_states)
        self.b_proj = nn.Linear(self.q_proj.in_features, self.num_states)

    def gates(self, projected: Projected, padding: Tensor | None) -> tuple[Tensor, ...]:
        """Log decay and write strength [B, T, H] float32, both 0 at padding."""
        gates = self.decay(projected.x), self.strength(projected.b)
        return gates if padding is None else tuple(gate.masked_fill(padding[..., None], 0.0) for gate in gates)

    def step_gates(self, projected: Projected) -> StepGates:
        g, beta = self.gates(projected, None)
        return StepGates(g, beta, sigmoid=False)


def main(teacher: str, out: str) -> None:
    MIXERS[SteadyDeltaNet.name] = SteadyDeltaNet
    report = convert(teacher, out, mixer=SteadyDeltaNet.name, keep="every:4", overwrite=True)
    print(f"KL to the teacher before any training: {report['held_out']['kl']:.2f} nats per token")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    with torch.no_grad():
        inputs = tokenizer("Water boils at", return_tensors="pt", return_token_type_ids=False)
        print(tokenizer.decode(model.generate(**inputs, max_new_tokens=20)[0], skip_special_tokens=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
