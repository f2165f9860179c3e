"""The versions of the software that a written folder depends on."""

import platform
from importlib.metadata import version

import deltanet_hf


def versions() -> dict[str, str]:
    """Versions of Python, deltanet-hf and the libraries that compute or write the weights."""
    libraries = {name: version(name) for name in ("torch", "transformers", "safetensors")}
    return {"python": platform.python_version(), "deltanet-hf": deltanet_hf.__version__, **libraries}
