"""Converts pretrained softmax models: `convert`, `plan` and `select`, as the commands of these names.

>>> from deltanet_convert import convert
>>> convert("SmolLM2-135M-Instruct", "student", keep="every:4", mixer="gated_deltanet")  # doctest: +SKIP
"""

import importlib

importlib.import_module("deltanet_convert.select")  # before the function takes the name of the package

from deltanet_convert.api import convert, plan, select  # noqa: E402

__all__ = ["convert", "plan", "select"]
