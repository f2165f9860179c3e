"""The state of what has left the window, against its definition in float64: every form, every rule that may delay."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from deltanet_hf.mixers import MIXERS
from deltanet_hf.mixers.layer import DeltaRule
from deltanet_hf.mixers.layer.mix_call import MixCall
from deltanet_hf.mixers.layer.mixer import Mixer
from support.float64 import Float64
from support.tiny_models import tiny_student

GROUP = 32
DELAYING = [name for name, kind in MIXERS.items() if issubclass(kind, DeltaRule) and kind.may_delay]


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with Float64():
        yield


def layer(mixer: str = "gated_deltanet", window: int = 33, **changes: Any) -> tuple[Any, Mixer]:
    """The first layer of a tiny Llama student whose weights all have an effect, with its model."""
    model = tiny_student("llama", mixer=mixer, window=window, delayed=True, k_offset=False, **changes).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.model.layers[0].self_attn.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model, model.model.layers[0].self_attn


def inputs(length: int, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, length, 32, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def by_definition(model: Any, mixer: Mixer, x: torch.Tensor) -> torch.Tensor:
    """Token by token: attention to what the window shows, the rule over what has left it, written one by one."""
    branch = mixer.window_branch
    assert branch is not None
    B, T, _ = x.shape
    angles = model.model.rotary_emb(x, torch.arange(T)[None])
    q, k, v = mixer.window_inputs(mixer.project(x), angles)
    flat = mixer.repeated(*(part.flatten(2) for part in (q, k, v)))
    if mixer.conv1d is not None:
        parts = flat if mixer.settings.conv_on == "qkv" else flat[1:2]
        convolved, _ = mixer.conv1d(parts, None, None, False, None)
        flat = tuple(convolved) if len(parts) == 3 else (flat[0], convolved[0], flat[2])
    rule_q, rule_k, rule_v = mixer.activated(*(mixer.split_heads(part) for part in flat))
    gates = mixer.gates(x, None)
    outputs, state, written = [], None, branch.sinks
    for t in range(T):
        left = max(0, (t // GROUP - branch.groups) * GROUP)
        while written < left:
            at = slice(written, written + 1)
            call = MixCall(
                rule_q[:, at], rule_k[:, at], rule_v[:, at], tuple(g[:, at] for g in gates), None, state, True
            )
            state, written = mixer.mix(call)[1], written + 1
        if state is None:
            far = torch.zeros(B, 1, mixer.num_heads, mixer.head_dim, dtype=x.dtype)
        else:  # a token that writes nothing and reads
            still = tuple(torch.zeros_like(g[:, :1]) for g in gates)
            far, _ = mixer.mix(MixCall(rule_q[:, t : t + 1], rule_k[:, :1] * 0, rule_v[:, :1] * 0, still, None, state))
        seen = sorted({*range(min(branch.sinks, t + 1)), *range(left, t + 1)})
        keys, values = (part[:, seen].repeat_interleave(mixer.num_heads // part.shape[2], 2) for part in (k, v))
        scores = torch.einsum("bhd,bshd->bhs", q[:, t], keys) * branch.scale
        near = torch.einsum("bhs,bshd->bhd", scores.softmax(-1), values)[:, None]
        far = mixer.gated_norm(far, mixer.output_gate(x[:, t : t + 1]))
        count = t + 1 - len(seen)
        lse = scores.logsumexp(-1)[:, None]
        logit = branch.share_proj(x[:, t : t + 1]) + branch.slopes.far_slope * math.log(max(count, 1))
        share = (logit - branch.slopes.near_slope * lse).sigmoid().unsqueeze(-1) * (count > 0)
        outputs.append(near + share * (far - near))
    return mixer.o_proj(torch.cat(outputs, 1).flatten(-2))


def close(ours: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(ours, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mixer", DELAYING)
def test_a_row_is_its_definition(mixer: str) -> None:
    model, kind = layer(mixer)
    x = inputs(140)
    angles = model.model.rotary_emb(x, torch.arange(140)[None])
    close(kind(x, angles)[0], by_definition(model, kind, x))


@pytest.mark.parametrize("changes", [{"window": 1}, {"window": 70}, {"conv_size": 0}, {"conv_on": "k"}, {"sinks": 0}])
def test_settings(changes: dict[str, Any]) -> None:
    model, kind = layer(**changes)
    x = inputs(140)
    angles = model.model.rotary_emb(x, torch.arange(140)[None])
    close(kind(x, angles)[0], by_definition(model, kind, x))
