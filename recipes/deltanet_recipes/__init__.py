"""Trains and evaluates converted models: `distill` and `report`, as the commands of these names.

>>> from deltanet_recipes import distill
>>> distill("smollm2-135m", student="student", output="run")  # doctest: +SKIP
"""

from deltanet_recipes.api import distill, report

__all__ = ["distill", "report"]
