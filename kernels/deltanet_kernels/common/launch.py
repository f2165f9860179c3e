"""Launches kernels with less work on the host, on the device where their tensors are.

Triton binds, specialises and looks up every argument at each call: 12 to 40 microseconds per launch on the host of an
H200, for kernels of some thirty arguments (Triton 3.6), longer than many of these kernels run. Here a launch that
equals an earlier one in everything the code depends on goes straight to the compiled kernel. Triton also launches on
the current device, whichever device the tensors are on; `launch` switches to the tensors' device.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

_compiled: dict[tuple[Any, ...], tuple[CompiledKernel, tuple[Any, ...]]] = {}


def launch(kernel: Any, programs: int, *args: Any, **options: Any) -> None:
    """`kernel[(programs,)](*args, **options)`.

    Args:
        kernel: a function under triton.jit.
        programs: size of the grid.
        args: the kernel's first parameters, of which the first is a tensor.
        options: the other parameters, compile-time constants all, and Triton's own (num_warps, num_stages, maxnreg).
    """
    if not isinstance(kernel, JITFunction):  # Triton's interpreter
        kernel[(programs,)](*args, **options)
        return
    device = args[0].get_device()
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, programs, *args, **options)
        return
    key = (id(kernel), device, *options.items(), *specialization(kernel, args))
    known = _compiled.get(key)
    if known is None:
        compiled = kernel[(programs,)](*args, **options)
        _compiled[key] = compiled, tuple(options[name] for name in kernel.arg_names[len(args) :])
    else:
        compiled, constants = known
        compiled[(programs, 1, 1)](*args, *constants)


def specialization(kernel: JITFunction[Any], args: tuple[Any, ...]) -> list[Any]:
    """The properties of each argument that its compiled code depends on: calls with equal properties share their code.

    The value of a constant; of a tensor its dtype and whether its address is a multiple of 16; of another integer its
    width, and whether it is 1 or a multiple of 16.
    """
    return [
        (x.dtype, x.data_ptr() % 16 == 0)
        if isinstance(x, torch.Tensor)
        else (type(x), x == 1, x % 16 == 0, -(2**31) <= x < 2**31, x < 2**63)
        if isinstance(x, int) and not parameter.is_constexpr
        else (type(x), x if parameter.is_constexpr else None)
        for x, parameter in zip(args, kernel.params, strict=False)
    ]
