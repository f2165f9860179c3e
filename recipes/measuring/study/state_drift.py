"""Measures how errors of rounded states grow over long texts: python -m measuring.study.state_drift STUDENT TOKENS.npy

A converted model reads texts as one batch. What a layer hands to its rule in all of them is then one sequence, which
the rule decodes token by token, once per row of `state_rounding.SETTINGS`, in float32 arithmetic on a CPU. Errors
are those of the rule's outputs, relative to float32 states, as means over heads and tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from deltanet_hf.errors import UserError
from deltanet_hf.exit_codes import run_command
from deltanet_hf.mixers.cache.state import State
from deltanet_hf.mixers.layer.mix_call import MixCall
from measuring.markdown import lines
from measuring.study.results_row import load_for_measure
from measuring.study.state_rounding import SETTINGS, layers_with_states, texts_in, use_states

EARLY = 1024  # tokens


@torch.inference_mode()
def sequences(student: Any, layers: list[Any], texts: Tensor) -> list[MixCall]:
    """Read texts [B, T] int64 and return what each layer hands to its rule, as one sequence of B*T tokens.

    The layers are in the order of the model.
    """
    use_states(student, "float32", 0)
    calls: list[MixCall] = []
    for layer in layers:
        layer.mix = functools.partial(_recorded, calls, layer.mix)
    student.model(texts, use_cache=False)
    for layer in layers:
        del layer.mix
    return [call.in_one_row() for call in calls]


def _recorded(calls: list[MixCall], mix: Callable[[MixCall], Any], call: MixCall) -> Any:
    calls.append(call)
    return mix(call)


@torch.inference_mode()
def decoded(layer: Any, call: MixCall) -> Tensor:
    """The rule's outputs [T, heads, D] for a call of one row, token by token."""
    outputs: list[Tensor] = []
    state: State | None = None
    for t in range(call.q.shape[1]):
        at = slice(t, t + 1)
        gates = tuple(gate[:, at] for gate in call.gates)
        token = MixCall(call.q[:, at], call.k[:, at], call.v[:, at], gates, state=state, keep_state=True)
        output, state = layer.mix(token)
        outputs.append(output[0, 0])
    return torch.stack(outputs)


def main(
    student: Annotated[str, typer.Argument(help="Folder of a converted model.")],
    tokens: Annotated[Path, typer.Argument(help="Token array; the texts begin at equal distances in it.")],
    layers: Annotated[str, typer.Option(help="Layers, from 0.")] = "2,8,14,20,26",
    texts: Annotated[int, typer.Option(help="Texts.")] = 8,
    length: Annotated[int, typer.Option(help="Tokens of a text.")] = 4096,
) -> None:
    """Print a table with a row per layer: errors in the first 1,024 tokens and in the second half, %."""
    ids = texts_in(tokens, texts, length)
    model = load_for_measure(student, torch.device("cpu"))
    wanted, found = set(map(int, layers.split(","))), layers_with_states(model)
    if unknown := wanted - {layer.layer_idx for layer in found}:
        raise UserError(f"--layers: {sorted(unknown)} have no states in {student}")
    chosen = [layer for layer in found if layer.layer_idx in wanted]
    names, cells = list(SETTINGS)[1:], []
    for layer, call in zip(chosen, sequences(model, chosen, ids), strict=True):
        outputs = {}
        for name, setting in SETTINGS.items():
            use_states(model, *setting)
            outputs[name] = decoded(layer, call)
        exact = outputs["float32"]
        errors = {name: (outputs[name] - exact).norm(dim=-1) / exact.norm(dim=-1).clamp_min(1e-9) for name in names}
        parts = {name: (error[:EARLY].mean(), error[len(error) // 2 :].mean()) for name, error in errors.items()}
        half_lives = -torch.tensor(2.0).log() / call.gates[0][0].mean(0)
        cells.append([str(layer.layer_idx), f"{float(half_lives.max()):,.0f}"])
        cells[-1] += [f"{100 * float(early):.2f} / {100 * float(late):.2f}" for early, late in parts.values()]
    typer.echo(lines(("layer", "longest half-life, tokens", *names), cells))


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
