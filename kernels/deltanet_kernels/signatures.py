"""Functions of one call, an instance of its class, as functions of the arguments of that class."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, get_type_hints

P = ParamSpec("P")
C = TypeVar("C")
R = TypeVar("R")


def by_arguments(call: Callable[P, C]) -> Callable[[Callable[[C], R]], Callable[P, R]]:
    """Decorates a function of one call: it then takes the arguments of the call's class."""

    def decorated(function: Callable[[C], R]) -> Callable[P, R]:
        @functools.wraps(function)
        def of_arguments(*args: P.args, **kwargs: P.kwargs) -> R:
            return function(call(*args, **kwargs))

        of_arguments.__signature__ = signature(call, function)  # type: ignore[attr-defined]
        return of_arguments

    return decorated


def signature(call: Callable[..., Any], form: Callable[..., Any]) -> inspect.Signature:
    """The arguments of a call's class and the result of a form, with resolved types."""
    kinds, returned = get_type_hints(call), get_type_hints(form)["return"]
    bare = inspect.signature(call)
    arguments = [argument.replace(annotation=kinds[name]) for name, argument in bare.parameters.items()]
    return bare.replace(parameters=arguments, return_annotation=returned)
