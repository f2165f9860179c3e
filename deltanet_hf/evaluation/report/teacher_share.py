"""The chance-corrected share of the teacher's task scores that a model keeps."""

from __future__ import annotations

import math

from deltanet_hf.evaluation.measures.scores import Score
from deltanet_hf.evaluation.tasks.harness import TaskResult
from deltanet_hf.evaluation.tasks.suites import SuiteTask


def percent_of_teacher(
    student: dict[str, TaskResult], teacher: dict[str, TaskResult], tasks: list[SuiteTask]
) -> Score | None:
    """Mean over tasks of (student - chance) / (teacher - chance), in percent.

    Tasks in which the teacher is less than two standard errors above chance are left out, because they cannot show
    what the student kept; the result is None if no task remains. Both models answered the same items, so the error
    follows from the paired differences by the delta method. `items` counts tasks.

    Args:
        student, teacher: name of a task -> result.
    """
    ratios: list[float] = []
    variances: list[float] = []
    for task in tasks:
        if not task.averaged:
            continue
        taught, kept = teacher[task.name].samples, student[task.name].samples
        count = len(taught)
        margin = taught.mean() - task.chance
        if count < 2 or margin <= 2 * taught.std(ddof=1) / math.sqrt(count):
            continue
        ratio = (kept.mean() - task.chance) / margin
        influence = ((kept - task.chance) - ratio * (taught - task.chance)) / margin
        ratios.append(float(ratio))
        variances.append(float(influence.var(ddof=1)) / count)
    if not ratios:
        return None
    mean = sum(ratios) / len(ratios)
    return Score(100 * mean, 100 * math.sqrt(sum(variances)) / len(ratios), len(ratios))
