"""Has models take their plain form in calls without gradients, to compare the fast form with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from deltanet_hf.fast import form


@contextmanager
def plain_form() -> Iterator[None]:
    """Calls of any model within take its own modules, as they do under gradients."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(form, "decided_form", lambda model, may_move: "a test compares the forms")
        yield
