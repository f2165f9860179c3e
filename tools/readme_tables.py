"""Rewrites the generated tables of Markdown files: `python tools/readme_tables.py README.md ...`.

A table is the text between `<!-- KIND: FILE ... -->` and `<!-- end of KIND -->`; what follows FILE is a note for the
reader. There are twelve kinds:

- results FILE: the rows of a results file (measuring.study.results_row).
- keys FILE: the keys of a recipe (FILE is not read).
- headline FILE: selected rows and columns of several results files and of the JSON files of `deltanet-hf report`.
  FILE is YAML, {results: [FILE, ...], reports: [FILE, ...], columns: [NAME, ...], rows: [{run, label}, ...]}, with
  paths relative to itself. Without `columns`, the table has all of them.
- hybrids FILE: trained rows beside the free policies of equal bytes (hybrids_table.py says what is in FILE).
- front FILE: rows of measuring.study.front with marks (front_table.py says what is in FILE).
- mixers FILE: the rows of a results file of measuring.study.mixer_row.
- lab FILE: the rows of a results file of measuring.lab.
- speed FILE: the rows of the results file of measuring.benchmarks.end_to_end.
- gpu FILE: the record of the last run of `make test-gpu`.
- data FILE: the counts that `deltanet-hf data` wrote.
- chips FILE, sizes FILE: the kernels and the sizes of `deltanet_kernels.gated_delta_rule.chips` (FILE is not read).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

import chips_table
import data_table
import front_table
import gpu_tests
import hybrids_table
import mixers_table
import recipe_keys
import results_table
import speed_table
from deltanet_hf.errors import UserError
from deltanet_hf.exit_codes import run_command
from measuring.lab import table as lab_table

BLOCK = re.compile(
    r"(<!-- (results|keys|headline|hybrids|front|mixers|lab|speed|gpu|data|chips|sizes): (\S+)[^\n]*-->\n)"
    r"(.*?)(<!-- end of \2 -->)",
    re.DOTALL,
)
METRICS = {
    "WikiText-2": ("wt2.perplexity", 1),
    "held-out Wikipedia": ("heldwiki.perplexity", 1),
    "KL to the teacher": ("heldwiki.kl", 3),
    "exact repeat": ("repeat.perplexity", 1),
}
NEEDLES = "needle_2048"


def rewritten(text: str, root: Path) -> str:
    """`text` with all generated tables made anew from their files, whose paths are relative to `root`."""

    def block(match: re.Match[str]) -> str:
        opening, kind, file, _, closing = match.groups()
        path = root / file
        if kind == "keys":
            table = recipe_keys.markdown()
        elif kind == "chips":
            table = chips_table.kernels()
        elif kind == "sizes":
            table = chips_table.sizes()
        elif kind == "results":
            table = results_table.markdown(json.loads(path.read_text()))
        elif kind == "mixers":
            table = mixers_table.markdown(json.loads(path.read_text()))
        elif kind == "speed":
            table = speed_table.markdown(json.loads(path.read_text())["rows"])
        elif kind == "gpu":
            table = gpu_tests.markdown(path)
        elif kind == "data":
            table = data_table.markdown(json.loads(path.read_text()))
        elif kind == "lab":
            table = lab_table.table(json.loads(path.read_text()))
        elif kind == "hybrids":
            table = hybrids_table.hybrids_table(path)
        elif kind == "front":
            table = front_table.front_table(path)
        else:
            table = headline(path)
        return f"{opening}{table}\n{closing}"

    return BLOCK.sub(block, text)


def headline(path: Path) -> str:
    """The table that a YAML file describes. Raises UserError if it names a run that is in no results file."""
    layout = yaml.safe_load(path.read_text())
    rows = {row["run"]: row for name in layout["results"] for row in json.loads((path.parent / name).read_text())}
    reports = [json.loads((path.parent / name).read_text()) for name in layout.get("reports", [])]
    models = {model["name"]: model for report in reports for model in report["models"]}
    columns = ["tokens trained", *METRICS, *(_report_columns(reports[0]) if reports else [])]
    shown = layout.get("columns", columns)
    lines = ["| | " + " | ".join(shown) + " |", "|---|" + "---|" * len(shown)]
    for entry in layout["rows"]:
        row = rows.get(entry["run"])
        if row is None or "error" in row:
            raise UserError(f"{path}: no measured run {entry['run']!r} in {', '.join(layout['results'])}")
        cells = [f"{row['tokens'] / 1e6:.1f}M" if row["tokens"] else "-"]
        cells += [_cell(row["metrics"].get(key), digits) for key, digits in METRICS.values()]
        cells += _report_cells(models.get(entry.get("report", entry["run"]))) if reports else []
        by_name = dict(zip(columns, cells, strict=True))
        lines.append(f"| {entry['label']} | " + " | ".join(by_name[name] for name in shown) + " |")
    return "\n".join(lines)


def _report_columns(report: dict[str, Any]) -> list[str]:
    return [f"% of teacher, {report['settings']['suite']} suite", "4 needles in 2,048 tokens, %"]


def _report_cells(model: dict[str, Any] | None) -> list[str]:
    """The scores of a model; dashes if it is in no report."""
    if model is None:
        return ["-", "-"]
    percent = None if model["kind"] == "teacher" else model["percent_of_teacher"]
    return ["100" if model["kind"] == "teacher" else _cell(percent, 1), _cell(model["recall"].get(NEEDLES), 1, 100)]


def _cell(score: dict[str, float] | None, digits: int, scale: float = 1.0) -> str:
    if score is None:
        return "-"
    return f"{scale * score['value']:.{digits}f} ± {scale * score['stderr']:.{digits}f}"


def main(
    files: Annotated[list[Path], typer.Argument(help="Markdown files; paths in them are relative to here.")],
) -> None:
    """Rewrite the generated tables of Markdown files."""
    for file in files:
        file.write_text(rewritten(file.read_text(encoding="utf-8"), Path()), encoding="utf-8")


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
