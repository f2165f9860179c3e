"""Facts about a CUDA device that choose a configuration, and products without autocast."""

import torch

from deltanet_kernels.common.registration import cached


@cached
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 1 elsewhere (the interpreter)."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cached
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device; (0, 0) elsewhere (the interpreter)."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def no_autocast(device: torch.device) -> torch.autocast:
    """Turn autocast off, which would turn the float32 products into bfloat16 ones."""
    return torch.autocast(device.type, enabled=False)
