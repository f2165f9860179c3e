"""Triton's interpreter without the work that it repeats at each call of a function and for each value.

Importing this replaces functions of Triton by ones that compute the same. What remains takes about half of the time.
"""

import functools
import inspect
from dataclasses import replace
from typing import Any

import triton.language as tl
from triton.language import core
from triton.language.core import is_builtin
from triton.runtime import interpreter

_patch_lang, _get_np_dtype = interpreter._patch_lang, interpreter._get_np_dtype
_tensor_init, _block_type_init = core.tensor.__init__, core.block_type.__init__
_dtypes: dict[str, Any] = {}
_tensors: dict[str, dict[str, Any]] = {}
_block_types: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}


@functools.cache
def _builtin_names(package: Any) -> list[str]:
    """The names in a part of Triton's language that the interpreter replaces."""
    return [name for name, member in inspect.getmembers(package) if is_builtin(member)]


def _patch_builtin_once(package: Any, *rest: Any) -> None:
    """The interpreter searches the whole language."""
    for name in _builtin_names(package):
        if is_builtin(member := getattr(package, name)):
            interpreter._patch_attr(package, name, member, *rest)


@functools.cache
def _languages(fn: Any) -> list[Any]:
    """The modules of Triton's language that a kernel or a device function names."""
    return [value for value in fn.__globals__.values() if value is tl or value is core]


def _patch_lang_once(fn: Any) -> Any:
    """The interpreter replaces the same functions at each call of a device function."""
    return _patch_lang(fn) if any(is_builtin(language.load) for language in _languages(fn)) else None


def _known_np_dtype(dtype: Any) -> Any:
    """The interpreter makes a table of all types for each value."""
    name = dtype.scalar.name
    if name not in _dtypes:
        _dtypes[name] = _get_np_dtype(dtype)
    return _dtypes[name]


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    """Triton makes the same shape for each value."""
    if type.name not in _tensors:
        _tensor_init(self, handle, type)
        _tensors[type.name] = dict(vars(self))
    vars(self).update(_tensors[type.name], handle=handle, type=type)


def _init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    """Triton checks and names the same shapes for each value."""
    key = element_ty.name, tuple(getattr(size, "value", size) for size in shape)
    if key not in _block_types:
        _block_type_init(self, element_ty, shape)
        _block_types[key] = dict(vars(self))
    vars(self).update(_block_types[key])


interpreter._patch_builtin = _patch_builtin_once
interpreter._patch_lang = _patch_lang_once
interpreter._get_np_dtype = _known_np_dtype
core.tensor.__init__ = _init_tensor
core.block_type.__init__ = _init_block_type
# Without `debug` the interpreter computes whether sums and products of integers overflow, and does not look at it.
interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
