"""Projections as one matrix product: the same results; models are trained, adapted, moved and saved as before."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from deltanet_hf.decoding import join_projections
from deltanet_hf.decoding.projections import join_for_inference, leave_in_place
from deltanet_hf.decoding.recorders import RECORDERS
from deltanet_hf.mixers.joint_projection import join, products
from support.replayed_step import Recorder
from support.tiny_models import tiny_student

TOKENS = torch.randint(3, 97, (2, 12), generator=torch.Generator().manual_seed(6))
ROUNDING = {"rtol": 2e-5, "atol": 2e-5}  # of four layers and six steps; products of one layer are compared below
SETTINGS: dict[str, dict[str, Any]] = {
    "biases": {},
    "window": {"window": 5, "sinks": 2},
    "one state per key head": {"window": 3, "expand_kv": False},
    "shared projections": {"shared_kv": True},
    "low-rank gate": {"output_gate_rank": 3},
    "no gate biases": {"gate_bias": False, "qkv_bias": False},
    "no output gate": {"output_gate": False, "output_norm": "none"},
}


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
    cache = DynamicCache(config=model.config)
    model(TOKENS[:, :6], past_key_values=cache, use_cache=True)
    steps = [model(token, past_key_values=cache, use_cache=True).logits for token in TOKENS[:, 6:].split(1, dim=1)]
    return torch.cat(steps, dim=1)


def projections_of(model: Any, layer: int = 0) -> list[nn.Linear]:
    return model.model.layers[layer].self_attn.step_projections()


def is_joint(model: Any) -> bool:
    """Whether a layer's projections make one product."""
    attention = model.model.layers[0].self_attn
    with torch.no_grad(), Products() as counted:
        products(torch.ones(1, 1, 32, dtype=model.dtype), attention.step_projections())
    return counted.count == 1


