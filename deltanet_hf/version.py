"""The version of this package, and where it is installed from."""

__version__ = "0.1.0"
REPOSITORY = "https://github.com/deltanet-hf/deltanet-hf"


def install_command(extra: str = "") -> str:
    """The shell command that installs this package, with one of its extras if one is given.

    It names the repository: a bare name would be looked up in an index, where anybody may have taken it.
    """
    name = f"deltanet-hf[{extra}]" if extra else "deltanet-hf"
    return f"pip install '{name} @ git+{REPOSITORY}'"
