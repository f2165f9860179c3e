"""Projections as one matrix product: the same results; models are trained, adapted, moved and saved as before."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedModel

from deltanet_hf.decoding import serve
from deltanet_hf.fast import FastDecoder, fast_form, form
from deltanet_hf.fast.decoder import fast_mixer
from deltanet_hf.fast.parts import MergedProjection
from deltanet_hf.models.cache_bits import set_cache_bits
from support.plain_form import plain_form
from support.read_in_parts import read_in_parts
from support.tiny_models import tiny_student, tiny_teacher

TOKENS = torch.randint(3, 97, (2, 12), generator=torch.Generator().manual_seed(6))
ROUNDING = {"rtol": 2e-5, "atol": 2e-5}  # of four layers and six steps; products of one layer are compared below
SETTINGS: dict[str, tuple[dict[str, Any], int]] = {  # with the number of layers that make one product
    "biases": ({}, 6),
    "window": ({"window": 5, "sinks": 2}, 7),
    "one state per key head": ({"window": 3, "expand_kv": False}, 7),
    "shared projections": ({"shared_kv": True}, 6),
    "low-rank gate": ({"output_gate_rank": 3}, 6),
    "no gate biases": ({"gate_bias": False, "qkv_bias": False}, 6),
    "no output gate": ({"output_gate": False, "output_norm": "none"}, 5),
    "retention": ({"mixer": "retention"}, 4),
    "deltaproduct": ({"mixer": "deltaproduct"}, 6),
    "kda": ({"mixer": "kda"}, 5),
}


def join(model: Any) -> Any:
    """The model after `eval()`, which moves weights on a CPU too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(form, "MOVES_ON", {"cpu"})
        return model.eval()


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name in ("aten::mm", "aten::addmm", "aten::linear", "aten::bmm")
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def decode(model: Any) -> torch.Tensor:
    """Logits of six decoding steps."""
    return read_in_parts(model, TOKENS, [6, *[1] * 6])[:, 6:]


def is_merged(model: Any) -> bool:
    """Whether the weights of a layer's projections are in one block."""
    mixer = model.model.layers[0].self_attn
    return len({linear.weight.untyped_storage().data_ptr() for linear in (mixer.q_proj, mixer.k_proj)}) == 1


@pytest.mark.parametrize("name", SETTINGS)
def test_a_layer_makes_one_product(name: str) -> None:
    changes, projections = SETTINGS[name]
    model = tiny_student("qwen3", **changes)
    before = copy.deepcopy(model.state_dict())
    with plain_form():
        wanted = decode(model)
    mixer, x, cos = model.model.layers[0].self_attn, torch.randn(2, 7, 32), torch.randn(1, 7, 16)
    with torch.no_grad():
        with Products() as apart:
            fast_mixer(mixer, False)(x, (cos, cos.sin()))
        with Products() as merged:
            fast_mixer(mixer, True)(x, (cos, cos.sin()))
    assert apart.count - merged.count == projections - 1
    assert is_merged(join(model))
    addresses = [parameter.data_ptr() for parameter in mixer.parameters()]
    torch.testing.assert_close(decode(model), wanted, rtol=1e-4, atol=1e-4)
    assert addresses == [parameter.data_ptr() for parameter in mixer.parameters()]
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_softmax_layers_and_blocks_make_one_product_each() -> None:
    model = tiny_teacher("gemma2")
    with torch.no_grad(), Products() as apart:
        wanted = model(TOKENS).logits
    found = FastDecoder(model, may_move=True)
    with torch.no_grad(), Products() as merged:
        torch.testing.assert_close(found(model, TOKENS).logits, wanted, **ROUNDING)
    assert apart.count - merged.count == 3 * 4


def test_a_model_that_may_be_trained_stays_in_place() -> None:
    """One with frozen parts, with gradients, or with another forward."""
    frozen, pulled, replaced = (tiny_student("llama") for _ in range(3))
    frozen.model.layers[0].mlp.requires_grad_(False)
    pulled.lm_head.weight.grad = torch.zeros_like(pulled.lm_head.weight)
    replaced.model.layers[1].forward = replaced.model.layers[1].forward
    for model in (frozen, pulled, replaced):
        before = [parameter.data_ptr() for parameter in model.parameters()]
        join(model).generate(TOKENS, max_new_tokens=2)
        assert before == [parameter.data_ptr() for parameter in model.parameters()]


def test_a_model_whose_training_is_over_is_joined() -> None:
    model = tiny_student("llama")
    model(TOKENS, labels=TOKENS).loss.backward()
    assert not is_merged(join(model))
    assert isinstance(fast_form(model), FastDecoder)
    model.zero_grad()
    assert is_merged(join(model))


