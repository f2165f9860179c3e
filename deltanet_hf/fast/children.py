"""Modules whose children are others: a family's own forward then calls these."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

Module = TypeVar("Module", bound=nn.Module)


def with_children(module: Module, **children: Any) -> Module:
    """A second module of the same class, with all that `module` has but these children, which may be any callable."""
    made: Module = object.__new__(type(module))
    made.__dict__.update(vars(module), _modules={**module._modules, **children})
    return made
