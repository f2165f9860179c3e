"""Prints a results file as a Markdown table: `python tools/results_table.py FILE`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

COLUMNS = {
    "wt2": "wt2.perplexity",
    "held-out Wikipedia": "heldwiki.perplexity",
    "KL to teacher": "heldwiki.kl",
    "other domain": "anarchism.perplexity",
    "exact repeat": "repeat.perplexity",
    "last word, seen": "lastword.seen",
    "last word, any": "lastword.any",
}


def markdown(rows: list[dict[str, Any]]) -> str:
    """One line per run: tokens, seconds, and every metric with its standard error."""
    lines = [
        "| run | tokens | seconds | " + " | ".join(COLUMNS) + " |",
        "|---|---|---|" + "---|" * len(COLUMNS),
    ]
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['run']} | failed: {row['error']} |" + " |" * (1 + len(COLUMNS)))
            continue
        cells = [row["run"], f"{row['tokens']:,}", f"{row['seconds']:.0f}" if row.get("seconds") else "-"]
        for key in COLUMNS.values():
            value, stderr = row["metrics"][key]["value"], row["metrics"][key]["stderr"]
            if key.startswith("lastword"):
                cells.append(f"{100 * value:.1f}% ± {100 * stderr:.1f}")
            elif key.endswith("kl"):
                cells.append(f"{value:.3f} ± {stderr:.3f}")
            else:
                cells.append(f"{value:.2f} ± {stderr:.2f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(
    results: Annotated[Path, typer.Argument(help="JSON file of results.")],
) -> None:
    """Print the table of a results file."""
    typer.echo(markdown(json.loads(results.read_text())))


if __name__ == "__main__":
    typer.run(main)
