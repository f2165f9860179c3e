"""The fast form of a model computes what its own modules do, is decided once, and passes nothing by."""

from __future__ import annotations

import functools
import gc
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama import modeling_llama

from deltanet_hf.evaluation.baselines import switch_off_state
from deltanet_hf.fast import FastDecoder, fast_form, form
from deltanet_hf.fast.form import reasons
from deltanet_hf.mixers import MIXERS
from deltanet_hf.models.cache_bits import set_cache_bits
from deltanet_hf.models.families import FAMILIES
from support.plain_form import plain_form
from support.read_in_parts import read_in_parts
from support.tiny_models import HYBRID, mixed_mixture_table, tiny_mixture, tiny_qwen3_5, tiny_student, tiny_teacher

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS = torch.randint(3, 97, (2, 14), generator=torch.Generator().manual_seed(4)).to(DEVICE)
WHOLE, IN_PARTS, STEPS = (14,), (7, 4, 1, 1, 1), (9, 1, 1, 1, 1, 1)
PADDINGS = {"none": None, "left": slice(0, 5), "right": slice(9, 14)}
ROUNDING = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(autouse=True)
def merged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are moved on a CPU, too."""
    monkeypatch.setattr(form, "MOVES_ON", {"cuda", "cpu"})


def students() -> dict[str, Callable[[], PreTrainedModel]]:
    """A model of every family, of every kind of layer, and of all kinds of heads."""

    def of_family(name: str) -> Callable[[], PreTrainedModel]:
        return lambda: tiny_student(name, window=3, sinks=2, layers=HYBRID)

    def of_mixer(name: str) -> Callable[[], PreTrainedModel]:
        heads = {"heads": ["softmax", "linear"]} if name == "mixed_heads" else {}
        return lambda: tiny_student("llama", mixer=name, layers=HYBRID, **heads)

    return {
        **{name: of_family(name) for name in FAMILIES},
        **{name: of_mixer(name) for name in MIXERS},
        "convolved keys": lambda: tiny_student("llama", window=3, conv_on="k"),
        "one state per key head": lambda: tiny_student("qwen3", window=3, expand_kv=False, k_offset=False),
        "window in 4 bits": lambda: set_cache_bits(tiny_student("llama", window=3, sinks=2), 4),
        "low-rank gate": lambda: tiny_student("llama", output_gate_rank=3, conv_size=0),
        "no gate or norm": lambda: tiny_student("llama", window=3, output_gate=False, output_norm="none"),
        "heads of all kinds": lambda: tiny_mixture("gemma2", mixed_mixture_table()),
        "qwen3_5": tiny_qwen3_5,
    }


STUDENTS = students()


@torch.no_grad()
def read(model: Any, lengths: tuple[int, ...], mask: Tensor | None = None) -> Tensor:
    """Logits of the tokens, read in parts of these lengths."""
    return read_in_parts(model, TOKENS, lengths, mask)


@pytest.mark.parametrize("name", STUDENTS)
def test_it_computes_what_the_plain_form_does(name: str) -> None:
    """Whole; a prompt, more of it, and token by token, with padding on either side."""
    model = STUDENTS[name]().to(DEVICE)
    for side, padded in PADDINGS.items():
        mask = None
        if padded is not None:
            mask = torch.ones_like(TOKENS)
            mask[1, padded] = 0
        real = torch.ones_like(TOKENS).bool() if mask is None else mask.bool()
        for lengths in (WHOLE, IN_PARTS) if side == "none" else (IN_PARTS,):
            with plain_form():
                wanted = read(model, lengths, mask)
            torch.testing.assert_close(read(model, lengths, mask)[real], wanted[real], **ROUNDING)
    assert isinstance(fast_form(model), FastDecoder)


def test_many_tokens_pass_a_feed_forward_block_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_student("llama").to(DEVICE)
    whole = read(model, WHOLE)
    monkeypatch.setattr("deltanet_hf.fast.parts.PART", 10)
    torch.testing.assert_close(read(model, WHOLE), whole, **ROUNDING)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_softmax_models_have_one(family: str) -> None:
    model = tiny_teacher(family).to(DEVICE)
    found = fast_form(model)
    assert isinstance(found, FastDecoder)
    wanted = read(model, STEPS)
    cache, parts = DynamicCache(config=model.config), TOKENS.split(STEPS, dim=1)
    logits = [found(model, part, past_key_values=cache, use_cache=True).logits for part in parts]
    torch.testing.assert_close(torch.cat(logits, dim=1), wanted, **ROUNDING)


class OtherParameter(nn.Parameter):
    pass


def hook(model: Any) -> Any:
    return model.model.layers[0].self_attn.conv1d.register_forward_hook(lambda *_: None)


SPOILED: list[tuple[Callable[[Any], Any], str]] = [
    (hook, "model.layers.0.self_attn.conv1d: it has forward hooks"),
    (
        lambda model: setattr(model.model.layers[1].mlp, "forward", model.model.layers[1].mlp.forward),
        "model.layers.1.mlp: its forward is compiled or replaced",
    ),
    (lambda model: model.model.norm.compile(backend="eager"), "model.norm: its forward is compiled or replaced"),
    (lambda model: model.model.layers[-1].mlp.train(), "model.layers.3.mlp: it is in training mode"),
    (switch_off_state, "model.layers.0.self_attn.window_branch: its method mixing_gate is replaced"),
    (
        lambda model: get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).eval(),
        "model.layers.0.self_attn.q_proj: its adapter is not merged",
    ),
    (
        lambda model: setattr(model.model.norm, "weight", OtherParameter(model.model.norm.weight.detach())),
        "weights are sharded, or of another class than nn.Parameter",
    ),
]


@pytest.mark.parametrize(("spoil", "reason"), SPOILED, ids=[reason for _, reason in SPOILED])
def test_what_is_put_around_a_module_counts(spoil: Any, reason: str) -> None:
    """After a call too, and no longer than it is there."""
    model = tiny_student("llama", window=3, sinks=2).to(DEVICE)
    read(model, (14,))
    assert isinstance(fast_form(model), FastDecoder)
    handle = spoil(model)
    assert fast_form(model) == reason
    with plain_form():
        wanted = read(model, (9, 5))
    assert torch.equal(read(model, (9, 5)), wanted)
    if spoil is hook:
        handle.remove()
        assert isinstance(fast_form(model), FastDecoder)


@pytest.mark.parametrize("name", ["LlamaMLP", "LlamaRMSNorm", "LlamaDecoderLayer", "LlamaAttention"])
def test_a_method_of_a_class_may_be_replaced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With gradients and without; Liger's kernels come in this way."""
    model = set_cache_bits(tiny_student("llama", window=3, layers=HYBRID), 4).to(DEVICE)
    before = read(model, (9, 5))
    kind = getattr(modeling_llama, name)
    own, calls = kind.forward, []

    @functools.wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(self)
        return own(self, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", forward)
    torch.testing.assert_close(read(model, (9, 5)), before, **ROUNDING)
    model(TOKENS)
    assert len(calls) == 3 * sum(isinstance(module, kind) for module in model.modules())
    assert str(fast_form(model)).endswith(f"{name}.forward is replaced")
    monkeypatch.undo()
    assert isinstance(fast_form(model), FastDecoder)


def test_any_method_of_a_part_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of a whole model, whose class has methods that others than torch and transformers wrote."""
    model = tiny_student("gemma3_text", window=3)
    own = Gemma3RMSNorm._norm
    monkeypatch.setattr(Gemma3RMSNorm, "_norm", lambda self, x: 2 * own(self, x))
    assert fast_form(model) == "Gemma3RMSNorm._norm is replaced"
    monkeypatch.undo()
    assert isinstance(fast_form(model), FastDecoder)


def test_classes_that_are_not_known() -> None:
    for name, reason in (
        ("LlamaRMSNorm", "LlamaRMSNorm is no known norm"),
        ("LlamaDecoderLayer", "LlamaDecoderLayer is no decoder layer of a supported family"),
    ):
        model = tiny_student("llama")
        module = next(module for module in model.modules() if type(module).__name__ == name)
        module.__class__ = type(name, (type(module),), {"__module__": "mine"})
        assert next(reasons(model)) == reason


def test_hidden_states_and_attentions_are_returned() -> None:
    model = tiny_student("llama", layers=HYBRID).to(DEVICE)
    model.set_attn_implementation("eager")
    read(model, (3,))
    with torch.no_grad():
        output = model(TOKENS, output_hidden_states=True, output_attentions=True)
    assert len(output.hidden_states) == 5
    assert len(output.attentions) > 0


CHANGES: dict[str, Callable[[Any], Any]] = {
    "weights in place": lambda layer: [one.data.mul_(1.5) for one in layer.parameters()],
    "other memory": lambda layer: [setattr(one, "data", one.data * 1.5) for one in layer.parameters()],
    "other parameters": lambda layer: [
        setattr(module, name, nn.Parameter(one.detach() * 1.5))
        for module in layer.modules()
        for name, one in list(module._parameters.items())
        if one is not None
    ],
    "loaded": lambda layer: layer.load_state_dict({name: one * 1.5 for name, one in layer.state_dict().items()}),
    "another dtype": lambda layer: layer.bfloat16().float(),
    "an attribute": lambda layer: setattr(layer.self_attn.window_branch, "scale", 3.0),
    "another module": lambda layer: setattr(layer, "mlp", nn.Identity()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_after_a_call_counts(change: str) -> None:
    model = tiny_student("llama", window=3, sinks=2, k_offset=True).to(DEVICE)
    before = read(model, (9, 5))
    with torch.no_grad():
        CHANGES[change](model.model.layers[0])
    found = read(model, (9, 5))
    assert not torch.equal(found, before)
    with plain_form():
        torch.testing.assert_close(found, read(model, (9, 5)), **ROUNDING)


def test_it_is_decided_once() -> None:
    model = tiny_mixture("gemma2", mixed_mixture_table()).to(DEVICE)
    read(model, (3,))
    before = fast_form(model)
    read(model, STEPS)
    model.generate(TOKENS, max_new_tokens=3, do_sample=False)
    assert fast_form(model) is before


@pytest.mark.parametrize("way", [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 2}], ids=str)
def test_generate_looks_for_changes_once(way: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, looks = tiny_student("llama").to(DEVICE), []
    read(model, (3,))
    look = form.Version.is_current
    monkeypatch.setattr(form.Version, "is_current", lambda version: looks.append(1) or look(version))
    model.generate(TOKENS[:1], max_new_tokens=5, do_sample=False, disable_compile=True, **way)
    assert len(looks) == 1
    model.model.layers[0].mlp.train()
    assert fast_form(model) == "model.layers.0.mlp: it is in training mode"


def test_gradients_take_nothing_of_it() -> None:
    model = tiny_student("llama", window=3, sinks=2).to(DEVICE)
    read(model, (3,))
    model(TOKENS, labels=TOKENS).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_model_is_as_before_and_is_not_kept_alive() -> None:
    model = tiny_student("llama").to(DEVICE)
    names, modules = list(model.state_dict()), list(model.modules())
    read(model, (3, 1))
    assert list(model.state_dict()) == names
    assert list(model.modules()) == modules
    with torch.no_grad(), pytest.raises((RuntimeError, ValueError)):
        model(inputs_embeds=torch.zeros(1, 3, 5, device=DEVICE))
    gone = weakref.ref(model), weakref.ref(fast_form(model))
    gc.disable()  # the memory of a model is free at once, without a search for cycles
    try:
        del model, modules
        assert [one() for one in gone] == [None, None]
    finally:
        gc.enable()


def test_the_signature_is_the_family_s() -> None:
    model, teacher = tiny_student("llama"), tiny_teacher("llama")
    assert inspect.signature(model.forward) == inspect.signature(teacher.forward)


def test_a_norm_of_another_dtype() -> None:
    model = tiny_student("qwen2").to(DEVICE)
    model.model.norm.double()  # whose product with the weight is float64
    model.lm_head.double()
    with plain_form():
        wanted = read(model, (9, 1))
    found = read(model, (9, 1))
    assert found.dtype == wanted.dtype == torch.float64
    torch.testing.assert_close(found, wanted, **ROUNDING)
