"""The calls of the operators that other folders use too: the arguments of each, as one typed object.

Other operators have theirs in the `calls.py` of their folder.
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


class Upstream(NamedTuple):
    """The gradients of the output of a rule and of its final state."""

    do: torch.Tensor
    dht: torch.Tensor | None


class StepCall(NamedTuple):
    """One or several decoding steps of a Gated DeltaNet layer between its projections; updates state and tail in place.

        q, k, v = act(rope(conv(q|k|v)) - offset);  q, k = x * rsqrt(sum x^2 + 1e-6);  beta = sigmoid(b)
        g = -exp(A_log) * softplus(a + dt_bias)
        o = rmsnorm(gated_delta_rule(q, k, v, g, beta)) * norm_weight * silu(z)

    On CUDA one kernel computes this for one token, and for several tokens up to a state of 128 x 128; with a
    convolution it requires H = HV. Other calls run the separate kernels. No gradients.
    Head counts as for `chunk_gated_delta_rule`.

    Args:
        q, k, v: projections of T tokens [B, T, HQ*K], [B, T, H*K], [B, T, HV*V], or with the heads as a
            dimension of their own [B, T, heads, size]; one dtype.
        a, b: logits of the decay and of the write strength [B, T, HV], or both as they are (see A_log and
            use_beta_sigmoid_in_kernel).
        state: [B, HV, K, V] float32 or bfloat16 (float64 or bfloat16 with float64 inputs), contiguous; the arithmetic
            is float32, and a bfloat16 state is rounded once, to nearest, when it is stored.
        A_log, dt_bias: [HV], or both None if a is the log decay g <= 0 itself, which is checked on CPUs only.
        conv_weight: [C, W] over the C channels of q|k|v, or None for no convolution.
        conv_tail: the W-1 inputs before the first token, oldest first [B, C, W-1], contiguous; with conv_weight.
        z: output gate logits [B, T, HO*V] or [B, T, HO, V], HO = max(HQ, HV), or None for no gate.
        norm_weight: [V] or [HO, V], or None for no norm.
        padding: [B, T] bool, True at tokens that do not change the state and enter the convolution as zeros; their
            outputs are finite and have no meaning.
        cos, sin: [B, T, R] or [1, T, R], R even and <= K: the first R channels of each head of q and k are rotated,
            channel i < R/2 against channel i + R/2, between convolution and activation; None for no rotation.
        scale: factor of the output before the norm, K**-0.5 by default.
        eps: added to the mean square in the norm.
        qk_silu, v_silu: apply SiLU to q and k, and to v.
        k_offset: [H, K], subtracted from the keys between rotation and activation; None for 0.
        allow_neg_eigval: the write strength is 2 sigmoid(b), so that the factors I - beta k k^T have eigenvalues down
            to -1 (arXiv 2411.12537).
        use_beta_sigmoid_in_kernel: False if b is the write strength itself, up to 2.
        erase: "decayed", "off" or "undecayed", as for `chunk_gated_delta_rule`.
        kv_repeats: number of neighbouring heads that read each head of k and v, which then have H / kv_repeats and
            HV / kv_repeats heads. Each has channels of the convolution of its own.
        state_indices: [B] int32, the row of state and conv_tail [rows, ...] that holds each sequence, each row
            contiguous; None for row b of sequence b. Row 0 holds no sequence: any number of rows of a batch that stand
            for none may have the index 0, and their outputs have no meaning.

    Returns:
        o [B, T, HO, V] in the dtype of v.

    Raises:
        ValueError: shapes, head counts or devices that do not fit, a state or tail that is not contiguous, T = 0.
        TypeError: dtypes that do not fit.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    state: torch.Tensor
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    conv_weight: torch.Tensor | None = None
    conv_tail: torch.Tensor | None = None
    z: torch.Tensor | None = None
    norm_weight: torch.Tensor | None = None
    padding: torch.Tensor | None = None
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    k_offset: torch.Tensor | None = None
    scale: float | None = None
    eps: float = 1e-6
    qk_silu: bool = False
    v_silu: bool = False
    allow_neg_eigval: bool = False
    use_beta_sigmoid_in_kernel: bool = True
    erase: Erase = "decayed"
    kv_repeats: int = 1
    state_indices: torch.Tensor | None = None

    @property
    def factor(self) -> float:
        """The factor of the output: `scale`, or K**-0.5 by default."""
        return float(self.state.shape[2] ** -0.5) if self.scale is None else self.scale


class ConvCall(NamedTuple):
    """Causal depthwise convolution with state: y_t = activation(sum_w weight[:, w] x_{t-W+1+w} + bias).

    Args:
        x: inputs [B, T, D]; T >= 1.
        weight: [D, W]; the last column multiplies the current token.
        bias: [D] or None.
        activation: None or "silu".
        initial_state: the W-1 inputs before the first, oldest first [N, D, W-1]; zeros by default.
        output_final_state: also return the last W-1 inputs of each sequence.
        cu_seqlens: offsets [N+1] of packed sequences as for `chunk_gated_delta_rule`; tokens after the last
            offset get y = 0.

    Returns:
        y [B, T, D] in the dtype of x, and the final state [N, D, W-1] in the dtype of x or None.

    Raises:
        ValueError: shapes, devices, offsets or an activation that do not fit.
        TypeError: dtypes that do not fit.
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    activation: str | None = None
    initial_state: torch.Tensor | None = None
    output_final_state: bool = False
    cu_seqlens: torch.Tensor | None = None


class GatedNormCall(NamedTuple):
    """Gated RMSNorm over the last dimension: rmsnorm(x) * weight * silu(z), computed in float32.

    Args:
        x: [..., D].
        z: gate logits in the shape of x, or None for no gate.
        weight: [D], or [H, D] with x [..., H, D].
        eps: added to the mean square.

    Returns:
        The shape and dtype of x.

    Raises:
        ValueError: shapes or devices that do not fit.
        TypeError: dtypes that do not fit.
    """

    x: torch.Tensor
    z: torch.Tensor | None
    weight: torch.Tensor
    eps: float = 1e-6


class RMSNormCall(NamedTuple):
    """RMSNorm of x, or of x + residual, with the roundings of a model's own module. No gradients.

    Args:
        x: [..., D].
        weight: [D]; with `round_first` in the dtype of x.
        eps: added to the mean square.
        offset: added to the weight: 1 for Gemma's norms.
        round_first: round the normalised x to its dtype before the product with the weight, as Llama's norms do; the
            offset is 0 then.
        residual: in the shape and dtype of x, added to it first; the sum is rounded to that dtype.
        total: contiguous, in the shape and dtype of x: receives the sum. Given with `residual`.

    Returns:
        The shape and dtype of x; computed in float32, also from float64.

    Raises:
        ValueError: shapes, devices or options that do not fit, or gradients are required.
        TypeError: dtypes that do not fit.
    """

    x: torch.Tensor
    weight: torch.Tensor
    eps: float = 1e-6
    offset: float = 0.0
    round_first: bool = False
    residual: torch.Tensor | None = None
    total: torch.Tensor | None = None


class SiluProductCall(NamedTuple):
    """silu(gate) * up of a feed-forward block, with the roundings of a model's own module. No gradients.

    Args:
        gate, up: [B, T, D] in one dtype; they may be slices of one tensor.

    Returns:
        [B, T, D] in that dtype; silu(gate) is computed in float32 and rounded before the product.

    Raises:
        ValueError: shapes or devices that do not fit, or gradients are required.
        TypeError: dtypes that do not fit.
    """

    gate: torch.Tensor
    up: torch.Tensor
