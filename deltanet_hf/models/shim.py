"""The file beside a converted model's weights that lets `trust_remote_code=True` find the installed plugin.

It holds no implementation: it imports `deltanet_hf`, or says how to install it.
"""

from __future__ import annotations

from pathlib import Path

import transformers

SHIM_NAME = "deltanet_shim"

_SHIM = '''"""Loads the classes of this model from the installed package `deltanet-hf`."""

try:
    from deltanet_hf.models import {module}
except ImportError as error:
    raise ImportError("This is a Gated DeltaNet model: run `pip install deltanet-hf`, then load it again.") from error

{config_name} = {module}.{config_name}
{model_name} = {module}.{model_name}
'''


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
    shim = _SHIM.format(config_name=config_name, model_name=model_name, module=module)
    (folder / f"{SHIM_NAME}.py").write_text(shim)
    return {"AutoConfig": f"{SHIM_NAME}.{config_name}", "AutoModelForCausalLM": f"{SHIM_NAME}.{model_name}"}
