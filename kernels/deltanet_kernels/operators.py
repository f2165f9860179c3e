"""The public operators around a rule: short convolution, norms, and the product of a feed-forward block."""

from __future__ import annotations

import torch

from deltanet_kernels import checks, dispatch, unchecked
from deltanet_kernels.reference import torch_causal_conv1d


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
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
    checks.check_causal_conv1d(x, weight, bias, activation, initial_state, cu_seqlens)
    return dispatch.call(  # type: ignore[no-any-return]
        "causal_conv1d", torch_causal_conv1d, x,
        x, weight, bias, activation, initial_state, output_final_state, cu_seqlens,
    )  # fmt: skip


def gated_rms_norm(x: torch.Tensor, z: torch.Tensor | None, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
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
    checks.check_gated_rms_norm(x, z, weight)
    return unchecked.gated_rms_norm(x, z, weight, eps)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    round_first: bool = False,
    residual: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
) -> torch.Tensor:
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
    checks.check_rms_norm(x, weight, offset, round_first, residual, total)
    return unchecked.rms_norm(x, weight, eps, offset, round_first, residual, total)


def silu_product(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of a feed-forward block, with the roundings of a model's own module. No gradients.

    Args:
        gate, up: [B, T, D] in one dtype; they may be slices of one tensor.

    Returns:
        [B, T, D] in that dtype; silu(gate) is computed in float32 and rounded before the product.

    Raises:
        ValueError: shapes or devices that do not fit, or gradients are required.
        TypeError: dtypes that do not fit.
    """
    checks.check_silu_product(gate, up)
    return unchecked.silu_product(gate, up)