@pytest.mark.parametrize("changes", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_decoding_is_the_same(family: str, changes: dict[str, Any]) -> None:
    model = tiny_student(family, **changes)
    wanted, before = decode(model), copy.deepcopy(model.state_dict())
    assert not is_joint(model)
    join_projections(model)
    assert is_joint(model)
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    join_projections(model)
    assert addresses == [parameter.data_ptr() for parameter in model.parameters()]
    torch.testing.assert_close(decode(model), wanted, **ROUNDING)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("mixer", ["deltanet", "gated_linear", "linear", "retention", "kda", "comba", "deltaproduct"])
def test_other_mixers_are_the_same(mixer: str) -> None:
    model = tiny_student("llama", mixer=mixer)
    wanted = decode(model)
    join_projections(model)
    torch.testing.assert_close(decode(model), wanted, **ROUNDING)


@pytest.mark.parametrize("changes", SETTINGS.values(), ids=SETTINGS)
def test_prompts_are_the_same(changes: dict[str, Any]) -> None:
    model = tiny_student("qwen3", **changes)
    mixer = model.model.layers[0].self_attn
    x, cos = torch.randn(2, 7, 32), torch.randn(1, 7, 16)
    call = {"hidden_states": x, "position_embeddings": (cos, cos.sin())}
    with torch.no_grad():
        with Products() as apart:
            wanted, _ = mixer(**call)
        padded, _ = mixer(**call, attention_mask=torch.ones(2, 7), padding=torch.zeros(2, 7, dtype=torch.bool))
        join_projections(model)
        with Products() as joint:
            found, _ = mixer(**call)
    assert joint.count == apart.count - len(mixer.step_projections()) + 1
    for one in (found, padded, mixer(**call)[0]):
        torch.testing.assert_close(one, wanted, **ROUNDING)


def call_with_gradients(model: Any) -> None:
    leave_in_place(model)


def freeze_a_part(model: Any) -> None:
    model.model.layers[0].mlp.requires_grad_(False)


def keep_a_gradient(model: Any) -> None:
    model.lm_head.weight.grad = torch.zeros_like(model.lm_head.weight)


def train_a_part(model: Any) -> None:
    model.model.layers[-1].train()


def replace_a_forward(model: Any) -> None:
    layer = model.model.layers[1]
    layer.forward = layer.forward


@pytest.mark.parametrize(
    "spoil", [call_with_gradients, freeze_a_part, keep_a_gradient, train_a_part, replace_a_forward]
)
def test_a_model_that_may_be_trained_stays_in_place(spoil: Any) -> None:
    model = tiny_student("llama")
    spoil(model)
    before = [parameter.data_ptr() for parameter in model.parameters()]
    join_for_inference(model)
    assert before == [parameter.data_ptr() for parameter in model.parameters()]


def test_the_first_call_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_student("llama").train()
    join_for_inference(model)
    assert not is_joint(model)
    join_for_inference(model.eval())
    assert is_joint(model)
    with monkeypatch.context() as patch:
        patch.setattr("deltanet_hf.decoding.projections.join_projections", lambda _: pytest.fail("joined again"))
        join_for_inference(model)
    model.double()
    assert not is_joint(model)
    join_for_inference(model)
    assert is_joint(model)


def test_a_call_makes_few_products_and_no_copies() -> None:
    linears = [
        nn.Linear(16, size, bias=bias) for size, bias in ((24, False), (3, False), (5, True), (16, True), (1, True))
    ]
    x = torch.randn(3, 2, 16)
    with torch.no_grad():
        wanted = products(x, linears)
        join(linears)
        with Products() as counted:
            found = products(x, linears)
    assert counted.count == 1
    for linear in linears:
        torch.testing.assert_close(found[linear], wanted[linear], rtol=1e-6, atol=1e-6)
    assert len({y.untyped_storage().data_ptr() for y in found.values()}) == 1
    assert found[linears[0]].stride() == (112, 56, 1)  # 49 outputs, and 7 that mean nothing


def test_neighbours_without_room_behind_them() -> None:
    memory = torch.randn(3 + 2 + 4, 8)
    linears = [nn.Linear(8, 3, bias=False), nn.Linear(8, 2, bias=False), nn.Linear(8, 4, bias=False)]
    for linear, part in zip(linears, memory.split([3, 2, 4]), strict=True):
        linear.weight.data = part
    x = torch.randn(1, 8)
    with torch.no_grad(), Products() as counted:
        found = products(x, linears)
    assert counted.count == 1
    for linear, part in zip(linears, memory.split([3, 2, 4]), strict=True):
        torch.testing.assert_close(found[linear], x @ part.T)
    linears[1].weight.data = memory[5:7]  # no neighbour any more
    with torch.no_grad():
        torch.testing.assert_close(products(x, linears)[linears[1]], x @ memory[5:7].T)


def spoil_gradient(linears: list[nn.Linear]) -> None:
    linears[1].weight.grad = torch.zeros_like(linears[1].weight)


def spoil_memory(linears: list[nn.Linear]) -> None:
    linears[0].weight.data = torch.zeros(8, 16)[:4]


def spoil_dtype(linears: list[nn.Linear]) -> None:
    linears[0].double()


def spoil_device(linears: list[nn.Linear]) -> None:
    linears[0].to("meta")


def spoil_width(linears: list[nn.Linear]) -> None:
    linears[0].weight = nn.Parameter(torch.zeros(4, 8))


@pytest.mark.parametrize("spoil", [spoil_gradient, spoil_memory, spoil_dtype, spoil_device, spoil_width])
def test_what_cannot_be_moved_stays(spoil: Any) -> None:
    linears = [nn.Linear(16, 4, bias=False) for _ in range(3)]
    spoil(linears)
    before = [linear.weight.data_ptr() for linear in linears]
    join(linears)
    assert before == [linear.weight.data_ptr() for linear in linears]


def test_hooked_replaced_and_moved_layers_are_honoured() -> None:
    model = tiny_student("llama", window=5, sinks=2)
    join_projections(model)
    attention, seen = model.model.layers[0].self_attn, []
    handle = attention.g_proj.register_forward_hook(lambda module, args, output: seen.append(len(args)))
    wanted = decode(model)
    assert len(seen) == 7
    handle.remove()
    torch.testing.assert_close(decode(model), wanted, **ROUNDING)
    with torch.no_grad():
        attention.k_proj.weight.mul_(0.5)
    halved = decode(model)
    assert not torch.allclose(halved, wanted)
    fresh = tiny_student("llama", window=5, sinks=2)
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(decode(fresh), halved, **ROUNDING)
    attention.k_proj.weight = nn.Parameter(attention.k_proj.weight.detach() * 2)
    torch.testing.assert_close(decode(model), wanted, **ROUNDING)
    join_projections(model)
    torch.testing.assert_close(decode(model), wanted, **ROUNDING)
    for moved in (copy.deepcopy(model), copy.deepcopy(model).double()):
        again = decode(moved)
        torch.testing.assert_close(again.float(), wanted, rtol=1e-4, atol=1e-4)
        join_projections(moved)
        assert is_joint(moved)
        torch.testing.assert_close(decode(moved), again, **ROUNDING)


@pytest.mark.parametrize("joint_before", [True, False])
def test_adapters_are_honoured(joint_before: bool) -> None:
    plain, joint = tiny_student("llama", window=5, sinks=2), tiny_student("llama", window=5, sinks=2)
    join_projections(joint) if joint_before else None
    found = []
    for model in (plain, joint):
        torch.manual_seed(0)
        config = LoraConfig(r=2, target_modules=["q_proj", "v_proj", "g_proj"], init_lora_weights=False)
        adapted = get_peft_model(model, config).eval()
        if model is joint:
            join_projections(adapted)
        found.append((decode(adapted), decode(adapted.merge_and_unload())))
    torch.testing.assert_close(found[1], found[0], **ROUNDING)
    join_projections(joint)
    assert is_joint(joint)
    torch.testing.assert_close(decode(joint), found[0][1], **ROUNDING)


def test_training_goes_on() -> None:
    plain, joint = tiny_student("llama", window=5, sinks=2), tiny_student("llama", window=5, sinks=2)
    with torch.inference_mode():  # as inside of a call of `generate`
        join_projections(joint)
    for model in (plain, joint):
        optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-2)
        for _ in range(2):
            model(TOKENS, labels=TOKENS, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
    for one, other in zip(plain.parameters(), joint.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert is_joint(joint)
    torch.testing.assert_close(decode(joint), decode(plain), rtol=1e-4, atol=1e-4)


def test_files_and_memory_are_the_same(tmp_path: Path) -> None:
    model = tiny_student("llama", window=5, sinks=2)
    wanted = decode(model)
    model.save_pretrained(tmp_path / "before")
    join_projections(model)
    model.save_pretrained(tmp_path / "after")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("before", "after")]
    assert files[0] == files[1]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "after").eval()
    torch.testing.assert_close(decode(loaded), wanted, **ROUNDING)
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    most = sum(p.nbytes for p in model.parameters()) + len(model.model.layers) * 4 * 8 * 32 * 4
    assert sum(storages.values()) <= most


