"""The window's softmax by the operator against the same by a mask, and the memory that both take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, PreTrainedModel

from deltanet_hf.mixers.attention import window_softmax
from deltanet_hf.models.restrict import restrict_to_window
from support.read_in_parts import read_in_parts
from support.tiny_models import tiny_teacher

LENGTH = 24
IDS = torch.randint(3, 97, (2, LENGTH), generator=torch.Generator().manual_seed(0))
Choose = Callable[[bool], None]


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Choose:
    """choose(True) sends every call of several tokens to the operator, choose(False) gives every call a mask.

    A single token, which is kept at the place of the one that leaves the window, always gets a mask.
    """

    def choose(operator: bool) -> None:
        monkeypatch.setattr(window_softmax, "operator_pays", lambda call, query: operator and query.shape[2] > 1)

    return choose


def windowed(family: str, window: int, sinks: int, **changes: Any) -> PreTrainedModel:
    return restrict_to_window(tiny_teacher(family, **changes), window, sinks)


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


# Windows within, at and beyond a family's own of 8, with fewer and more sinks than that, and longer than the text.
REACHES = [(5, 2), (5, 0), (1, 9), (8, 3), (40, 4)]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("family", "window", "sinks"),
    [("gemma2", *reach) for reach in REACHES]
    + [("mistral", 3, 4), ("granite", 5, 2), ("phi3", 1, 3), ("llama", 1, 9), ("llama", 40, 4)],
)
def test_rows_and_gradients(family: str, window: int, sinks: int, choose: Choose) -> None:
    """Of one layer, with a cap that is felt where the family has one: rows, one token, and packed sequences."""
    capped = {"attn_logit_softcapping": 1.0} if family == "gemma2" else {}
    model = windowed(family, window, sinks, num_hidden_layers=1, layer_types=None, **capped).double()
    layer: Any = model.model.layers[0].self_attn
    x = torch.randn(2, 23, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    packed = torch.tensor([0, 1, 4, 14, 23, 46], dtype=torch.int32)
    results = []
    for operator in (True, False):
        choose(operator)
        outputs = []
        for given, more in ((x, {}), (x[:, :1], {}), (x, {"cu_seq_lens_q": packed})):
            rotary = model.model.rotary_emb(given, torch.arange(given.shape[1])[None])
            outputs.append(layer(given, rotary, **more)[0])
        upstream = [torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view_as(output) for output in outputs]
        gradients = torch.autograd.grad(outputs, [x, *layer.parameters()], upstream)
        results.append([*outputs, *gradients])
    for found, wanted in zip(*results, strict=True):
        assert found.norm() > 0
        close(found, wanted)


@pytest.mark.usefixtures("float64")
@torch.no_grad()
@pytest.mark.parametrize(
    ("window", "sinks", "side"),
    [
        (5, 2, "left"),
        (5, 2, "right"),
        (5, 2, "middle"),
        (5, 0, "middle"),
        (1, 9, "left"),
        (8, 3, "right"),
        (40, 4, "left"),
    ],
)
def test_padding_and_parts_of_a_prompt(window: int, sinks: int, side: str, choose: Choose) -> None:
    """A cache filled in parts, by the operator or with a mask; then both read on."""
    model = windowed("gemma2", window, sinks, num_hidden_layers=2, layer_types=None).double()
    mask = torch.ones_like(IDS)
    mask[0, {"left": slice(0, 6), "right": slice(12, 18), "middle": slice(7, 10)}[side]] = 0
    results = {}
    for operator in (True, False):
        choose(operator)
        cache = DynamicCache(config=model.config)
        found = read_in_parts(model, IDS, (11, 1, 6, 6), mask, cache)
        results[operator] = found[mask.bool()], cache.layers[0].state
    close(*(result[0] for result in results.values()))
    for name, tensor in results[False][1].items():
        real = results[False][1]["numbers"] > 0
        kept = tensor.transpose(1, 2)[real] if tensor.dim() == 4 else tensor
        ours = results[True][1][name]
        close(ours.transpose(1, 2)[real] if tensor.dim() == 4 else ours, kept)


@pytest.mark.usefixtures("float64")
@torch.no_grad()
def test_attention_weights_and_dropout_come_with_a_mask(choose: Choose) -> None:
    choose(True)
    model = windowed("gemma2", 5, 2).double()
    wanted = model(IDS).logits
    output = model(IDS, output_attentions=True)
    close(output.logits, wanted)
    assert [tuple(weights.shape) for weights in output.attentions] == [(2, 4, LENGTH, LENGTH)] * 4
    close(output.attentions[0].sum(-1), torch.ones(2, 4, LENGTH, dtype=torch.float64))
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    assert (model.train()(IDS).logits - wanted).norm() > 0.1 * wanted.norm()


class Largest(TorchDispatchMode):
    """Records the elements of the largest tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return made


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("family", "sinks"), [("llama", 2), ("gemma2", 2), ("mistral", 0)])
def test_no_tensor_has_all_pairs_of_tokens(family: str, sinks: int, device: str) -> None:
    """Neither in training, packed rows included, nor where a prompt is padded or read in parts."""
    length = 1536
    model = windowed(
        family, 5, sinks, num_hidden_layers=1, layer_types=None, sliding_window=8, max_position_embeddings=4096
    ).to(device)
    layer: Any = model.model.layers[0].self_attn
    x = torch.randn(1, length, 32, device=device)
    cache = DynamicCache(config=model.config)
    rotary = model.model.rotary_emb(x, torch.arange(length, device=device)[None])
    first, second = ((part[:, :1000], part[:, 1000:]) for part in rotary)
    mask = torch.ones(1, length, dtype=torch.long, device=device)
    mask[:, :100] = 0
    packed = torch.tensor([0, 700, 701, length], dtype=torch.int32, device=device)
    with Largest() as largest:
        layer(x.clone().requires_grad_(), rotary)[0].sum().backward()
        layer(x.clone().requires_grad_(), rotary, cu_seq_lens_q=packed)[0].sum().backward()
        with torch.no_grad():
            layer(x, rotary, attention_mask=mask)
            for part, own in ((x[:, :1000], 0), (x[:, 1000:], 1)):
                embeddings = (first[own], second[own])
                layer(part, embeddings, attention_mask=mask[:, : 1000 if own == 0 else length], past_key_values=cache)
    assert length * 32 <= largest.elements < length**2 / 4


