"""Silences lm-eval's warnings about what this package does on purpose."""

from __future__ import annotations

import logging

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
