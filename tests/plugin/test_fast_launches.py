"""Decoding steps and prompts of the fast form by few launches: which operations a layer takes, and who adds what."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, PreTrainedModel

from deltanet_hf.fast import FastDecoder
from deltanet_hf.fast.decoder import FastLayer
from deltanet_hf.fast.families import NORM, family_of
from deltanet_hf.fast.parts import FastNorm, Sum
from deltanet_hf.models.cache_bits import set_cache_bits
from deltanet_hf.models.families import FAMILIES
from deltanet_hf.models.layers import LayerTable
from deltanet_kernels import rms_norm
from deltanet_kernels.common.registration import Registered
from deltanet_kernels.dispatch import Operator
from deltanet_kernels.group_rule import chunk
from deltanet_kernels.residual_norm import rms_norm_triton
from support.replayed_step import LEAVES_MEMORY, is_view
from support.tiny_models import mixed_heads, mixture_table, tiny_mixture, tiny_qwen3_5, tiny_student, tiny_teacher

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TOKENS = torch.randint(3, 97, (2, 8), generator=torch.Generator().manual_seed(6))


class Launches(TorchDispatchMode):
    """Counts the operations that would be launched: all that do more than look at memory."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        made = any(isinstance(x, Tensor) for x in tree_leaves(output))
        if made and name not in LEAVES_MEMORY and (func._schema.is_mutable or not is_view(output, (args, kwargs))):
            self.names.append(name)
        return output


class Kernels:
    """Sends calls of `rms_norm` to the Triton form where the interpreter runs it, and counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.alone = self.added = 0
        real = Operator.unchecked

        def unchecked(operator: Operator[..., Any, Any], call: Any) -> Any:
            if operator is not rms_norm:
                return real(operator, call)
            self.alone += call.total is None
            self.added += call.total is not None
            return rms_norm_triton(call) if INTERPRETED else operator.cpu(call)

        monkeypatch.setattr(Operator, "unchecked", unchecked)


def own_norms(model: nn.Module) -> list[nn.Module]:
    """The norms of a model's family."""
    return [
        module
        for module in model.modules()
        if type(module).__name__.endswith("RMSNorm") and type(module).__module__.startswith("transformers.")
    ]


@torch.no_grad()
@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_5"])
def test_norms_of_every_family_are_the_same_to_the_bit(family: str) -> None:
    model = tiny_qwen3_5() if family == "qwen3_5" else tiny_mixture(family, mixture_table())
    norms = own_norms(model)
    assert norms
    assert all(family_of(type(norm), NORM) is not None for norm in norms)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        norm: Any = copy.deepcopy(norms[0]).to(dtype)
        x = 3 * torch.randn(2, 1, norm.weight.numel(), dtype=dtype)
        fast = FastNorm(norm)
        assert torch.equal(fast(x), norm(x))
        normed, total = fast.with_sum(Sum(x, x.flip(0)))
        assert torch.equal(total, x + x.flip(0))
        assert torch.equal(normed, norm(x + x.flip(0)))
        wide, added = fast.with_sum(Sum(x.double(), x.flip(0).double()))  # another dtype than that of the weight
        assert torch.equal(wide, norm(added))


