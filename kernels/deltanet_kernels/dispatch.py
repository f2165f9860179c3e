"""An operator: the class of its calls, the check of a call, and its two forms, PyTorch and Triton.

`operators.py` declares all operators in this way, and `triton_forms.py` has their Triton forms. `Operator.unchecked`
chooses between the forms: PyTorch for CPU tensors, Triton for CUDA tensors. A CUDA call that the Triton form does not
support runs in PyTorch, and a warning says so once with the reason.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from deltanet_kernels.common.registration import cached
from deltanet_kernels.signatures import signature

P = ParamSpec("P")
C = TypeVar("C", bound=tuple[Any, ...])
R = TypeVar("R")


class Operator(Generic[P, C, R]):
    """A public operator: packs its arguments into a call, checks it, and computes it.

    Args:
        name: of the operator.
        call: the class of its calls, with the arguments, their defaults and their documentation; a tensor comes first.
        check: raises ValueError or TypeError for arguments that do not fit.
        cpu: the PyTorch form. The Triton form raises NotImplementedError for calls that it does not support.
    """

    def __init__(self, name: str, call: Callable[P, C], check: Callable[[C], object], cpu: Callable[[C], R]) -> None:
        self.call, self.check, self.cpu = call, check, cpu
        self._form: Callable[[C], R] | None = None  # once imported
        self.__name__, self.__doc__, self.__signature__ = name, call.__doc__, signature(call, cpu)

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
            from deltanet_kernels.triton_forms import FORMS
        except (ImportError, AttributeError, RuntimeError) as error:
            _warn_fallback(self.__name__, f"the Triton kernels cannot be imported: {error}")
            return None
        form: Callable[[C], R] = FORMS[self.__name__]
        if not torch.compiler.is_compiling():
            self._form = form
        return form


@cached
def _warn_fallback(operator: str, reason: str) -> None:
    warnings.warn(
        f"{operator}: CUDA tensors fall back to the much slower PyTorch form ({reason}).",
        RuntimeWarning,
        stacklevel=4,
    )
