"""Measures what a state in few bits costs: python -m measuring.study.state_rounding TEACHER TOKENS.npy

The state of DeltaNet with a constant decay (Gated DeltaNet, arXiv 2412.06464, equation 10) takes queries, keys and
values of a teacher's layers token by token in float64. After every so many tokens it is rounded: to bfloat16, or to 8
bits with one scale per row, to nearest or stochastically. The error is that of the output in the second half of the
text, relative to the output (root mean square). Those of 8 bits are multiples of that of bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor
from transformers import AutoModelForCausalLM

from deltanet_hf.exit_codes import run_command

LAYERS = (5, 12, 17, 23)
SETTINGS = ((30.0, 0.5), (300.0, 0.5), (3000.0, 0.5), (3000.0, 0.1))  # half-life in tokens, beta


def to_8_bits(state: Tensor, stochastic: bool = False) -> Tensor:
    """Round each row of a state [..., K, V] to 255 steps."""
    step = state.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return step * ((state / step + torch.rand_like(state)).floor() if stochastic else (state / step).round())


ROUNDINGS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "bfloat16": (lambda state: state.bfloat16().double(), 1),
    "8 bits": (to_8_bits, 1),
    "8 bits, stochastic": (lambda state: to_8_bits(state, stochastic=True), 1),
    **{f"8 bits, every {count} tokens": (to_8_bits, count) for count in (8, 16, 32)},
}


def heads_of(teacher: str, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys of unit length and values [T, H, D] of the key/value heads of LAYERS, in float64."""
    model: Any = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32).eval()
    found: list[list[Tensor]] = [[], [], []]

    def keep(attention: Any, _: Any, inputs: dict[str, Tensor]) -> None:
        x, repeats = inputs["hidden_states"][0], attention.num_key_value_groups
        parts = (x @ getattr(attention, name).weight.T for name in ("q_proj", "k_proj", "v_proj"))
        q, k, v = (part.unflatten(-1, (-1, attention.head_dim)).double() for part in parts)
        for part, heads in zip(found, (q[:, ::repeats], k, v), strict=True):
            part.append(heads)

    for layer in LAYERS:
        model.model.layers[layer].self_attn.register_forward_pre_hook(keep, with_kwargs=True)
    model(tokens[None], logits_to_keep=1)
    q, k, v = (torch.cat(part, 1) for part in found)
    return q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True), v


def errors(q: Tensor, k: Tensor, v: Tensor, half_life: float, beta: float) -> list[float]:
    """Relative errors of the output for each of ROUNDINGS."""
    states = torch.zeros(1 + len(ROUNDINGS), *q.shape[1:], v.shape[-1], dtype=torch.float64)  # [rounding, H, K, V]
    squares, decay = torch.zeros(len(states), dtype=torch.float64), 0.5 ** (1 / half_life)
    for at, (query, key, value) in enumerate(zip(q, k, v, strict=True)):
        states *= decay
        read = torch.einsum("rhkv,hk->rhv", states, key)
        states += key[..., None] * (beta * (value - read)).unsqueeze(-2)
        output = torch.einsum("rhkv,hk->rhv", states, query)
        if at >= len(q) // 2:
            squares += torch.cat([output[:1], output[1:] - output[:1]]).square().mean((1, 2))
        for index, (rounding, count) in enumerate(ROUNDINGS.values(), start=1):
            if (at + 1) % count == 0:
                states[index] = rounding(states[index])
    return (squares[1:] / squares[0]).sqrt().tolist()


@torch.no_grad()
def main(
    teacher: Annotated[str, typer.Argument(help="Folder of a Llama model.")],
    tokens: Annotated[Path, typer.Argument(help="Token array.")],
    count: Annotated[int, typer.Option(help="Tokens to read.")] = 4096,
) -> None:
    """Print a table: a row per half-life and beta, a column per rounding."""
    torch.manual_seed(0)
    heads = heads_of(teacher, torch.from_numpy(np.load(tokens)[:count].astype(np.int64)))
    print("| half-life, beta | bfloat16, relative error |", " | ".join(list(ROUNDINGS)[1:]), "|")
    print("|---" * (1 + len(ROUNDINGS)) + "|")
    for half_life, beta in SETTINGS:
        first, *others = errors(*heads, half_life, beta)
        ratios = " | ".join(f"{error / first:.1f}x" for error in others)
        print(f"| {half_life:g}, {beta} | {first:.3f} | {ratios} |", flush=True)


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
