"""The file beside a converted model's weights that lets `trust_remote_code=True` find the installed plugin.

It holds no implementation: it imports `deltanet_hf`, of the version that wrote the model or a later one, or says how to
install it.
"""

from __future__ import annotations

from pathlib import Path

import transformers
from packaging.version import Version

from deltanet_hf.version import __version__, install_command

SHIM_NAME = "deltanet_shim"

_SHIM = '''"""Loads the classes of this model from the installed package `deltanet-hf`, version {version} or later."""

try:
    from deltanet_hf.models.shim import check_version

    check_version("{version}")
    from deltanet_hf.models.{module} import {config_name}, {model_name}
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "deltanet_hf":
        raise
    raise ImportError(
        "This model needs deltanet-hf {version} or later: run `{install}`, then load it again."
    ) from error
'''


def check_version(written_by: str) -> None:
    """Raises ImportError if the installed package is older than the version that wrote a model."""
    if Version(__version__) < Version(written_by):
        raise ImportError(
            f"This model was written by deltanet-hf {written_by}, and {__version__} is installed: run "
            f"`{install_command()} --upgrade`, then load it again."
        )


def name_in_transformers(made: type) -> None:
    """Make a class an attribute of the module `transformers`, where `transformers serve` takes it from.

    The attribute is the module's type's: imports inside transformers make the module object again and lose its own.
    """
    setattr(type(transformers), made.__name__, made)


def write_shim(folder: str | Path, config_name: str, model_name: str, module: str = "factory") -> dict[str, str]:
    """Write the shim into `folder` and return the `auto_map` that config.json needs to point at it.

    Args:
        folder: made if it does not exist.
        config_name, model_name: names of the classes in `deltanet_hf.models.MODULE`.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    names = {"config_name": config_name, "model_name": model_name, "module": module}
    shim = _SHIM.format(version=__version__, install=install_command(), **names)
    (folder / f"{SHIM_NAME}.py").write_text(shim)
    return {"AutoConfig": f"{SHIM_NAME}.{config_name}", "AutoModelForCausalLM": f"{SHIM_NAME}.{model_name}"}


@classmethod  # type: ignore[misc]
def no_code_beside_the_shim(cls: type, auto_class: str = "") -> None:
    """Takes the place of `register_for_auto_class`, which makes `save_pretrained` copy the module of a class.

    transformers calls it for every class that it loads with `trust_remote_code=True`.
    """
