"""The tasks of the laboratory by name, each with the model and the training that it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from measuring.lab.recall import AssociativeRecall
from measuring.lab.tasks import Task
from measuring.lab.tracking import WordProblem
from measuring.lab.training import TrainSettings


@dataclass(frozen=True)
class Preset:
    """A task, and the settings that a call may change.

    Args:
        mixer_settings: settings of every mixer that has them.
        width: of the residual stream.
        head_dims: sizes of a head's state; one model is trained with each.
    """

    title: str
    task: Callable[[], Task]
    training: TrainSettings
    width: int
    head_dims: tuple[int, ...]
    layers: int = 1
    heads: int = 4
    mixer_settings: dict[str, Any] = field(default_factory=dict)


# Without a short convolution a layer knows of other tokens by its state alone. Recall does require one: it brings the
# key to the token of its value.
PRESETS = {
    "parity": Preset(
        "Parity: is the number of ones odd?",
        lambda: WordProblem("parity", 2),
        TrainSettings(1000, 1e-2, 2048, decay=0.1),
        64,
        (8,),
        mixer_settings={"conv_size": 0},
    ),
    "s3": Preset(
        "S3: running product of permutations of 3 points",
        lambda: WordProblem("s3", 3),
        TrainSettings(2000, 1e-2, 4096),
        64,
        (32,),
        heads=2,
        mixer_settings={"conv_size": 0},
    ),
    "s5": Preset(
        "S5: running product of permutations of 5 points",
        lambda: WordProblem("s5", 5),
        TrainSettings(10000, 3e-3, 32768, decay=0.1),
        128,
        (16,),
        heads=8,
        mixer_settings={"conv_size": 0},
    ),
    "mqar": Preset(
        "Recall of pairs (MQAR)",
        lambda: AssociativeRecall("mqar"),
        TrainSettings(4000, 5e-3, 16384),
        64,
        (8, 16, 32),
        layers=2,
        heads=2,
        mixer_settings={"conv_size": 4},
    ),
}