@pytest.mark.parametrize(("gradients", "wanted"), [(True, [512]), (False, [511, 512])])
def test_a_cpu_masks_short_texts_with_gradients_only(
    gradients: bool, wanted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    operator = window_softmax.window_attention

    def spy(q: torch.Tensor, *args: Any) -> Any:
        lengths.append(q.shape[1])
        return operator(q, *args)

    monkeypatch.setattr(window_softmax, "window_attention", spy)
    model = windowed("llama", 5, 2, num_hidden_layers=1, max_position_embeddings=1024)
    with torch.set_grad_enabled(gradients):
        for length in (1, 511, 512):
            model(IDS[:1, :1].expand(1, length))
    assert lengths == wanted


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
def test_on_a_gpu_long_prompts_are_those_of_a_mask(family: str, padded: bool, choose: Choose) -> None:
    """In float32, read in two long parts and decoded; a family's own window ends the view of the sinks."""
    model = windowed(family, 20, 3, sliding_window=48, max_position_embeddings=1024).to("cuda")
    ids = torch.randint(3, 97, (2, 401), generator=torch.Generator().manual_seed(2)).cuda()
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :123] = 0
    results = []
    for forced in (None, False):
        if forced is not None:
            choose(forced)
        results.append(read_in_parts(model, ids, (200, 200, 1), mask)[mask.bool()])
    torch.testing.assert_close(*results, rtol=2e-3, atol=2e-3)
