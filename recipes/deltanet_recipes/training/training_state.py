"""Checkpoints of a stage, from which a killed run continues with the same losses."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from deltanet_hf.errors import UserError, one_line
from deltanet_recipes.training.runtime import Runtime

_OPTIONS = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
_LOAD = StateDictOptions(full_state_dict=True, strict=False, ignore_frozen_params=True)


class Checkpoints:
    """Writes and reads `FOLDER/step-N`: trained weights and optimiser state (weights.pt), the rest (state.json).

    A checkpoint is written under a temporary name and then renamed, so that a visible checkpoint is complete. Only the
    last `keep` are kept.
    """

    def __init__(self, folder: Path, keep: int, runtime: Runtime) -> None:
        self.folder, self.keep, self.runtime = folder, keep, runtime

    def save(
        self, step: int, module: nn.Module, optimizers: list[torch.optim.Optimizer], state: dict[str, Any]
    ) -> None:
        model_state, optimizer_state = get_state_dict(module, optimizers, options=_OPTIONS)
        if self.runtime.main:
            target = self.folder / f"step-{step:08d}"
            partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
            partial.mkdir(parents=True)
            trained = {name for name, p in module.named_parameters() if p.requires_grad}
            weights = {name: tensor for name, tensor in model_state.items() if name in trained}
            torch.save({"model": weights, "optimizer": optimizer_state}, partial / "weights.pt")
            (partial / "state.json").write_text(json.dumps({"step": step, **state}))
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)
            for old in self._complete()[: -self.keep]:
                shutil.rmtree(old)
        self.runtime.barrier()

    def last(self) -> Path | None:
        """The folder of the latest complete checkpoint."""
        complete = self._complete()
        return complete[-1] if complete else None

    def load(self, folder: Path, module: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
        """Set weights and optimiser state to those of a checkpoint and return the content of its state.json.

        Raises UserError if the checkpoint cannot be read.
        """
        try:
            saved = torch.load(folder / "weights.pt", map_location="cpu", weights_only=True)
            state = json.loads((folder / "state.json").read_text())
        except Exception as error:  # a damaged file raises errors of many types; code in it is refused, not run
            reason = one_line(error, 200)
            raise UserError(
                f"{folder}: checkpoint cannot be read ({reason}); delete it to use the one before"
            ) from None
        set_state_dict(
            module,
            optimizers,
            model_state_dict=saved["model"],
            optim_state_dict=saved["optimizer"],
            options=_LOAD,
        )
        return state  # type: ignore[no-any-return]

    def clear(self) -> None:
        """Remove all checkpoints, after the stage was finished and saved elsewhere."""
        if self.runtime.main:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.runtime.barrier()

    def _complete(self) -> list[Path]:
        found = self.folder.glob("step-*") if self.folder.is_dir() else []
        return sorted(path for path in found if not path.name.endswith(".partial"))
