"""The training loop that all stages share."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from deltanet_hf.errors import QualityError, UserError, one_line
from deltanet_recipes.schema import StageBase
from deltanet_recipes.schema_sections import Log
from deltanet_recipes.training.estimate import LESS_MEMORY
from deltanet_recipes.training.feeds import micro_batch_rows
from deltanet_recipes.training.logbook import Logbook
from deltanet_recipes.training.microstep import MicroStep
from deltanet_recipes.training.objectives import Objective
from deltanet_recipes.training.optim import make_optimizers, parameter_groups, rate_factor, set_rates
from deltanet_recipes.training.runtime import Runtime
from deltanet_recipes.training.training_state import Checkpoints

DIVERGED = 5.0  # times the best mean loss of a log interval that end a run
NO_LOSS = 1e-4  # rounding errors of a student that equals its teacher, or 0 for a step in which no token is scored
WORSE = 1.1  # times the held-out loss at the start of a stage; while rates are high, good runs rise a little
HELD_OUT_LOSS = "held_out.loss"


class Feed(Protocol):
    """The source of a stage's batches. A resumed run sets `state` to continue where the checkpoint was written."""

    state: Any

    def step(self) -> list[Any]:
        """The micro-batches of the next optimiser step that this process works on."""


class Trainer:
    """Trains the parameters of `objective` that require gradients.

    Args:
        label: name of the stage in the log.
        evaluate: returns figures on held-out rows by name, the same on every process.
        folder: folder of the stage's checkpoints.
        steps_before: optimiser steps of this run before the stage, for the log.
    """

    def __init__(
        self,
        label: str,
        stage: StageBase,
        log: Log,
        runtime: Runtime,
        objective: Objective,
        feed: Feed,
        evaluate: Callable[[], dict[str, float]],
        logbook: Logbook,
        folder: Path,
        steps_before: int,
    ) -> None:
        self.label, self.stage, self.log, self.runtime = label, stage, log, runtime
        self.objective, self.feed, self.evaluate, self.logbook = objective, feed, evaluate, logbook
        self.parameters = [p for p in objective.parameters() if p.requires_grad]
        fused = runtime.device.type == "cuda"
        self.optimizers = make_optimizers(parameter_groups(objective, stage.optimizer), fused)
        self.checkpoints = Checkpoints(folder, log.keep, runtime)
        self.steps_before = steps_before
        self.step, self.seconds = 0, 0.0
        self.best = math.inf
        self.held_out_start: float | None = None
        self.held_out_last: float | None = None
        alone = micro_batch_rows(stage, runtime.world) >= stage.rows_per_step // runtime.world
        self._micro = MicroStep(runtime, objective, self.parameters, alone)

    def run(self) -> None:
        """Do all remaining steps.

        Raises:
            QualityError: the loss diverges, or the student is worse on held-out rows than at the start of the stage.
            UserError: the GPU's memory is too small.
            KeyboardInterrupt: the user wants the run to end. In all cases, the last checkpoint is good.
        """
        self._resume()
        if self.runtime.interrupts.requested:  # after the last step of the stage or layer before
            raise KeyboardInterrupt(f"{self.label}: stopped before step {self.step + 1}")
        self.logbook.begin(self.label, self.stage.steps, self.step)
        try:
            if self.step == 0:
                held_out = self._held_out()
                self.held_out_start = held_out.get(HELD_OUT_LOSS)
                self._write_row({}, 0, 0.0, held_out)
            self._check_held_out()
            self._loop()
        except torch.OutOfMemoryError as error:
            said = one_line(error).partition(" GPU ")[0]
            raise UserError(f"{self.label}: {said} To go on, {LESS_MEMORY} and run the command again") from error
        finally:
            self.logbook.end()

    def _loop(self) -> None:
        totals: torch.Tensor | None = None
        since, began = 0, time.perf_counter()
        while self.step < self.stage.steps:
            metrics, norm = self.optimiser_step()
            self.step += 1
            since += 1
            values = torch.cat([metrics, norm.reshape(1)])
            totals = values if totals is None else totals + values
            done = self.step == self.stage.steps
            evaluate = done or self.step % self.log.evaluate_every == 0
            interrupted = not done and self.runtime.interrupts.requested
            save = interrupted or (not done and self.step % self.log.checkpoint_every == 0)
            self.logbook.tick(self.label, self.step, self.stage.steps)
            if not (evaluate or save or self.step % self.log.every == 0):
                continue
            means = self._means(totals, since)
            elapsed = time.perf_counter() - began
            self.seconds += elapsed
            self._check(means)
            if save or done:
                self._check_weights()
            held_out = self._held_out() if evaluate else {}
            self.held_out_last = held_out.get(HELD_OUT_LOSS, self.held_out_last)
            self._write_row(means, since, elapsed, held_out)
            if save or self._worse:
                self.checkpoints.save(self.step, self.objective, self.optimizers, self._state())
            self._check_held_out()
            if interrupted:
                raise KeyboardInterrupt(f"{self.label}: stopped after step {self.step}, with a checkpoint")
            totals, since, began = None, 0, time.perf_counter()

    def optimiser_step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Do one step; returns the metrics summed over this process's micro-batches and the gradient norm []."""
        set_rates(self.optimizers, rate_factor(self.step, self.stage))
        self._micro.begin()
        metrics: torch.Tensor | None = None
        for batch in self.feed.step():
            new = self._micro(batch)
            metrics = new if metrics is None else metrics + new
        assert metrics is not None
        self.runtime.sum_gradients(self.parameters)
        norm = nn.utils.clip_grad_norm_(self.parameters, self.stage.optimizer.clip)
        for optimizer in self.optimizers:
            optimizer.step()
        full = getattr(norm, "full_tensor", None)
        return metrics, norm if full is None else full()

    def _means(self, totals: torch.Tensor, since: int) -> dict[str, float]:
        values = totals / since
        values[:-1] = self.runtime.sum(values[:-1].clone())
        names = ["loss", *self.objective.metric_names, "grad_norm"]
        return dict(zip(names, values.tolist(), strict=True))

    def _check(self, means: dict[str, float]) -> None:
        loss, norm = means["loss"], means["grad_norm"]
        if not math.isfinite(loss) or loss > self.best * DIVERGED:
            self._diverged(f"loss {loss:.4g}, best {self.best:.4g}")
        if not math.isfinite(norm):
            self._diverged(f"loss {loss:.4g}, but the norm of its gradient is {norm:.4g}")
        if loss > NO_LOSS:
            self.best = min(self.best, loss)

    def _check_weights(self) -> None:
        """Finds what an update has spoilt although its gradients were finite, before the weights are saved."""
        bad = torch.stack([(~_local(p).isfinite()).any() for p in self.parameters]).any().float()
        if float(self.runtime.sum(bad)):
            self._diverged("a trained weight is not finite")

    def _diverged(self, how: str) -> NoReturn:
        last = self.checkpoints.last()
        kept = f"the last good checkpoint is {last}" if last else "no checkpoint had been written yet"
        raise QualityError(
            f"{self.label}: training diverged before step {self.step} ({how}); {kept}; lower optimizer.mixer_lr and "
            "rest_lr"
        )

    @property
    def _worse(self) -> bool:
        start, last = self.held_out_start, self.held_out_last
        if start is None or last is None:
            return False
        return self.log.stop_when_worse and last > WORSE * max(start, NO_LOSS)

    def _check_held_out(self) -> None:
        if not self._worse:
            return
        in_full = self.stage.optimizer.projection_lr is not None
        slower = "optimizer.mixer_lr and " + (
            "projection_lr, or train by adapters (without it)" if in_full else "rest_lr"
        )
        raise QualityError(
            f"{self.label}: training makes the student worse: the held-out loss was {self.held_out_start:.4g} at the "
            f"start of the stage and is {self.held_out_last:.4g} after step {self.step}; lower {slower}, with "
            f"another output; the same command with log.stop_when_worse=false goes on anyway"
        )

    def _held_out(self) -> dict[str, float]:
        return {f"held_out.{name}": value for name, value in self.evaluate().items()}

    def _write_row(self, means: dict[str, float], since: int, elapsed: float, held_out: dict[str, float]) -> None:
        errors = [value for name, value in means.items() if name.startswith("error.")]
        row = {
            "stage": self.label,
            "step": self.step,
            "total_steps": self.steps_before + self.step,
            "tokens": self.step * self.stage.batch_tokens,
            **means,
            **({"error": sum(errors) / len(errors)} if errors else {}),
            **held_out,
            "lr_factor": rate_factor(max(0, self.step - 1), self.stage),
            "tokens_per_second": since * self.stage.batch_tokens / elapsed if elapsed else 0.0,
            "seconds_per_step": elapsed / since if since else 0.0,
            "seconds": self.seconds,
            "memory_gib": self.runtime.peak_memory(),
        }
        self.logbook.write(row, self.stage.steps)

    def _state(self) -> dict[str, Any]:
        best = None if math.isinf(self.best) else self.best
        held_out = [self.held_out_start, self.held_out_last]
        return {"feed": self.feed.state, "seconds": self.seconds, "best": best, "held_out": held_out}

    def _resume(self) -> None:
        folder = self.checkpoints.last_intact(self.logbook.say)
        if folder is None:
            self.logbook.truncate(self.label, -1)  # rows of a run that was killed before its first checkpoint
            return
        state = self.checkpoints.load(folder, self.objective, self.optimizers)
        self.step, self.seconds = state["step"], state["seconds"]
        self.best = math.inf if state["best"] is None else state["best"]
        self.held_out_start, self.held_out_last = state["held_out"]
        self.feed.state = state["feed"]
        self.logbook.truncate(self.label, self.step)
        self.logbook.say(f"{self.label}: continues after step {self.step} from {folder}")


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter, or the part of it that this process holds."""
    part = getattr(parameter, "to_local", None)
    return parameter.detach() if part is None else part().detach()
