"""The arguments of the operators as one typed object each, so that inner functions do not repeat the list.

The field names, their order and their defaults are those of the public functions (`operators.py` of each folder), which
document them.
"""

from typing import Literal, NamedTuple

import torch

Erase = Literal["decayed", "off", "undecayed"]
"""Which prediction a write takes from its value, i.e. which state it erases from; `chunk_gated_delta_rule` says how."""


class RuleDims(NamedTuple):
    """Sizes of one call: HO = max(HQ, HV) output heads, N states per head."""

    B: int
    T: int
    H: int
    HQ: int
    HV: int
    HO: int
    K: int
    V: int
    N: int


class RuleCall(NamedTuple):
    """One call of the gated delta rule; `chunk_gated_delta_rule` documents the fields."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    scale: float | None = None
    initial_state: torch.Tensor | None = None
    output_final_state: bool = False
    use_qk_l2norm_in_kernel: bool = False
    cu_seqlens: torch.Tensor | None = None
    A_log: torch.Tensor | None = None
    dt_bias: torch.Tensor | None = None
    use_gate_in_kernel: bool = False
    use_beta_sigmoid_in_kernel: bool = False
    erase: Erase = "decayed"
    allow_neg_eigval: bool = False  # this and the next are in public calls only: kernels get `drop_in.plain` ones
    state_v_first: bool = False

    @property
    def factor(self) -> float:
        """The factor of the output: `scale`, or K**-0.5 by default."""
        return self.q.shape[3] ** -0.5 if self.scale is None else float(self.scale)

    @property
    def dims(self) -> RuleDims:
        """Sizes of checked arguments."""
        (B, T, HQ, K), H, (HV, V) = self.q.shape, self.k.shape[2], self.v.shape[2:]
        N = B if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1
        return RuleDims(B, T, H, HQ, HV, max(HQ, HV), K, V, N)

    def needs_gradients(self) -> bool:
        """Whether autograd records this call."""
        inputs = (self.q, self.k, self.v, self.g, self.beta, self.initial_state, self.A_log, self.dt_bias)
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


class StepCall(NamedTuple):
    """One decoding step; `gated_delta_step_` documents the fields. The operator takes them in this order."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    state: torch.Tensor
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    conv_weight: torch.Tensor | None
    conv_tail: torch.Tensor | None
    z: torch.Tensor | None
    norm_weight: torch.Tensor | None
    padding: torch.Tensor | None
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    k_offset: torch.Tensor | None
    scale: float | None
    eps: float
    qk_silu: bool
    v_silu: bool
    allow_neg_eigval: bool
    use_beta_sigmoid_in_kernel: bool = True
    erase: Erase = "decayed"
    kv_repeats: int = 1

    @property
    def factor(self) -> float:
        """The factor of the output: `scale`, or K**-0.5 by default."""
        return float(self.state.shape[2] ** -0.5) if self.scale is None else self.scale


class WindowCall(NamedTuple):
    """One call of the attention over window and sinks; `window_attention` documents the fields."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    window: int
    sinks: int
    scale: float | None = None
    cu_seqlens: torch.Tensor | None = None
    softcap: float | None = None

    @property
    def factor(self) -> float:
        """The factor of the scores: `scale`, or D**-0.5 by default."""
        return float(self.q.shape[3] ** -0.5) if self.scale is None else float(self.scale)


class WindowStepCall(NamedTuple):
    """One decoding step of that attention; `window_step_` documents the fields, in the operator's order."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    window: int
    sinks: int
    keys: torch.Tensor
    values: torch.Tensor
    numbers: torch.Tensor
    count: torch.Tensor  # type: ignore[assignment]  # tuples have a method of this name
    share_logit: torch.Tensor | None = None
    far: torch.Tensor | None = None
    far_slope: torch.Tensor | None = None
    near_slope: torch.Tensor | None = None
    reach: int | None = None
    scale: float | None = None
    padding: torch.Tensor | None = None
    softcap: float | None = None
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None

    @property
    def factor(self) -> float:
        """The factor of the scores: `scale`, or D**-0.5 by default."""
        return float(self.q.shape[3] ** -0.5) if self.scale is None else float(self.scale)


class PromptInputsCall(NamedTuple):
    """q, k and v of a prompt; `prompt_inputs` documents the fields. The operator takes them in this order."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    head_dim: int
    conv_weight: torch.Tensor | None = None
    conv_tail: torch.Tensor | None = None
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    k_offset: torch.Tensor | None = None
    qk_silu: bool = False
    v_silu: bool = False
    window_heads: int = 0
    output_tail: bool = False
    kv_repeats: int = 1


class PromptInputs(NamedTuple):
    """The results of `prompt_inputs`, which documents them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    window_q: torch.Tensor | None
    window_k: torch.Tensor | None
    tail: torch.Tensor | None


class WindowMixtureCall(NamedTuple):
    """A window's output mixed with that of a state; `window_mixture` documents the fields, in the operator's order."""

    near: torch.Tensor
    lse: torch.Tensor
    far: torch.Tensor
    share_logit: torch.Tensor
    far_slope: torch.Tensor
    near_slope: torch.Tensor
    places: int
    reach: int | None = None
    numbers: torch.Tensor | None = None
    z: torch.Tensor | None = None
    norm_weight: torch.Tensor | None = None
    eps: float = 1e-6
