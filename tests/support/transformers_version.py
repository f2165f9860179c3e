"""Marks for tests of what transformers itself does only from some version on."""

from __future__ import annotations

import pytest
import transformers
from packaging.version import Version

several_recorded_calls = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.18"),
    reason="sliding layers of transformers 5.17 return more keys than their mask has, when several calls are recorded",
)