def test_who_joins_and_who_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward takes the fast form, and leaves the weights where they are."""
    model = tiny_student("llama")
    monkeypatch.setattr(form, "MOVES_ON", {"cpu"})
    asked: list[Callable[[Any], Any]] = [serve, lambda model: model.eval(), lambda model: model.to("cpu")]
    for ask in (*asked, lambda model: model.generate(TOKENS, max_new_tokens=2)):
        for parameter in model.parameters():
            parameter.data = parameter.clone()
        decode(model)
        assert not is_merged(model)
        ask(model)
        assert is_merged(model)


def test_a_call_makes_one_product_and_no_copies() -> None:
    sizes = ((24, False), (3, False), (5, True), (16, True), (1, True))
    linears = [nn.Linear(16, size, bias=bias) for size, bias in sizes]
    x = torch.randn(3, 2, 16)
    with torch.no_grad():
        wanted = [linear(x) for linear in linears]
        for may_move in (True, False):  # they are found where they have been moved
            merged = MergedProjection(linears, may_move)
            with Products() as counted:
                found = merged(x)
            assert counted.count == 1
            torch.testing.assert_close(list(found), wanted, rtol=1e-6, atol=1e-6)
            assert len({y.untyped_storage().data_ptr() for y in found}) == 1
            assert found[0].stride() == (112, 56, 1)  # 49 outputs, and 7 that mean nothing


SPOILT: dict[str, Callable[[nn.Linear], object]] = {
    "gradient": lambda linear: setattr(linear.weight, "grad", torch.zeros_like(linear.weight)),
    "memory": lambda linear: setattr(linear.weight, "data", torch.zeros(8, 16)[:4]),
    "dtype": lambda linear: linear.double(),
    "device": lambda linear: linear.to("meta"),
    "class": lambda linear: setattr(linear, "__class__", type("Linear", (nn.Linear,), {})),
    "width": lambda linear: setattr(linear, "weight", nn.Parameter(torch.zeros(4, 8))),
}


def test_what_cannot_be_moved_stays() -> None:
    for name, spoil in SPOILT.items():
        linears = [nn.Linear(16, 4, bias=False) for _ in range(3)]
        spoil(linears[0])
        before = [linear.weight.data_ptr() for linear in linears]
        assert MergedProjection(linears, True).weight is None, name
        assert before == [linear.weight.data_ptr() for linear in linears], name


def test_replaced_and_moved_weights_are_honoured() -> None:
    model = tiny_student("llama", window=5, sinks=2)
    wanted = decode(join(model))
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        attention.k_proj.weight.mul_(0.5)
    halved = decode(model)
    assert not torch.allclose(halved, wanted)
    fresh = tiny_student("llama", window=5, sinks=2)
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(decode(fresh), halved, **ROUNDING)
    attention.k_proj.weight = nn.Parameter(attention.k_proj.weight.detach() * 2)
    torch.testing.assert_close(decode(model), wanted, **ROUNDING)
    for moved in (copy.deepcopy(model), copy.deepcopy(model).double()):
        torch.testing.assert_close(decode(moved).float(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("merged_before", [True, False])
def test_adapters_are_honoured(merged_before: bool) -> None:
    plain, merged = tiny_student("llama", window=5, sinks=2), tiny_student("llama", window=5, sinks=2)
    if merged_before:
        join(merged)
    found = []
    for model in (plain, merged):
        torch.manual_seed(0)
        config = LoraConfig(r=2, target_modules=["q_proj", "v_proj", "g_proj"], init_lora_weights=False)
        adapted = get_peft_model(model, config).eval()
        found.append((decode(adapted), decode(adapted.merge_and_unload())))
    torch.testing.assert_close(found[1], found[0], **ROUNDING)
    torch.testing.assert_close(found[1][0], found[1][1], rtol=1e-4, atol=1e-4)


def test_training_goes_on() -> None:
    plain, merged = tiny_student("llama", window=5, sinks=2), tiny_student("llama", window=5, sinks=2)
    with torch.inference_mode():
        join(merged)
    for model in (plain, merged):
        optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-2)
        for _ in range(2):
            model(TOKENS, labels=TOKENS, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
    for one, other in zip(plain.parameters(), merged.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert is_merged(merged)
    torch.testing.assert_close(decode(merged), decode(plain), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", [16, 4])
def test_a_model_made_in_inference_mode(bits: int) -> None:
    with torch.inference_mode():
        plain, merged = (tiny_student("llama", window=33, delayed=True, conv_size=0, k_offset=False) for _ in range(2))
        for model in (plain, merged):
            set_cache_bits(model, bits)
        for _ in range(2):
            form._DECISIONS.pop(merged, None)
            join(merged)
        torch.testing.assert_close(decode(merged), decode(plain), **ROUNDING)
    assert is_merged(merged)


def test_files_and_memory_are_the_same(tmp_path: Path) -> None:
    model = tiny_student("llama", window=5, sinks=2)
    model.save_pretrained(tmp_path / "before")
    wanted = decode(join(model))
    assert is_merged(model)
    model.save_pretrained(tmp_path / "after")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("before", "after")]
    assert files[0] == files[1]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "after").eval()
    torch.testing.assert_close(decode(loaded), wanted, **ROUNDING)
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    most = sum(p.nbytes for p in model.parameters()) + len(model.model.layers) * 4 * 8 * 32 * 4
    assert sum(storages.values()) <= most


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[Any]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("merged_before", [True, False])
def test_sharded_models(merged_before: bool, one_process: Any) -> None:
    plain, sharded = tiny_student("llama", window=5, sinks=2), tiny_student("llama", window=5, sinks=2)
    if merged_before:
        join(sharded)
    shard(sharded, one_process)
    torch.testing.assert_close(decode(sharded), decode(plain), **ROUNDING)
    assert isinstance(fast_form(sharded), str)
    for model in (plain, sharded):
        model(TOKENS, labels=TOKENS, use_cache=False).loss.backward()
        torch.optim.SGD(model.parameters(), lr=1e-2).step()
    torch.testing.assert_close(decode(sharded), decode(plain), rtol=1e-4, atol=1e-4)


def shard(model: PreTrainedModel, mesh: Any) -> None:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
