"""WikiText-2 in its two forms: as distributed, with marks around punctuation, and as clean text."""

from __future__ import annotations

from pathlib import Path


def wikitext_texts(data: Path | None) -> dict[str, str]:
    """`wikitext2` (formatted, as distributed) and `wikitext2_clean` (lm-eval's detokeniser), if the folder has them.

    Reads `wikitext2/wiki.test.tokens`. The same words in two formats: a student that only learnt clean text shows it.
    """
    path = None if data is None else data / "wikitext2" / "wiki.test.tokens"
    if path is None or not path.is_file():
        return {}
    from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

    raw = path.read_text(encoding="utf-8")
    # Line by line: over the whole file the detokeniser would pair quotation marks of different paragraphs.
    clean = "\n".join(wikitext_detokenizer({"page": line}) for line in raw.splitlines())
    return {"wikitext2": raw, "wikitext2_clean": clean}
