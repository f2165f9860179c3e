"""How much of the teacher a model keeps, corrected for guessing."""

from __future__ import annotations

import math

from deltanet_hf.evaluation.harness import TaskResult
from deltanet_hf.evaluation.scores import Score
from deltanet_hf.evaluation.suite import SuiteTask


def percent_of_teacher(
    student: dict[str, TaskResult], teacher: dict[str, TaskResult], tasks: list[SuiteTask]
) -> Score | None:
    """Mean over tasks of (student - chance) / (teacher - chance), in percent.

    Tasks whose teacher is not two standard errors above chance say nothing about what was kept and are left out;
    None if that leaves none. Both models answered the same items, so the error uses the paired difference (delta
    method); `items` counts tasks.
    """
    ratios: list[float] = []
    variances: list[float] = []
    for task in tasks:
        if not task.averaged:
            continue
        taught, learnt = teacher[task.name].samples, student[task.name].samples
        count = len(taught)
        margin = taught.mean() - task.chance
        if count < 2 or margin <= 2 * taught.std(ddof=1) / math.sqrt(count):
            continue
        ratio = (learnt.mean() - task.chance) / margin
        influence = ((learnt - task.chance) - ratio * (taught - task.chance)) / margin
        ratios.append(float(ratio))
        variances.append(float(influence.var(ddof=1)) / count)
    if not ratios:
        return None
    mean = sum(ratios) / len(ratios)
    return Score(100 * mean, 100 * math.sqrt(sum(variances)) / len(ratios), len(ratios))
