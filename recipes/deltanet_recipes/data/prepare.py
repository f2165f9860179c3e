"""Makes the data of a recipe: evaluation arrays, decontaminated corpora, a report of their counts, and the rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from deltanet_hf.data import prefix_ids, shipped_texts
from deltanet_hf.errors import UserError
from deltanet_hf.safe_write import write_atomically, writing
from deltanet_recipes.data.decontaminate import Contamination
from deltanet_recipes.data.evaluation_arrays import evaluation_arrays
from deltanet_recipes.data.packing import Mixture, split_streams
from deltanet_recipes.data.recall_rows import RecallStream
from deltanet_recipes.data.token_documents import JOINED
from deltanet_recipes.data.tokens import Corpus, load_corpus
from deltanet_recipes.schema import Recipe
from deltanet_recipes.schema_sections import Data, Source

REPORT = "data.json"


def separator_id(data: Data, tokenizer: PreTrainedTokenizerBase) -> int:
    """The token id that ends a document. Raises UserError if neither the recipe nor the tokenizer has one."""
    separator = data.separator if data.separator is not None else tokenizer.eos_token_id
    if separator is None:
        raise UserError("data.separator: the tokenizer has no end-of-text token; set the id of one")
    return int(separator)


def prepare_corpora(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, say: Callable[[str], None]) -> list[Corpus]:
    """The corpus of each source of text, from the cache where it is there. `say` is given a line per file.

    Raises UserError for sources that cannot be read, or are too small for their evaluation arrays.
    """
    data, separator = recipe.data, separator_id(recipe.data, tokenizer)
    cache = Path(data.cache) if data.cache else Path(recipe.output) / "tokens"
    with writing(cache):
        cache.mkdir(parents=True, exist_ok=True)
    sources = [source for source in data.sources if source.recall is None]
    sources = sources or [Source(path=str(path)) for path in shipped_texts()]
    named = Contamination(data.decontaminate, tokenizer) if data.decontaminate else None
    taken = []
    for source in sources:
        taken.append(evaluation_arrays(source, tokenizer, separator, cache, named))
        for array in taken[-1]:
            say(f"evaluation: {array['array']}: {array['windows']:,} windows of {array['window']:,} tokens")
    arrays = [array["array"] for arrays in taken for array in arrays]
    contamination = Contamination(arrays, tokenizer, named) if arrays else named
    joined = max(JOINED, *(stage.sequence_length for stage in recipe.stages))
    corpora = []
    for source, own in zip(sources, taken, strict=True):
        corpora.append(load_corpus(source, tokenizer, separator, cache, contamination, own, joined))
        say(_describe(corpora[-1]))
    return corpora


@dataclass
class RecipeData:
    """The rows of a recipe and the reports of their sources."""

    training: Mixture
    held_out: Mixture
    reports: list[dict[str, Any]]

    @classmethod
    def of(cls, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, say: Callable[[str], None]) -> RecipeData:
        """Arguments and errors are those of `prepare_corpora`."""
        data, separator = recipe.data, separator_id(recipe.data, tokenizer)
        corpora, prefix = prepare_corpora(recipe, tokenizer, say), prefix_ids(tokenizer)
        training, held_out = split_streams(corpora, data.holdout_tokens, recipe.seed, data.shuffle)
        recall = [
            RecallStream(source, tokenizer, training, [separator, *prefix], recipe.seed)
            for source in data.sources
            if source.recall is not None
        ]
        begin = next(iter(prefix), None)
        return cls(
            Mixture([*training, *recall], separator, data.isolate_documents, data.repeat, begin),
            Mixture(held_out, separator, data.isolate_documents, True, begin),
            [corpus.report for corpus in corpora] + [stream.report for stream in recall],
        )


def write_report(output: Path, reports: list[dict[str, Any]]) -> Path:
    """Write the reports of all sources into the output folder, and return the file."""
    path = output / REPORT
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(reports, indent=1) + "\n").encode())
    return path


def _describe(corpus: Corpus) -> str:
    report = corpus.report
    text = f"data: {corpus.label}: {report['tokens']:,} tokens in {report['documents']:,} documents"
    if report["documents_held_out"]:
        text += f"; {report['documents_held_out']:,} of {report['documents_read']:,} documents kept for evaluation"
    if report["decontaminated_against"]:
        text += (
            f"; {report['documents_contaminated']:,} of {report['documents_read']:,} documents dropped: they share "
            f"13 tokens with {', '.join(report['decontaminated_against'])}"
        )
    return text
