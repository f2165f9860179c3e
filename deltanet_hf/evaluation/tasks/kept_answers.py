"""A model's answers to lm-eval in a file, from which an interrupted evaluation continues.

lm-eval has a cache of its own (`--use_cache`), which it unpickles, and which gives one model's answers to any other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deltanet_hf.journal import Journal

# Requests that are answered and kept together. Equal runs put the same ones together, and so give the same bits.
TOGETHER = {"loglikelihood": 512, "loglikelihood_rolling": 8, "generate_until": 32}


class KeptAnswers:
    """A journal whose request is the model, and whose steps are SHA-256 of some of lm-eval's requests -> their answers.

    Args:
        path: the file, which is made if it is missing.
        model: what tells the model from others, as a JSON value.

    Raises UserError if the file holds the answers of another model, or something else, and if it cannot be written.
    """

    def __init__(self, path: Path, model: dict[str, Any]) -> None:
        self._journal = Journal(path, "answers of a model", "give another --answers file, or delete it")
        if not self._journal.resume(model):
            self._journal.begin(model)

    def answer(self, kind: str, requests: list[Any], ask: Callable[[list[Any]], list[Any]]) -> list[Any]:
        """The answers to lm-eval's requests of one kind (a key of `TOGETHER`); `ask` is called for those that miss."""
        answers: list[Any] = []
        for begin in range(0, len(requests), TOGETHER[kind]):
            some = requests[begin : begin + TOGETHER[kind]]
            asked = json.dumps([kind, begin, [request.args for request in some]])
            key = hashlib.sha256(asked.encode()).hexdigest()
            if key not in self._journal.steps:
                self._journal.done(key, list(ask(some)))
            answers += self._journal.steps[key]
        return [tuple(answer) if isinstance(answer, list) else answer for answer in answers]
