"""Registers the converted families with transformers' Auto classes as soon as these are imported, and not before.

So `import deltanet_hf` takes milliseconds, and what needs neither torch nor transformers imports neither.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

CONFIG = "transformers.models.auto.configuration_auto"  # which every other module with Auto classes imports
MODELS = "transformers.models.auto.modeling_auto"  # which the docstrings of configuration classes are made from
CONFIGURATIONS = "deltanet_hf.models.configurations"  # registers when it is imported
OTHER_CLASSES = "deltanet_hf.models.auto_classes"  # the same


class _AfterAutoClasses(MetaPathFinder):
    """Lets the import of `CONFIG` or, where that is a part of it, of `MODELS` end with that of `CONFIGURATIONS`.

    That of `MODELS` ends with that of `OTHER_CLASSES` as well.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in (CONFIG, MODELS):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                if name == MODELS or MODELS not in sys.modules:
                    _register()

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def register_with_auto_classes() -> None:
    """Register now if the Auto classes are imported, else when they will be."""
    if CONFIG in sys.modules:
        _register()
    if MODELS not in sys.modules and not any(isinstance(finder, _AfterAutoClasses) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterAutoClasses())


def _register() -> None:
    configurations = importlib.import_module(CONFIGURATIONS)
    # Without its last function it is being imported by a call of this that goes on afterwards.
    if MODELS in sys.modules and hasattr(configurations, "config_classes"):
        importlib.import_module(OTHER_CLASSES)
