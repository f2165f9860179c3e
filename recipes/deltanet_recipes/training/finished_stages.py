"""The weights after each finished stage: `OUTPUT/stages/NN-NAME.safetensors`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from deltanet_hf.safe_write import remove, writing
from deltanet_recipes.training.checksums import is_intact, load_tensors, save_tensors
from deltanet_recipes.training.model_pair import gathered_on_cpu
from deltanet_recipes.training.runtime import Runtime


def save_stage(path: Path, student: PreTrainedModel, state: list[int], runtime: Runtime) -> None:
    """Save all float32 weights, which are those trained so far, and the positions in the data (`Mixture.state`)."""
    weights = {name: gathered_on_cpu(t) for name, t in student.state_dict().items() if t.dtype == torch.float32}
    if runtime.main:
        tied = set(getattr(student, "all_tied_weights_keys", None) or {})
        save_tensors(path, {name: t.contiguous().clone() for name, t in weights.items() if name not in tied}, state)
        remove(path.parent.parent / "checkpoints" / path.stem)
    runtime.barrier()


def load_stage(path: Path, student: PreTrainedModel) -> list[int]:
    """Set the student's weights to those of a finished stage, in float32, and return the positions in the data."""
    tensors, state = load_tensors(path)
    parameters = dict(student.named_parameters())
    for name, tensor in tensors.items():
        with torch.no_grad():
            parameters[name].data = tensor.to(parameters[name].device)
    return state  # type: ignore[no-any-return]


def finished_stages(paths: Sequence[Path], runtime: Runtime, say: Callable[[str], None]) -> int:
    """The number of stages, from the first, that need no more training, the same on every process.

    The file of a stage holds what the stages before it trained too, so the latest one that is intact decides. `say`
    gets a line about each later file, whose name then ends with `.damaged`.
    """
    return runtime.from_main(_finished(paths, say) if runtime.main else 0)


def _finished(paths: Sequence[Path], say: Callable[[str], None]) -> int:
    for number in range(len(paths), 0, -1):
        path = paths[number - 1]
        if is_intact(path, say, "the stage is trained again"):
            return number
        if path.is_file():
            with writing(path):
                path.replace(path.with_suffix(".damaged"))
    return 0
