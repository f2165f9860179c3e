"""The window beside a state: the layer's output against its definition, prompts cut anywhere, packing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from deltanet_hf.mixers.layer.masks import sliding_window
from deltanet_hf.mixers.layer.mixer import Mixer
from deltanet_hf.mixers.layer.window_branch import WindowBranch
from support.tiny_models import tiny_student, tiny_teacher

pytestmark = pytest.mark.usefixtures("float64")

LENGTH = 20
HIDDEN = torch.randn(2, LENGTH, 32, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def close(ours: Any, expected: Any) -> None:
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)


class Layer:
    """The first layer of a tiny Llama student, with its rotary embedding."""

    def __init__(self, window: int = 5, sinks: int = 2, **changes: Any) -> None:
        self.model = tiny_student("llama", window=window, sinks=sinks, **changes).double()
        self.mixer: Mixer = self.model.model.layers[0].self_attn

    def __call__(self, x: torch.Tensor, positions: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        """x [B, T, 32] at positions [B, T], by default 0, 1, ... -> [B, T, 32]."""
        if positions is None:
            positions = torch.arange(x.shape[1])[None]
        return self.mixer(x, self.model.model.rotary_emb(x, positions), **kwargs)[0]

    def cache(self) -> DynamicCache:
        return DynamicCache(config=self.model.config)


def by_definition(
    branch: WindowBranch,
    inputs: tuple[torch.Tensor, ...],
    scale: float,
    window: int,
    sinks: int,
    family_window: int | None,
    softcap: float | None,
    sequence: torch.Tensor,
) -> torch.Tensor:
    """The formula of the module's docstring, with masks [T, T]; `sequence` [T] is the number of each token's own."""
    logits, q, k, v, far = inputs
    place = torch.arange(len(sequence))
    number = place - (sequence[:, None] == sequence).int().argmax(1)  # of each token in its sequence, from 0
    distance = place[:, None] - place
    teacher = (distance >= 0) & (sequence[:, None] == sequence)
    if family_window is not None:
        teacher &= distance < family_window
    seen = teacher & ((distance < window) | (number < sinks))
    k, v = (part.repeat_interleave(q.shape[2] // part.shape[2], dim=2) for part in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~seen, -torch.inf)
    near = torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v)
    missed = (teacher & ~seen).sum(-1)[:, None]
    logit = logits + branch.slopes.far_slope * missed.clamp(min=1).double().log()
    share = (logit - branch.slopes.near_slope * scores.logsumexp(-1).transpose(1, 2)).sigmoid() * (missed > 0)
    return near + share.unsqueeze(-1) * (far - near)


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "changes", "packed"),
    [
        ("llama", {}, False),
        ("llama", {}, True),
        ("llama", {"expand_kv": False, "k_offset": False}, False),
        ("llama", {"shared_kv": True, "conv_size": 0, "qk_activation": "silu"}, True),
        ("llama", {"mixer": "deltaproduct"}, True),
        ("granite", {"expand_kv": False}, False),
        ("gemma2", {"expand_kv": False}, False),
        ("gemma2", {"expand_kv": False}, True),
        ("gemma3_text", {"expand_kv": False}, True),
        ("mistral", {}, False),
        ("mistral", {}, True),
        ("olmo3", {}, False),
        ("phi3", {}, True),
    ],
    ids=str,
)
def test_the_output_is_that_of_the_definition(family: str, changes: dict[str, Any], packed: bool) -> None:
    """In every layer of the model. A family's own window of 8 hides the sinks; packed sequences may have one token."""
    model = tiny_student(family, window=5, sinks=2, **changes).double()
    teacher = tiny_teacher(family)
    calls: dict[int, tuple[Any, Any]] = {}
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.window_branch.register_forward_hook(
            lambda _, inputs, output, index=index: calls.__setitem__(index, (inputs[:5], output[0]))
        )
    boundaries = [0, 1, 3, 7, LENGTH] if packed else [0, LENGTH]
    sequence = torch.repeat_interleave(torch.tensor(boundaries).diff())
    ids = torch.randint(3, 97, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    model(ids, use_cache=False, **({"cu_seq_lens_q": torch.tensor(boundaries, dtype=torch.int32)} if packed else {}))
    assert len(calls) == len(model.model.layers)
    for index, (inputs, output) in calls.items():
        family_window = sliding_window(teacher.config, index)
        sinks = 2 if family_window is None else 0
        branch = model.model.layers[index].self_attn.window_branch
        attention = teacher.model.layers[index].self_attn
        softcap = getattr(attention, "attn_logit_softcapping", None)
        assert (softcap is not None) == (family == "gemma2")
        close(output, by_definition(branch, inputs, attention.scaling, 5, sinks, family_window, softcap, sequence))


SIZES = [(5, 2), (1, 0), (1, 3), (3, 6), (17, 3), (30, 4)]


def splits(window: int, sinks: int) -> list[tuple[int, ...]]:
    """Ways to cut the tokens: behind every token, one by one, and in three around the edges of the window."""
    if (window, sinks) != SIZES[0]:
        first = {edge + by for edge in (sinks, window, window + sinks) for by in (0, 1)} & set(range(1, LENGTH))
        return [(one, LENGTH - one) for one in sorted(first)]
    in_three = [(window - 1, 2), (window, sinks + 1), (window + sinks, window), (1, window + sinks)]
    return [
        *((one, LENGTH - one) for one in range(1, LENGTH)),
        *((one, two, LENGTH - one - two) for one, two in in_three),
        (1,) * LENGTH,
    ]


@torch.no_grad()
@pytest.mark.parametrize(("window", "sinks"), SIZES)
def test_however_a_prompt_is_cut_the_output_and_the_cache_are_the_same(window: int, sinks: int) -> None:
    layer = Layer(window, sinks, expand_kv=False)
    whole, positions = layer.cache(), torch.arange(LENGTH)[None]
    wanted = layer(HIDDEN, past_key_values=whole)
    close(layer(HIDDEN), wanted)
    for split in splits(window, sinks):
        cache = layer.cache()
        parts = zip(HIDDEN.split(split, dim=1), positions.split(split, dim=1), strict=True)
        close(torch.cat([layer(x, part, past_key_values=cache) for x, part in parts], dim=1), wanted)
        close(cache.layers[0].state, whole.layers[0].state)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("window", "sinks"), [(5, 2), (1, 3)])
