"""Launches kernels with less work on the host, on the device where their tensors are.

Triton binds, specialises and looks up every argument at each call: 12 to 40 microseconds per launch on the host of an
H200, for kernels of some thirty arguments (Triton 3.6), longer than many of these kernels run. Here a launch that
equals an earlier one in everything the code depends on goes straight to the launcher of the compiled kernel, and takes
addresses instead of tensors, which the launcher would look up one by one. Triton also launches on the current device,
whichever device the tensors are on; `launch` switches to the tensors' device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


class Variant(NamedTuple):
    """A kernel compiled for one specialization, with what Triton's launcher takes beside the arguments."""

    compiled: CompiledKernel
    constants: tuple[Any, ...]
    run: Callable[..., None]
    stream_of: Callable[[int], int]
    function: Any
    metadata: Any


_variants: dict[tuple[Any, ...], Variant] = {}
# By the id of a kernel, which is kept alive: whether each of its parameters is a compile-time constant.
_constexpr: dict[int, tuple[JITFunction[Any], tuple[bool, ...]]] = {}


def launch(kernel: Any, programs: int, *args: Any, **options: Any) -> None:
    """`kernel[(programs,)](*args, **options)`.

    Args:
        kernel: a function under triton.jit.
        programs: size of the grid.
        args: the kernel's first parameters, of which the first is a tensor; all tensors are on one device.
        options: the other parameters, compile-time constants all, and Triton's own (num_warps, num_stages, maxnreg).
    """
    if not isinstance(kernel, JITFunction):  # Triton's interpreter
        kernel[(programs,)](*args, **options)
        return
    device = args[0].get_device()
    if device != _current_device():
        with torch.cuda.device(device):
            launch(kernel, programs, *args, **options)
        return
    properties, values = specialization(kernel, args)
    key = (id(kernel), device, *options, *options.values(), *properties)
    variant = _variants.get(key)
    if variant is None:
        compiled = kernel[(programs,)](*args, **options)
        constants = tuple(options[name] for name in kernel.arg_names[len(args) :])
        stream_of = driver.active.get_current_stream
        _variants[key] = Variant(
            compiled, constants, compiled.run, stream_of, compiled.function, compiled.packed_metadata
        )
        return
    hooks = knobs.runtime
    if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:  # profilers, which read the arguments
        variant.compiled[(programs, 1, 1)](*args, *variant.constants)
        return
    _, constants, run, stream_of, function, metadata = variant
    run(programs, 1, 1, stream_of(device), function, metadata, None, None, None, *values, *constants)


def specialization(kernel: JITFunction[Any], args: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The properties of each argument that its compiled code depends on, and the arguments with addresses for tensors.

    Calls with equal properties share their code. They are the value of a constant; of a tensor its dtype and whether
    its address is a multiple of 16; of another integer its width, and whether it is 1 or a multiple of 16.
    """
    known = _constexpr.get(id(kernel))
    if known is None:
        known = _constexpr[id(kernel)] = kernel, tuple(parameter.is_constexpr for parameter in kernel.params)
    properties: list[Any] = []
    values: list[Any] = []
    add, pass_on = properties.append, values.append
    for x, is_constant in zip(args, known[1], strict=False):
        kind = type(x)
        if is_constant:
            add((kind, x))
        elif kind is int:
            if 1 < x < 2**31:
                add(2 if x & 15 else 16)
            else:
                add((kind, x == 1, x % 16 == 0, x >= -(2**31), x < 2**31, x < 2**63))
        elif x is None:
            add(None)
        elif isinstance(x, Tensor):
            address = x.data_ptr()
            add((x.dtype,) if address & 15 else x.dtype)
            pass_on(address)
            continue
        else:
            add((kind, x == 1) if kind is bool else kind)
        pass_on(x)
    return properties, values
