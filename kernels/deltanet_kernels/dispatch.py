"""An operator: the class of its calls, the check of a call, and its two forms, PyTorch and Triton.

The `operators.py` of each folder declares its operators in this way. `Operator.unchecked` chooses between
the forms: PyTorch for CPU tensors, Triton for CUDA tensors. A CUDA call that the Triton form does not support runs in
PyTorch, and a warning says so once with the reason.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar, get_type_hints

import torch

from deltanet_kernels.common.registration import cached

P = ParamSpec("P")
C = TypeVar("C", bound=tuple[Any, ...])
R = TypeVar("R")


class Operator(Generic[P, C, R]):
    """A public operator: packs its arguments into a call, checks it, and computes it.

    Args:
        name: of the operator.
        call: the class of its calls, with the arguments, their defaults and their documentation; a tensor comes first.
        check: raises ValueError or TypeError for arguments that do not fit.
        cpu: the PyTorch form.
        triton: imports and returns the Triton form, at the first call on CUDA. An import statement does that, because
            torch.compile traces it and refuses importlib. The form raises NotImplementedError for calls that it does
            not support.
    """

    def __init__(
        self,
        name: str,
        call: Callable[P, C],
        *,
        check: Callable[[C], object],
        cpu: Callable[[C], R],
        triton: Callable[[], Callable[[C], R]],
    ) -> None:
        self.call, self.check, self.cpu = call, check, cpu
        self._import = triton
        self._form: Callable[[C], R] | None = None  # once imported
        self.__name__, self.__doc__, self.__signature__ = name, call.__doc__, _signature(call, cpu)

    def __repr__(self) -> str:
        """The signature, which `help` then shows."""
        return f"{self.__name__}{self.__signature__}"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        call = self.call(*args, **kwargs)
        self.check(call)
        return self.unchecked(call)

    def unchecked(self, call: C) -> R:
        """Compute a call without its check, which costs the host as much time as a launch.

        For layers that have made all arguments themselves. Arguments that do not fit end in wrong numbers or in an
        error of the device.
        """
        if call[0].is_cuda and (form := self._form or self.triton()) is not None:
            try:
                return form(call)
            except NotImplementedError as error:
                _warn_fallback(self.__name__, str(error))
        return self.cpu(call)

    def triton(self) -> Callable[[C], R] | None:
        """The Triton form, or None (with a warning) if it cannot be imported."""
        try:
            form = self._import()
        except (ImportError, AttributeError, RuntimeError) as error:
            _warn_fallback(self.__name__, f"the Triton kernels cannot be imported: {error}")
            return None
        if not torch.compiler.is_compiling():
            self._form = form
        return form


def by_arguments(call: Callable[P, C]) -> Callable[[Callable[[C], R]], Callable[P, R]]:
    """Decorates a function of one call: it then takes the arguments of the call's class."""

    def decorated(function: Callable[[C], R]) -> Callable[P, R]:
        @functools.wraps(function)
        def of_arguments(*args: P.args, **kwargs: P.kwargs) -> R:
            return function(call(*args, **kwargs))

        of_arguments.__signature__ = _signature(call, function)  # type: ignore[attr-defined]
        return of_arguments

    return decorated


def _signature(call: Callable[..., Any], form: Callable[..., Any]) -> inspect.Signature:
    """The arguments of a call's class and the result of a form, with resolved types."""
    kinds, returned = get_type_hints(call), get_type_hints(form)["return"]
    bare = inspect.signature(call)
    arguments = [argument.replace(annotation=kinds[name]) for name, argument in bare.parameters.items()]
    return bare.replace(parameters=arguments, return_annotation=returned)


@cached
def _warn_fallback(operator: str, reason: str) -> None:
    warnings.warn(
        f"{operator}: CUDA tensors fall back to the much slower PyTorch form ({reason}).",
        RuntimeWarning,
        stacklevel=4,
    )