def test_however_a_padded_prompt_is_cut_its_rows_are_those_alone(window: int, sinks: int, side: str) -> None:
    """Padding in front of a row, or between its tokens, with and without a convolution; it is not all zeros."""
    layer = Layer(window, sinks, conv_size=4 if window == 5 else 0)
    layer.mixer.window_branch.softcap = 0.5
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, slice(0, 4) if side == "left" else slice(9, 13)] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    alone = layer(HIDDEN[:1][mask[:1].bool()][None])
    other = layer(HIDDEN[1:])
    for first in (3, 4, 5, 4 + window, 4 + window + sinks, 13):
        cache, found = layer.cache(), []
        for part in (slice(0, first), slice(first, LENGTH)):
            seen = mask[:, : part.stop]
            found.append(layer(HIDDEN[:, part], positions[:, part], attention_mask=seen, past_key_values=cache))
        both = torch.cat(found, dim=1)
        close(both[:1][mask[:1].bool()][None], alone)
        close(both[1:], other)


@torch.no_grad()
@pytest.mark.parametrize(
    ("window", "sinks", "lengths"),
    [
        *((5, 4, lengths) for lengths in ([20], [1] * 20, [3, 1, 2, 1, 4, 9], [4, 16], [19, 1])),
        (2, 7, [1] * 20),
        (2, 7, [3, 1, 2, 1, 4, 9]),
        (30, 4, [3, 1, 2, 1, 4, 9]),
    ],
    ids=str,
)
def test_packed_sequences_shorter_than_the_sinks(window: int, sinks: int, lengths: list[int]) -> None:
    """Boundaries lie in the flattened rows: the first row packs `lengths`, the second is one sequence."""
    layer = Layer(window, sinks)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    boundaries = torch.tensor([0, *lengths, LENGTH]).cumsum(0).int()
    found = layer(HIDDEN, torch.cat([positions, torch.arange(LENGTH)[None]]), cu_seq_lens_q=boundaries)
    alone = torch.cat([layer(part) for part in HIDDEN[:1].split(lengths, dim=1)], dim=1)
    close(found, torch.cat([alone, layer(HIDDEN[1:])]))


@torch.no_grad()
@pytest.mark.parametrize("family", ["mistral", "olmo3", "gemma3_text"])
def test_a_window_as_wide_as_the_familys_own_leaves_nothing_to_the_state(family: str) -> None:
    model = tiny_student(family, window=9, sinks=2).double()
    ids = torch.randint(3, 97, (1, 24), generator=torch.Generator().manual_seed(1))
    before = model(ids).logits
    sliding = [index for index in range(len(model.model.layers)) if sliding_window(model.config, index)]
    assert sliding
    for index in sliding:
        mixer = model.model.layers[index].self_attn
        assert (mixer.window_branch.window, mixer.window_branch.sinks) == (8, 0)
        assert mixer.state_shapes(torch.float32)["keys"].shape[1] == 8
        for part in (mixer.norm, mixer.window_branch.share_proj, mixer.b_proj):
            part.weight.mul_(-2.0)
    assert torch.equal(model(ids).logits, before)


@torch.no_grad()
def test_what_a_narrow_window_misses_ends_at_the_familys_own() -> None:
    branch = tiny_student("mistral", window=5, sinks=2).model.layers[0].self_attn.window_branch
    assert branch.unseen(torch.arange(1, 13)).tolist() == [0, 0, 0, 0, 0, 1, 2, 3, 3, 3, 3, 3]
    branch = tiny_student("llama", window=5, sinks=2).model.layers[0].self_attn.window_branch
    assert branch.unseen(torch.arange(1, 13)).tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5]
