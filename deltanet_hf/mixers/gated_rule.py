"""The base of mixers that put another recurrence between the gates of Gated DeltaNet."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deltanet_hf.mixers.attention_shape import MixerProjections
from deltanet_hf.mixers.gated_deltanet import GatedDeltaNet
from deltanet_hf.mixers.layer_kind import TensorShape


class GatedRule(GatedDeltaNet):
    """A mixer with the log decay g and the write strength beta of Gated DeltaNet, and a rule of its own.

    A subclass defines `mix` and `recurrent_shapes`, and may define `further_gates` and `rule_parameters`.
    """

    fused_step = False

    @classmethod
    def default_settings(cls, profile: str, training: bool = True) -> MixerProjections:
        if profile == "qwen3_5":
            raise ValueError("profile: got qwen3_5, whose layer is Gated DeltaNet; take the mixer gated_deltanet")
        return super().default_settings(profile, training)

    def further_gates(self, x: Tensor) -> tuple[Tensor, ...]:
        """Further inputs of `mix` beside g and beta: tensors [B, T, ...] from the layer's input x [B, T, hidden]."""
        return ()

    def rule_parameters(self) -> list[nn.Parameter]:
        """Parameters of the rule that do not depend on the input; the fitted start fits them too."""
        return []

    def gates(self, x: Tensor, padding: Tensor | None) -> tuple[Tensor, ...]:
        """g and beta [B, T, HV] float32, both 0 at padding, and what `further_gates` returns."""
        return *super().gates(x, padding), *self.further_gates(x)

    def state_shape(self, rows: int | None = None) -> TensorShape:
        """A state of `rows` x D per head (D x D by default) that `state_dtype` may round."""
        dtype = getattr(torch, self.settings.state_dtype)
        return TensorShape((self.num_states, rows or self.head_dim, self.head_dim), dtype)

    def rounded(self, state: Tensor) -> Tensor:
        """A tensor of the state as the cache keeps it."""
        return state.bfloat16() if self.settings.state_dtype == "bfloat16" else state


def decodes(q: Tensor) -> bool:
    """Whether a call of queries q [B, T, HQ, D] is one decoding step, for which the recurrence is the faster form."""
    return q.shape[1] == 1 and not torch.is_grad_enabled()


def wide(state: Tensor, q: Tensor) -> Tensor:
    """A tensor of the cache in the dtype of the arithmetic."""
    return state.to(torch.promote_types(q.dtype, torch.float32))
