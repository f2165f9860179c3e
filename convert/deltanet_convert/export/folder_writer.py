"""Writes a model folder tensor by tensor through `deltanet_hf.publish`: a killed run can be resumed at any point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from deltanet_hf.publish import Workspace, publish_folder

from ..storage.shard_writer import Layout, ShardWriter
from .rewrite import Named

Progress = Callable[[int, int], None]  # called with the numbers of finished steps and of all steps
Step = tuple[str, Callable[[], Named]]  # name of a step and the tensors that it yields


def write_folder(
    out: Path,
    request: dict[str, Any],
    layout: Layout,
    steps: Sequence[Step],
    complete: Callable[[Path], None],
    *,
    resume: bool,
    overwrite: bool,
    progress: Progress,
    finished: Callable[[], bool] = lambda: False,
    what: str = "export",
) -> None:
    """Writes the tensors of all steps, then the other files by `complete(folder)`, then publishes the folder as OUT.

    Args:
        request: JSON value of everything that the result depends on.
        layout: every tensor of the output; the steps together must yield each of them.
        steps: units of work; a resumed run repeats at most one of them.
        finished: called with `resume` when no run was interrupted; True if OUT already holds exactly this result.
        what: noun for the work in error messages.

    Raises:
        UserError: see `publish_folder`.
        ValueError: a step yields a tensor of another shape than in the layout, or the steps leave one out.
    """

    def fill(workspace: Workspace) -> dict[str, Any]:
        _write(workspace, layout, steps, progress)
        complete(workspace.model)
        return {}

    publish_folder(
        out,
        request,
        fill,
        resume=resume,
        overwrite=overwrite,
        finished=lambda: {} if finished() else None,
        what=what,
    )


def _write(workspace: Workspace, layout: Layout, steps: Sequence[Step], progress: Progress) -> None:
    writer = ShardWriter(workspace.model, layout)
    writer.prepare()
    written = {name for figures in workspace.steps.values() for name in figures["tensors"]}
    for done, (step, tensors) in enumerate(steps, start=1):
        if step not in workspace.steps:
            names = []
            for name, tensor in tensors():
                if tuple(tensor.shape) != layout.specs[name].shape:
                    raise ValueError(f"{name}: shape {tuple(tensor.shape)}, expected {layout.specs[name].shape}")
                writer.write(name, [tensor])
                names.append(name)
            writer.sync()
            workspace.done(step, {"tensors": names})
            written |= set(names)
        progress(done, len(steps))
    if missing := sorted(set(layout.specs) - written):
        raise ValueError(f"never written: {missing}")
    writer.finish()
