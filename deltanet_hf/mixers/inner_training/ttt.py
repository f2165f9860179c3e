"""Test-time training (arXiv 2407.04620) with a linear inner model, in mini-batches of m tokens.

Within a mini-batch all tokens take their gradient at the weights B with which it began. Per head, with a log decay
g_t <= 0 and a step size eta_t:

    B_t = exp(g_t) (S_{t-1} if t begins a mini-batch, else B_{t-1})
    S_t = exp(g_t) S_{t-1} + eta_t k_t (v_t - k_t^T B_t)^T        o_t = D^-0.5 q_t^T S_t

q and k have unit length; eta = beta / m with the write strength beta of Gated DeltaNet, because m equal keys in one
mini-batch multiply what B holds by 1 - m eta. With m = 1 the layer is Gated DeltaNet. The paper has no decay; g is that
of Gated DeltaNet and lets the layer forget as softmax attention does.

With `inner_norm` the inner model is the paper's TTT-Linear, f(k) = k + LN(W^T [k,1]) with the loss |f(k) - v|^2 / 2 and
the output f(q). LN has a learned weight and bias per head, and W = W_0 + S with learned first weights W_0; the last
row of W and S is the bias of the inner model.

Besides S the layer keeps S - B and the number of tokens of the current mini-batch; `state_dtype` rounds both matrices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from deltanet_hf.mixers.layer import DeltaRule, MixCall, MixerProjections, Part, State, TensorShape
from deltanet_hf.mixers.layer.delta_rule import wide
from deltanet_hf.mixers.layer.settings import check_at_least
from deltanet_kernels import InnerNorm, TTTState, chunk_ttt, naive_ttt

START_SIZE = 0.0625
"""Of W_0. The fit of layer 10 of SmolLM2-135M has a relative error of .25 with it, .33 with 1/4 and .64 with 1."""


@dataclass(frozen=True)
class TTTSettings(MixerProjections):
    """Settings of test-time training."""

    mini_batch: int = 16  # m, tokens whose gradients are taken at the same weights
    inner_norm: bool = False  # layer norm and residual in the inner model

    def validate(self, where: str) -> None:
        super().validate(where)
        check_at_least(where, "mini_batch", self.mini_batch, 1)


class InnerLayerNorm(Part):
    """The learned part of the inner model: the norm's `weight` and `bias` [HV, D], and `first`, W_0 [HV, D + 1, D]."""

    def __init__(self, states: int, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(states, head_dim))
        self.bias = nn.Parameter(torch.empty(states, head_dim))
        self.first = nn.Parameter(torch.empty(states, head_dim + 1, head_dim))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """No change by the norm; W_0 gives a key back, with a root mean square of `START_SIZE`.

        The norm makes the step size relative to W_0: a write changes little of a large one, and overwrites a small one.
        """
        self.weight.fill_(1.0)
        self.bias.zero_()
        self.first.zero_()
        self.first.diagonal(dim1=-2, dim2=-1).fill_(START_SIZE * self.first.shape[-1] ** 0.5)

    def forward(self, dtype: torch.dtype) -> InnerNorm:
        """Its parameters in this dtype."""
        return InnerNorm(self.weight.to(dtype), self.bias.to(dtype), self.first.to(dtype))


class TTT(DeltaRule):
    """The layer of test-time training; see the module's docstring for the rule and `Mixer` for what surrounds it."""

    name: ClassVar[str] = "ttt"
    title: ClassVar[str] = "test-time training"
    may_delay: ClassVar[bool] = False
    Settings: ClassVar[type[MixerProjections]] = TTTSettings
    settings: TTTSettings  # type: ignore[assignment]

    def add_gates(self) -> None:
        super().add_gates()
        self.inner_norm = InnerLayerNorm(self.num_states, self.head_dim) if self.settings.inner_norm else None

    def rule_parameters(self) -> list[nn.Parameter]:
        return [] if self.inner_norm is None else list(self.inner_norm.parameters())

    def mix(self, call: MixCall) -> tuple[Tensor, State]:
        q, state, (g, beta) = call.q, call.state, call.gates
        before = None
        if state is not None:
            before = TTTState(wide(state["state"], q), wide(state["pending"], q), state["batch_tokens"])
        norm = None if self.inner_norm is None else self.inner_norm(torch.promote_types(q.dtype, torch.float32))
        rule = naive_ttt if call.decodes else chunk_ttt
        output, new = rule(
            q,
            call.k,
            call.v,
            g,
            beta / self.settings.mini_batch,
            self.settings.mini_batch,
            norm,
            initial_state=before,
            output_final_state=call.keep_state,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=call.cu_seqlens,
            padding=call.padding,  # which does not count in a mini-batch
        )
        if new is None:
            return output, {}
        weight, pending = self.rounded(new.weight), self.rounded(new.pending)
        return output, {"state": weight, "pending": pending, "batch_tokens": new.tokens}

    def recurrent_shapes(self) -> dict[str, TensorShape]:
        shape = self.state_shape(self.head_dim + self.settings.inner_norm)
        return {"state": shape, "pending": shape, "batch_tokens": TensorShape((), torch.int32)}

    def largest_counts(self) -> dict[str, int]:
        return {"batch_tokens": self.settings.mini_batch - 1}
