"""Checkpoints of a stage, from which a killed run continues with the same losses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from deltanet_hf.errors import UserError, one_line
from deltanet_hf.safe_write import remove, replacing, writing
from deltanet_recipes.training.checksums import Damaged, check_sums, write_sums
from deltanet_recipes.training.runtime import Runtime

WEIGHTS, STATE = "weights.pt", "state.json"
_OPTIONS = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
_LOAD = StateDictOptions(full_state_dict=True, strict=False, ignore_frozen_params=True)


class Checkpoints:
    """Writes and reads `FOLDER/step-N`: trained weights and optimiser state, the rest, and the SHA-256 of both files.

    A checkpoint is written under a temporary name and then renamed, so that a visible checkpoint is complete. Only the
    last `keep` are kept.
    """

    def __init__(self, folder: Path, keep: int, runtime: Runtime) -> None:
        self.folder, self.keep, self.runtime = folder, keep, runtime

    def save(
        self, step: int, module: nn.Module, optimizers: list[torch.optim.Optimizer], state: dict[str, Any]
    ) -> None:
        """Write a checkpoint. Raises UserError if the disk refuses it; those before it are kept."""
        model_state, optimizer_state = get_state_dict(module, optimizers, options=_OPTIONS)
        if self.runtime.main:
            trained = {name for name, p in module.named_parameters() if p.requires_grad}
            weights = {name: tensor for name, tensor in model_state.items() if name in trained}
            with replacing(self.folder / f"step-{step:08d}") as partial:
                partial.mkdir(parents=True)
                with (partial / WEIGHTS).open("wb") as file:  # a full disk is an OSError here, and none for a path
                    torch.save({"model": weights, "optimizer": optimizer_state}, file)
                (partial / STATE).write_text(json.dumps({"step": step, **state}))
                write_sums(partial, (WEIGHTS, STATE))
            for old in self._complete()[: -self.keep]:
                remove(old)
        self.runtime.barrier()

    def last(self) -> Path | None:
        """The folder of the latest checkpoint."""
        complete = self._complete()
        return complete[-1] if complete else None

    def last_intact(self, say: Callable[[str], None]) -> Path | None:
        """The folder of the latest checkpoint whose files are those that were written, the same on every process.

        Later ones are set aside under names that end with `.damaged`, and `say` gets a line about each.
        """
        return self.runtime.from_main(self._last_intact(say) if self.runtime.main else None)

    def _last_intact(self, say: Callable[[str], None]) -> Path | None:
        for folder in reversed(self._complete()):
            try:
                check_sums(folder, (WEIGHTS, STATE))
            except Damaged as problem:
                aside = folder.with_name(f"{folder.name}.damaged")
                with writing(aside):
                    remove(aside)
                    folder.rename(aside)
                say(f"{folder}: {problem}; it is set aside as {aside.name}, and the checkpoint before it is taken")
            else:
                return folder
        return None

    def load(self, folder: Path, module: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
        """Set weights and optimiser state to those of a checkpoint and return the content of its state.json.

        Raises UserError if the checkpoint cannot be read.
        """
        try:
            saved = torch.load(folder / WEIGHTS, map_location="cpu", weights_only=True)
            state = json.loads((folder / STATE).read_text())
        except Exception as error:  # a damaged file raises errors of many types; code in it is refused, not run
            reason = one_line(error, 200)
            raise UserError(
                f"{folder}: checkpoint cannot be read ({reason}); delete it to use the one before"
            ) from None
        for optimizer in optimizers:  # torch makes no state to be filled where an earlier stage has left gradients
            optimizer.zero_grad()
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
            remove(self.folder)
        self.runtime.barrier()

    def _complete(self) -> list[Path]:
        found = self.folder.glob("step-*") if self.folder.is_dir() else []
        return sorted(path for path in found if not path.suffix)
