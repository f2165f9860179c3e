"""Writes a model folder in steps through the converter's workspace: killed at any moment, it can be resumed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from deltanet_hf.errors import UserError
from deltanet_hf.publish import READY, Workspace
from deltanet_hf.safe_write import sync_folder, writing

from ..storage.shard_writer import Layout, ShardWriter
from .rewrite import Named

Progress = Callable[[int, int], None]  # steps done, steps in all
Step = tuple[str, Callable[[], Named]]


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
) -> None:
    """Writes the tensors of `steps` into OUT's shards, then everything else by `complete(folder)`, then publishes.

    Args:
        request: JSON value of everything that the result depends on.
        layout: every tensor of the output; the steps must write each of them.
        steps: name and tensors of each unit of work, what a resumed run repeats at most.
        finished: whether an OUT that is there holds just this result: then there is nothing to resume.
    """
    workspace = Workspace(out)
    if resume and not workspace.journal.exists() and finished():
        if workspace.folder.exists():  # killed by the last stroke of tidying up
            workspace.discard()
        return
    request = json.loads(json.dumps(request))
    with workspace.opened(request, resume=resume, overwrite=overwrite):
        if READY not in workspace.steps:
            try:
                _write(workspace, layout, steps, progress)
                complete(workspace.model)
            except UserError:
                if not workspace.steps:
                    workspace.discard()
                raise
            with writing(workspace.model):
                sync_folder(workspace.model)
            workspace.done(READY)
        workspace.publish()


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
