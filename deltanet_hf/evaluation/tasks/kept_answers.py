"""A model's answers to lm-eval in a file, from which an interrupted evaluation continues.

lm-eval has a cache of its own (`--use_cache`), which it unpickles, and which gives one model's answers to any other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deltanet_hf.errors import UserError
from deltanet_hf.safe_write import writing

# Requests that are answered and kept together. Equal runs put the same ones together, and so give the same bits.
TOGETHER = {"loglikelihood": 512, "loglikelihood_rolling": 8, "generate_until": 32}


class KeptAnswers:
    """JSON lines: first the model, then [SHA-256 of some requests, their answers]. A line that was cut is left out.

    Args:
        path: the file, which is made if it is missing.
        model: what tells the model from others, as a JSON value.

    Raises UserError if the file holds the answers of another model, or something else, and if it cannot be written.
    """

    def __init__(self, path: Path, model: dict[str, Any]) -> None:
        self.path, first = path, {"answers of": model}
        with writing(path):
            data = path.read_bytes() if path.exists() else b""
            complete = data[: data.rfind(b"\n") + 1]
            try:
                lines = [json.loads(line) for line in complete.splitlines()]
                self._answers: dict[str, list[Any]] = dict(lines[1:])
            except (ValueError, TypeError) as error:
                raise UserError(f"--answers {path}: not a file of answers; give another one, or delete it") from error
            if (lines and lines[0] != first) or (data and not lines):
                raise UserError(
                    f"--answers {path}: not the answers of this model (and window); give another file, or delete it"
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)
            self._file.truncate(len(complete))
            if not lines:
                self._append(first)

    def answer(self, kind: str, requests: list[Any], ask: Callable[[list[Any]], list[Any]]) -> list[Any]:
        """The answers to lm-eval's requests of one kind (a key of `TOGETHER`); `ask` is called for those that miss."""
        answers: list[Any] = []
        for begin in range(0, len(requests), TOGETHER[kind]):
            some = requests[begin : begin + TOGETHER[kind]]
            asked = json.dumps([kind, begin, [request.args for request in some]])
            key = hashlib.sha256(asked.encode()).hexdigest()
            if key not in self._answers:
                self._answers[key] = list(ask(some))
                with writing(self.path):
                    self._append([key, self._answers[key]])
            answers += self._answers[key]
        return [tuple(answer) if isinstance(answer, list) else answer for answer in answers]

    def _append(self, line: Any) -> None:
        data = memoryview((json.dumps(line) + "\n").encode())
        while data:
            data = data[self._file.write(data) :]
