"""Chooses key/value heads by trained gates: DuoAttention (Xiao et al., arXiv 2410.10819), a free baseline.

Command: `python -m measuring.study.duo_attention TEACHER TEXT.npy OUT.json --heads 27`. OUT is a selection file
as `deltanet-hf select` writes it.

Every key/value head has a gate a that begins at 1: its output is a full + (1 - a) window, before the output projection.
Only gates are trained, on long texts with passkeys and questions about all of them at the end. The loss is the mean
squared difference of the final hidden states from the teacher's on questions and answers, plus 0.05 times the mean
gate. The heads with the largest gates over the whole model keep everything.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from deltanet_convert.select.selection_file import Selection
from deltanet_convert.select.switchable import SwitchableModel
from deltanet_convert.select.units import Candidates
from deltanet_hf.data import prefix_ids
from deltanet_hf.errors import UserError
from deltanet_hf.exit_codes import run_command
from measuring.study.results_row import load_for_measure

WINDOW, SINKS = 256, 128  # in training
PENALTY, RATE = 0.05, 0.02
PASSKEYS, WORDS = 10, 32
SHORTEST = 1024  # tokens of a row
_WORDS = (
    *("acorn", "badge", "cedar", "delta", "ember", "flute", "grape", "hazel", "ivory", "jolly", "karma", "lemon"),
    *("maple", "north", "ocean", "piano", "quartz", "river", "solar", "tiger", "umber", "velvet", "willow", "yellow"),
)
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")


def passkey_row(
    tokenizer: PreTrainedTokenizerBase, text: np.ndarray, length: int, rng: random.Random
) -> tuple[list[int], int]:
    """Token ids of a row with passkeys at depths of 5 to 95%, and the place at which questions and answers begin.

    Args:
        text: token ids [n] of running text.
        length: tokens of the row.

    Raises UserError if the row or the text is too short.
    """

    def encode(words: str) -> list[int]:
        return list(tokenizer(words, add_special_tokens=False)["input_ids"])

    keys = [" ".join(rng.choices(_WORDS, k=WORDS)) for _ in _ORDINALS]
    facts = [encode(f"\nThe {name} passkey reads: {key}.\n") for name, key in zip(_ORDINALS, keys, strict=True)]
    asked = [encode(f"\nThe {name} passkey reads: {key}.") for name, key in zip(_ORDINALS, keys, strict=True)]
    rng.shuffle(asked)
    room = length - sum(map(len, facts)) - sum(map(len, asked)) - len(prefix_ids(tokenizer))
    if room < PASSKEYS or room > text.size:
        raise UserError(f"rows of {length} tokens with passkeys need a text of {room} >= {PASSKEYS} tokens")
    start = rng.randrange(text.size - room + 1)
    hay = text[start : start + room].tolist()
    depths = sorted(int(room * rng.uniform(0.05, 0.95)) for _ in facts)
    ids, begin = prefix_ids(tokenizer), 0
    for depth, fact in zip(depths, facts, strict=True):
        ids += hay[begin:depth] + fact
        begin = depth
    ids += hay[begin:]
    return [*ids, *(token for question in asked for token in question)], len(ids)


def train_gates(
    model: Any, tokenizer: PreTrainedTokenizerBase, text: np.ndarray, steps: int, longest: int, seed: int = 0
) -> Tensor:
    """Train one gate per layer and key/value head; returns them [L, KV] float32, 0 to 1.

    Args:
        model: a teacher in eval mode, which must not be used for anything else afterwards.
        steps: rows, of random lengths of up to `longest` tokens.
    """
    candidates = Candidates.of(model.config, "kv_head")
    model.requires_grad_(False)
    switchable = SwitchableModel(model, candidates, WINDOW, SINKS)
    device = model.device
    gates = torch.ones(len(switchable.layers), switchable.kv_heads, device=device, requires_grad=True)
    trained = torch.zeros_like(gates, dtype=torch.bool)
    for layer, head in candidates.units:
        trained[layer, head] = True
    optimizer = torch.optim.AdamW([gates], lr=RATE, weight_decay=0.0)
    rng = random.Random(f"{seed} duo")
    for _ in range(steps):
        length = rng.randint(min(SHORTEST, longest), longest)
        row, begin = passkey_row(tokenizer, text, length, rng)
        ids = torch.tensor([row], device=device)
        switchable.gates = None
        switchable.keep_all()
        with torch.no_grad():
            wanted = model.model(ids, use_cache=False).last_hidden_state[:, begin:]
        switchable.gates = gates
        got = model.model(ids, use_cache=False).last_hidden_state[:, begin:]
        loss = (got.float() - wanted.float()).square().mean() + PENALTY * gates[trained].abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            gates.clamp_(0, 1)
    return gates.detach().float().cpu()


def chosen_heads(gates: Tensor, candidates: Candidates, count: int) -> list[tuple[int, ...]]:
    """The `count` candidate heads with the largest gates, the largest first; equal ones by layer and head."""
    if not 0 < count <= len(candidates.units):
        raise UserError(f"--heads {count}: the model has {len(candidates.units)} key/value heads to choose from")
    return sorted(candidates.units, key=lambda unit: (-float(gates[unit]), unit))[:count]


def main(
    teacher: Annotated[str, typer.Argument(help="Folder of the teacher.")],
    text: Annotated[Path, typer.Argument(help=".npy file with token ids of running text.")],
    out: Annotated[Path, typer.Argument(help="Selection file to write.")],
    heads: Annotated[int, typer.Option(min=1, help="Number of key/value heads that keep everything.")],
    steps: Annotated[int, typer.Option(min=1, help="Rows to train on.")] = 2000,
    longest: Annotated[int, typer.Option(min=1, help="Tokens of the longest row.")] = 8000,
    seed: Annotated[int, typer.Option(min=0, help="Selects the rows.")] = 0,
) -> None:
    """Choose key/value heads by trained gates, and write them as a selection."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model: Any = load_for_measure(teacher, device)
    config = model.config
    tokens = np.load(text).astype(np.int64)
    candidates = Candidates.of(config, "kv_head")
    gates = train_gates(model, AutoTokenizer.from_pretrained(teacher), tokens, steps, longest, seed)
    order = chosen_heads(gates, candidates, heads)
    selection = Selection(
        teacher=Path(teacher).name,
        model_type=config.model_type,
        num_hidden_layers=config.num_hidden_layers,
        num_key_value_heads=config.num_key_value_heads,
        unit="kv_head",
        method="duo_attention",
        budget=f"{heads} key/value heads",
        seed=seed,
        kept=tuple(sorted(order)),
        order=tuple(order),
        scores={"gates": [[round(gate, 4) for gate in row] for row in gates.tolist()]},
        settings={"window": WINDOW, "sinks": SINKS, "steps": steps, "longest": longest},
    )
    out.write_text(json.dumps(selection.to_json(), indent=1) + "\n")
    typer.echo(f"{out}: {', '.join(f'{layer}.{head}' for layer, head in order)}")


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
