"""Copies of modules that share parameters with the original and have some of their parts replaced."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

Module = TypeVar("Module", bound=nn.Module)


def copied(module: Module, **replaced: Any) -> Module:
    """A shallow copy of `module` in which children, or else attributes, of these names are replaced.

    Parameters, buffers, hooks and the other children are those of the original; a replaced child may be any callable.
    """
    copy: Module = object.__new__(type(module))
    children = {name: replaced.get(name, child) for name, child in module._modules.items()}
    attributes = {name: value for name, value in replaced.items() if name not in children}
    copy.__dict__.update(vars(module), **attributes, _modules=children)
    return copy