def test_compiled_products() -> None:
    linears = [nn.Linear(16, size) for size in (4, 8, 2)]
    join(linears)
    x = torch.randn(2, 1, 16)
    compiled = torch.compile(lambda x: list(products(x, linears).values()), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), list(products(x, linears).values()), **ROUNDING)


def test_generate_joins_where_it_records(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_student("llama", window=5, sinks=2)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    wanted = model.generate(TOKENS, **options)
    assert not is_joint(model)
    recorder = Recorder()
    monkeypatch.setitem(RECORDERS, "cpu", recorder)
    for _ in range(2):
        assert torch.equal(model.generate(TOKENS, **options), wanted)
    assert is_joint(model)
    assert recorder.recorded == 1


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[Any]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("joint_before", [True, False])
def test_sharded_models(joint_before: bool, one_process: Any) -> None:
    plain, sharded = tiny_student("llama", window=5, sinks=2), tiny_student("llama", window=5, sinks=2)
    if joint_before:
        join_projections(sharded)
    shard(sharded, one_process)
    before = [parameter.to_local().data_ptr() for parameter in sharded.parameters()]
    join_projections(sharded)
    assert before == [parameter.to_local().data_ptr() for parameter in sharded.parameters()]
    torch.testing.assert_close(decode(sharded), decode(plain), **ROUNDING)
    for model in (plain, sharded):
        model(TOKENS, labels=TOKENS, use_cache=False).loss.backward()
        torch.optim.SGD(model.parameters(), lr=1e-2).step()
    torch.testing.assert_close(decode(sharded), decode(plain), rtol=1e-4, atol=1e-4)


def shard(model: PreTrainedModel, mesh: Any) -> None:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
