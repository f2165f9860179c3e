"""Writes the model card of a trained student."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from transformers import PreTrainedConfig

from deltanet_convert.views.card_header import Metric, card_header, licence_note, licence_of
from deltanet_hf.mixers import LayerKind
from deltanet_hf.models.layers import LayerTable
from deltanet_hf.models.qwen3_5 import MODEL_TYPE
from deltanet_hf.version import install_command
from deltanet_recipes.schema import Recipe, Stage, stage_name
from deltanet_recipes.training.logbook import layer_errors
from deltanet_recipes.training.model_pair import teacher_of


def write_card(
    folder: Path,
    recipe: Recipe,
    rows: list[dict[str, Any]],
    data: list[dict[str, Any]],
    config: PreTrainedConfig,
) -> None:
    """Write README.md: teacher, tokens, hours, held-out figures, data, the recipe and the licence.

    Args:
        recipe: with the stages that the model was trained by.
        rows: the log of the run.
        data: the reports of the corpora.
        config: the student's.
    """
    teacher = teacher_of(recipe).name
    title = Path(teacher).name if Path(teacher).exists() else teacher
    imported = config.model_type == MODEL_TYPE
    new = _new_mixers(config)
    if imported:
        heading = _imported(Path(recipe.student).name, title)
    else:
        heading = _converted(title, " and ".join(mixer.title for mixer in new) or "Windowed")
    linear = ["linear-attention"] if any(not mixer.keeps_all_tokens for mixer in new) else []
    tags = [*(mixer.name.replace("_", "-") for mixer in new), *linear, "distillation"]
    student = Path(recipe.student)
    metrics, licence = _metrics(rows, recipe.stages[-1]), licence_note(student.name if imported else title, student)
    header = card_header(
        heading[0].removeprefix("# "),
        tags,
        licence=licence_of(student),
        base_model=None if Path(teacher).exists() or imported else teacher,
        measured_on="held-out part of the training data",
        metrics=metrics,
    )
    lines = [
        header,
        "",
        *heading,
        "",
        "| stage | tokens | hours | held out before | held out after |",
        "|---|---|---|---|---|",
    ]
    hours_total = 0.0
    for stage in recipe.stages:
        label = stage_name(stage)
        own = [row for row in rows if row["stage"] == label or row["stage"].startswith(f"{label}.")]
        seconds: dict[str, float] = {}
        for row in own:
            seconds[row["stage"]] = row["seconds"]
        hours = sum(seconds.values()) / 3600
        hours_total += hours
        evaluated = [row for row in own if any(key.startswith("held_out.") for key in row)]
        before, after = (_figures(evaluated[0]), _figures(evaluated[-1])) if evaluated else ("", "")
        errors = layer_errors(own)
        if errors[0]:
            before, after = (f"error {fmean(of_layers.values()):.4g}" for of_layers in errors)
        lines.append(f"| {label} | {stage.steps * stage.batch_tokens:,} | {hours:.3f} | {before} | {after} |")
    tokens = sum(stage.steps * stage.batch_tokens for stage in recipe.stages)
    lines += ["", f"In all {tokens:,} training tokens and {hours_total:.2f} device hours per process.", "", "Data:"]
    for report in data:
        source = report["source"]
        if source["recall"] is not None:
            share = f"weight {source['weight']:g}"
            lines.append(f"- synthetic recall rows ({', '.join(source['recall']['formats'])}), {share}")
            continue
        lines.append(f"- {source['hub'] or Path(source['path']).name}: {report['tokens']:,} tokens tokenised")
        if report["decontaminated_against"]:
            lines.append(
                f"  ({report['documents_contaminated']} of {report['documents_read']} documents dropped for sharing "
                f"13 tokens with {', '.join(report['decontaminated_against'])})"
            )
    settings = recipe.model_dump(mode="json", exclude_unset=True)
    lines += ["", "Recipe (`recipe.json` has every value):", "", "```yaml"]
    lines += [yaml.safe_dump(settings, sort_keys=False).rstrip(), "```", ""]
    lines += ["## Licence", "", licence, ""]
    (folder / "README.md").write_text("\n".join(lines), encoding="utf-8")


def _metrics(rows: list[dict[str, Any]], last_stage: Stage) -> list[Metric]:
    """The figures of the last evaluation of the last stage."""
    label = stage_name(last_stage)
    evaluated = [row for row in rows if row["stage"] == label and "held_out.kl" in row]
    if not evaluated:
        return []
    last = evaluated[-1]
    names = {
        "perplexity": ("perplexity", "perplexity"),
        "kl": ("kl_divergence", "KL divergence from the teacher, nats per token"),
    }
    return [Metric(*names[key], last[f"held_out.{key}"]) for key in names if f"held_out.{key}" in last]


def _new_mixers(config: PreTrainedConfig) -> list[type[LayerKind]]:
    """The mixers of the student's layers with weights that the teacher does not have, each once."""
    kinds = LayerTable.of(config).converted.values()
    return list(dict.fromkeys(kind.rule for kind in kinds if kind.has_new_weights))


def _converted(teacher: str, mixers: str) -> list[str]:
    return [
        f"# {mixers} student of {teacher}",
        "",
        "Converted and distilled with deltanet-hf; `conversion.json` says how it was converted. Load it after",
        f"`{install_command()}`",
        "with `AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)`.",
    ]


def _imported(student: str, teacher: str) -> list[str]:
    return [
        f"# {student}, trained with {teacher} as its teacher",
        "",
        "A Qwen3.5 text model with the weight names of deltanet-hf, which trained it. Load it after",
        f"`{install_command()}`",
        "with `AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)`;",
        "`deltanet-hf export` converts it back for other runtimes.",
    ]


def _figures(row: dict[str, Any]) -> str:
    names = [name for name in ("kl", "perplexity") if f"held_out.{name}" in row]
    return ", ".join(f"{name} {row[f'held_out.{name}']:.4g}" for name in names)
