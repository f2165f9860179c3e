"""Tables of calls that are refused, each table in one test."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any


def assert_refused(call: Callable[..., Any], rows: Iterable[tuple[dict[str, Any], Any, str]]) -> None:
    """Assert that `call` with the arguments of each row raises the row's class of error, with a message that matches.

    A row has arguments, a class of errors (or several) and a pattern. All rows that fail are listed; an error of
    another class passes through.
    """
    wrong = []
    for arguments, errors, message in rows:
        try:
            call(**arguments)
        except errors as error:
            if re.search(message, str(error)) is None:
                wrong.append(f"{message!r}: got {type(error).__name__}: {error}")
        else:
            wrong.append(f"{message!r}: nothing was raised")
    assert not wrong, "\n".join(wrong)
