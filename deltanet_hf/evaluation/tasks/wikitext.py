"""WikiText-2 as distributed, with spaces and marks around punctuation, and as clean text."""

from __future__ import annotations

from pathlib import Path


def wikitext_texts(data: Path | None) -> dict[str, str]:
    """`wikitext2` (as distributed) and `wikitext2_clean` (after lm-eval's detokeniser) -> the text.

    Both come from the file `wikitext2/wiki.test.tokens` of the folder `data`; without it, the result is empty. They
    hold the same words, so their difference shows how a model that was trained on clean text copes with the format.
    """
    path = None if data is None else data / "wikitext2" / "wiki.test.tokens"
    if path is None or not path.is_file():
        return {}
    from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

    raw = path.read_text(encoding="utf-8")
    # Per line, because the detokeniser would otherwise pair quotation marks of different paragraphs.
    clean = "\n".join(wikitext_detokenizer({"page": line}) for line in raw.splitlines())
    return {"wikitext2": raw, "wikitext2_clean": clean}
