"""Training and evaluation in Python: `distill` and `report` do what the commands of these names do."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def distill(recipe: str | Path, changes: Mapping[str, Any] | None = None, **keys: Any) -> Path:
    """Run all stages of a recipe; after an interruption, the same call continues the run.

    Examples:
        >>> from deltanet_recipes import distill
        >>> distill("smollm2-135m", {"stages.long.tokens": 10**7}, student="student")  # doctest: +SKIP

    Args:
        recipe: a YAML file, or the name of a shipped recipe.
        changes: values that replace those of the recipe, by their dotted keys.
        keys: the same for keys without dots: student, output, seed.

    Returns:
        The folder of the final model.

    Raises:
        UserError: the recipe, a model or the text cannot be used.
        QualityError: training diverges.
    """
    from deltanet_recipes.config import load_recipe
    from deltanet_recipes.training.pipeline import run

    overrides = {**(changes or {}), **keys}
    return run(load_recipe(recipe, [f"{key}={json.dumps(value, default=str)}" for key, value in overrides.items()]))


def report(
    teacher: str | Path,
    students: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    suite: str = "small",
    texts: Mapping[str, str | Path] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Compare a teacher, its students and training-free baselines; after an interruption, the same call continues.

    Examples:
        >>> from deltanet_recipes import report
        >>> texts = {"mine": "held-out.jsonl"}
        >>> report("SmolLM2-135M-Instruct", "run/final", "report", suite="texts", texts=texts)  # doctest: +SKIP

    Args:
        teacher: a folder or Hub id.
        students: one or several, each a folder or Hub id, or NAME=FOLDER.
        out: the folder for report.md, report.json and the figures.
        suite: small, full, texts, long, standard, ruler, completion, ifeval, code or gsm8k.
        texts: files on which perplexity and KL are measured, by name.
        options: further options of `deltanet-hf report`, among them data, windows, haystack, baselines (names), limit,
            max_length, device and dtype.

    Returns:
        The contents of report.json.

    Raises:
        UserError: a model, the suite or an input cannot be used.
    """
    from deltanet_hf.evaluation.report.material import ReportOptions
    from deltanet_hf.evaluation.report.write_report import run_report

    named = [str(student) for student in ([students] if isinstance(students, str | Path) else students)]
    places = {name: Path(options[name]) for name in ("data", "haystack") if options.get(name) is not None}
    files = {name: Path(file) for name, file in (texts or {}).items()}
    made = ReportOptions(str(teacher), named, Path(out), suite=suite, texts=files, **{**options, **places})
    return run_report(made, lambda line: None)
