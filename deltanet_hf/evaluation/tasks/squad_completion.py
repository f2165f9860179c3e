"""The score of SQuAD completion."""

from __future__ import annotations

from typing import Any


def score(doc: dict[str, Any], results: list[str]) -> dict[str, int]:
    """Whether the model's text holds the answer, capital letters or not."""
    return {"contains": int(doc["value"].strip().lower() in results[0].lower())}