@torch.no_grad()
@pytest.mark.parametrize(("family", "norms"), [("llama", 9), ("gemma2", 17), ("olmo2", 9)])
def test_which_sums_the_kernel_computes(family: str, norms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four layers: all, where a norm follows the sum. OLMo 2 adds what its norms return."""
    model = tiny_teacher(family)
    wanted = model(TOKENS).logits
    form, kernels = FastDecoder(model, True), Kernels(monkeypatch)
    torch.testing.assert_close(form(model, TOKENS).logits, wanted, rtol=1e-5, atol=1e-5)
    if family == "olmo2":
        norms += 2 * len(model.model.layers)  # of queries and keys
        assert (kernels.alone, kernels.added) == (norms - 1, 1)
    else:
        assert (kernels.alone, kernels.added) == (norms - 8, 8)


def launches(
    model: PreTrainedModel, layer: Any, tokens: int, seen: int, prompt_length: Tensor | None = None
) -> list[str]:
    """Of one layer's call of `tokens` tokens behind `seen` others, from the sum of the layer before to its own.

    Every operator takes its Triton form, but for those of the tokens before. Its kernels are counted, and not run.
    """
    from triton.runtime.interpreter import GridExecutor

    cache = DynamicCache(config=model.config)
    x = torch.randn(1, seen + tokens, 32).to(model.dtype)
    positions = model.model.rotary_emb(x, torch.arange(seen + tokens)[None])
    before, now = (tuple(angle[:, part] for angle in positions) for part in (slice(0, seen), slice(seen, None)))
    if seen:
        layer(Sum(x[:, :seen], x[:, :seen]), past_key_values=cache, position_embeddings=before)
    hidden = Sum(x[:, seen:], x[:, seen:].clone())

    def unchecked(operator: Operator[..., Any, Any], call: Any) -> Any:
        return operator.triton()(call)  # type: ignore[misc]

    def run(registered: Registered[..., Any], *calls: Any) -> Any:
        return registered.function(*calls)  # as in an eager call, which no mode sees

    def launch(kernel: GridExecutor, *args: Any, **options: Any) -> None:
        counted.names.append(kernel.fn.__name__)

    with pytest.MonkeyPatch.context() as patch, Launches() as counted:
        patch.setattr(Operator, "unchecked", unchecked)
        patch.setattr(Registered, "__call__", run)
        patch.setattr(GridExecutor, "__call__", launch)
        layer(hidden, past_key_values=cache, position_embeddings=now, prompt_length=prompt_length)
    return counted.names


@torch.no_grad()
@pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter")
@pytest.mark.parametrize(("window", "most"), [({}, 8), ({"window": 5, "sinks": 2}, 10)])
def test_launches_of_a_step(window: dict[str, int], most: int) -> None:
    """One product, step, window, mixture, o_proj; two norms with sums; two projections, SiLU and product, down_proj."""
    model = tiny_student("mistral", **window).bfloat16()
    for name, weight in model.named_parameters():
        if name.endswith("_slope"):
            weight.data = weight.data.float()
    names = launches(model, FastLayer(model.model.layers[1], True), 1, 7)
    assert names.count("_rms_norm_kernel") == 2
    assert names.count("_silu_product_kernel") == 1
    assert not {"add", "pow", "mean", "rsqrt", "cat", "clone"} & set(names)
    assert len(names) <= most, " ".join(names)


def windows_and_states(tokens: int, seen: int, prompt_length: Tensor | None = None) -> tuple[list[str], list[str]]:
    """The launches of windows in 4 bits beside a softmax head, and with states of what has left the windows."""
    state = LayerTable.preset(1, "gated_deltanet+window", window=40).only_kind.settings.to_dict()
    names: list[list[str]] = []
    for heads in (mixed_heads("softmax", "window", window=40), mixed_heads("softmax", "linear", linear=state)):
        model = tiny_mixture("llama", LayerTable({"own": heads}, ("own",)), head_dim=64)
        set_cache_bits(model.bfloat16(), 4)
        names.append(launches(model, FastLayer(model.model.layers[0], True), tokens, seen, prompt_length))
    return names[0], names[1]


@torch.no_grad()
@pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter")
def test_states_of_what_has_left_add_one_launch_to_a_step() -> None:
    """One product, three kernels and o_proj of each kind of heads, and the feed-forward block."""
    windows, states = windows_and_states(1, 7)
    assert len(windows) == 14
    of_states = ["group_write_kernel", "group_token_kernel", "packed_span_kernel", "group_mix_kernel"]
    assert states == [*windows[:2], *of_states, *windows[5:]]


@torch.no_grad()
@pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter")
def test_launches_of_a_prompt() -> None:
    model = tiny_student("mistral", window=5, sinks=2, expand_kv=False, state_dtype="bfloat16").bfloat16()
    names = launches(model, FastLayer(model.model.layers[1], True), 6, 0)
    assert names.count("_rms_norm_kernel") == 2
    assert not {"add", "pow", "mean", "rsqrt"} & set(names)
    assert len(names) <= 17, " ".join(names)


RULE = ["scores_kernel", "inverse_kernel", "group_states_kernel", "group_outputs_kernel"]
CUT = ["chunk_spans_kernel", "states_kernel", "_compose_kernel"]
PROMPTS = {  # tokens, length, multiprocessors, launches of the rule
    "whole": (200, None, 1, RULE),
    "padded": (200, 190, 1, RULE),
    "within the window": (60, 50, 1, ["new_zeros"]),
    "in segments": (2700, None, 8, RULE + CUT),
}


@torch.no_grad()
@pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter")
@pytest.mark.parametrize(("tokens", "length", "processors", "rule"), PROMPTS.values(), ids=PROMPTS)
def test_launches_that_states_of_what_has_left_add_to_a_prompt(
    tokens: int, length: int | None, processors: int, rule: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows take four of each kind of heads."""
    monkeypatch.setattr(chunk, "multiprocessors", lambda device: processors)
    windows, states = windows_and_states(tokens, 0, None if length is None else torch.tensor([length]))
    assert len(windows) == 16
    assert sorted(states) == sorted([*windows, "group_gates_kernel", *rule, "round_state_kernel", "mixture_kernel"])
