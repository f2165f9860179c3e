"""The operators around a rule: short convolution, norms, and the product of a feed-forward block."""

# mypy: allow-untyped-defs
from __future__ import annotations

from deltanet_kernels import checks, reference
from deltanet_kernels.arguments import ConvCall, GatedNormCall, RMSNormCall, SiluProductCall
from deltanet_kernels.dispatch import Operator


def _conv():
    from deltanet_kernels.conv import causal_conv1d_triton

    return causal_conv1d_triton


def _gated_norm():
    from deltanet_kernels.norm import gated_rms_norm_triton

    return gated_rms_norm_triton


def _norm():
    from deltanet_kernels.residual_norm import rms_norm_triton

    return rms_norm_triton


def _product():
    from deltanet_kernels.feed_forward import silu_product_triton

    return silu_product_triton


causal_conv1d = Operator(
    "causal_conv1d", ConvCall, check=checks.check_causal_conv1d, cpu=reference.torch_causal_conv1d, triton=_conv
)
gated_rms_norm = Operator(
    "gated_rms_norm",
    GatedNormCall,
    check=checks.check_gated_rms_norm,
    cpu=reference.torch_gated_rms_norm,
    triton=_gated_norm,
)
rms_norm = Operator("rms_norm", RMSNormCall, check=checks.check_rms_norm, cpu=reference.torch_rms_norm, triton=_norm)
silu_product = Operator(
    "silu_product",
    SiluProductCall,
    check=checks.check_silu_product,
    cpu=reference.torch_silu_product,
    triton=_product,
)
