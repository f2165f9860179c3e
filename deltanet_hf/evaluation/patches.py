"""Small, scoped changes to lm-eval: expected warnings dropped, templates compiled once."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator

_LOGGERS = ("lm_eval.tasks._index", "lm_eval.api.task", "lm_eval.models.huggingface")
_EXPECTED = ("overrides existing task", "Custom kwargs can be passed", "is not of type `str`", "already-initialized")


class _DropExpected(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not any(text in record.msg for text in _EXPECTED)


_FILTER = _DropExpected()


def quiet_lm_eval() -> None:
    """Drop the warnings about overridden tasks, custom data sets and models passed as objects; all others stay."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_FILTER)


@contextlib.contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """`owner.name` is `value` inside the block, and what it was afterwards."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def templates_compiled_once() -> contextlib.AbstractContextManager[None]:
    """lm-eval compiles a task's Jinja templates anew for every row: half of the time that building prompts takes."""
    from lm_eval.utils import env

    return replaced(env, "from_string", functools.lru_cache(maxsize=1024)(env.from_string))
