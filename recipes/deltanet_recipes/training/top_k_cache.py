"""The teacher's K best log-probabilities for every row of a stage, cached on disk.

Training from the cache does not hold the teacher in memory.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from deltanet_hf.safe_write import replacing, reserve
from deltanet_recipes.data.packing import Mixture, Rows
from deltanet_recipes.schema import DistilBase
from deltanet_recipes.training.layer_runner import LayerRunner, document_boundaries
from deltanet_recipes.training.logbook import Logbook
from deltanet_recipes.training.losses import Head
from deltanet_recipes.training.model_pair import output_weight

CHUNK = 2048  # tokens whose logits are in memory at once while the cache is written


class TopKCache:
    """Reads a cache: ids [rows, L, K] (uint16 or int32) and log_probs [rows, L, K] (float16), for rows of L tokens.

    Rows are in the order of training. The held-out rows come last, so negative indices address them.
    """

    def __init__(self, folder: Path) -> None:
        self.ids = np.load(folder / "ids.npy", mmap_mode="r")
        self.log_probs = np.load(folder / "log_probs.npy", mmap_mode="r")

    def read(self, first: int, count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The ids [count*L, K] int64 and log_probs [count*L, K] float16 of `count` rows from row `first` on."""
        first %= len(self.ids)
        rows = slice(first, first + count)
        ids = torch.from_numpy(self.ids[rows].astype(np.int64)).flatten(0, 1)
        log_probs = torch.from_numpy(np.array(self.log_probs[rows])).flatten(0, 1)
        return ids.to(device), log_probs.to(device)


def cache_folder(parent: Path, stage: DistilBase, mixture: Mixture, teacher: str, seed: int) -> Path:
    """The folder of a stage's cache, named after everything that decides its content."""
    parts: list[Any] = [
        [stage.steps, stage.batch_tokens, stage.sequence_length, stage.top_k, teacher, seed],
        [stream.identity for stream in mixture.streams],
        [mixture.state, mixture.shares, mixture.isolate, mixture.separator],
    ]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
    return parent / f"top{stage.top_k}-{digest}"


@torch.no_grad()
def write_cache(
    folder: Path,
    teacher: nn.Module,
    stage: DistilBase,
    mixture: Mixture,
    held_out: Rows,
    device: torch.device,
    logbook: Logbook,
) -> None:
    """Run the teacher over all rows of the stage and over the held-out rows, and write the cache.

    The state of the mixture is restored afterwards.
    """
    assert stage.top_k is not None
    state = list(mixture.state)
    length, count = stage.sequence_length, stage.steps * stage.rows_per_step
    runner, head = LayerRunner(teacher), Head.of(teacher)
    vocabulary = output_weight(teacher).shape[0]
    k = min(stage.top_k, vocabulary)
    shape = (count + len(held_out), length, k)
    with replacing(folder) as partial:
        partial.mkdir(parents=True)
        ids = _new_array(partial / "ids.npy", np.uint16 if vocabulary <= 1 << 16 else np.int32, shape)
        log_probs = _new_array(partial / "log_probs.npy", np.float16, shape)
        per_pass = max(1, CHUNK // length)
        done = 0
        while done < len(ids):
            if done < count:
                rows = mixture.take(min(per_pass, count - done), length)
            else:
                rows = held_out[done - count : done - count + per_pass]
            rows = rows.to(device)
            hidden, _ = runner.run_layers(runner.embed(rows, document_boundaries(rows.position_ids)))
            for row, states in enumerate(hidden):
                for begin in range(0, length, CHUNK):
                    logits = head.logits(states[begin : begin + CHUNK], output_weight(teacher))
                    values, best = logits.log_softmax(-1).topk(k)
                    ids[done + row, begin : begin + CHUNK] = best.cpu().numpy().astype(ids.dtype)
                    log_probs[done + row, begin : begin + CHUNK] = values.half().cpu().numpy()
            done += len(rows)
        ids.flush()
        log_probs.flush()
    mixture.state = state
    logbook.say(f"cached the teacher's {k} best log-probabilities of {done * length:,} tokens in {folder}")


def _new_array(path: Path, dtype: type[np.generic], shape: tuple[int, ...]) -> np.memmap:
    """A new .npy file on a disk that has room for it, as a map."""
    array = np.lib.format.open_memmap(path, "w+", dtype, shape)
    reserve(path, path.stat().st_size)
    return array
