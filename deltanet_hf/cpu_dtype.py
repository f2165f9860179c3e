"""The dtypes of `--dtype`, and the one in which a CPU computes: float32, unless it has instructions for bfloat16.

Without them (AVX512_BF16 or AMX_BF16 on x86, BF16 on Arm) each product of bfloat16 matrices takes two to four times as
long as in float32. Weights are stored in the dtype of the model in any case.
"""

from __future__ import annotations

import functools

import torch

from deltanet_hf.errors import UserError

DTYPES = ("auto", "float32", "bfloat16", "float16")
INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16")  # names in `torch.cpu.get_capabilities`; the last is Arm's


@functools.cache
def native_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices natively; decided once per process, within a millisecond.

    oneDNN's own question (`torch.ops.mkldnn._is_mkldnn_bf16_device_supported`) is another one: whether it has bfloat16
    products at all, which it emulates on every CPU with AVX-512.
    """
    if not hasattr(torch.cpu, "get_capabilities"):  # torch 2.11
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in INSTRUCTIONS)


def check_dtype(name: str) -> None:
    """Raises UserError for a name that `--dtype` does not take."""
    if name not in DTYPES:
        raise UserError(f"--dtype: got {name!r}, expected one of {', '.join(DTYPES)}")


def loading_dtype(dtype: str, device: torch.device) -> str:
    """The argument `dtype` with which transformers loads a model for inference on `device`.

    Args:
        dtype: the user's choice, or "auto" for the stored dtype. On a CPU without bfloat16, auto is float32.
    """
    return "float32" if dtype == "auto" and device.type == "cpu" and not native_bfloat16() else dtype
