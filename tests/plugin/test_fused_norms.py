"""A decoding step computes norms and residual sums by one kernel each: the same results, and modules as before."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, PreTrainedModel

from deltanet_hf.decoding import join_projections
from deltanet_hf.decoding.deferred_sum import DeferredSum
from deltanet_hf.decoding.few_launches import few_launches
from deltanet_hf.decoding.fused_norms import form_of
from deltanet_hf.decoding.obstacles import wiring
from deltanet_hf.models import qwen3_5
from deltanet_hf.models.families import FAMILIES
from deltanet_kernels import rms_norm
from deltanet_kernels.dispatch import Operator
from deltanet_kernels.residual_norm import rms_norm_triton
from support.replayed_step import LEAVES_MEMORY, is_view
from support.tiny_models import COMMON, mixture_table, randomise, tiny_mixture, tiny_student, tiny_teacher

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


def tiny_qwen3_5() -> PreTrainedModel:
    sizes = {f"linear_{part}_head_dim": 8 for part in ("key", "value")}
    counts = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    types = ["linear_attention", "full_attention"] * 2
    config = qwen3_5.DeltaNetQwen3_5TextConfig(**COMMON, **sizes, **counts, head_dim=16, layer_types=types)
    model = qwen3_5.model_class()(config)
    randomise(model, 0)
    return model.eval()


def decode(model: PreTrainedModel, fused: bool) -> tuple[Tensor, Tensor]:
    """Logits of a prompt and of a decoding step, or of a step under `few_launches`."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        prompt = model(TOKENS[:, :-1], past_key_values=cache, use_cache=True).logits
        if not fused:
            return prompt, model(TOKENS[:, -1:], past_key_values=cache, use_cache=True).logits
        with few_launches(model, with_sums=True):
            return prompt, model(TOKENS[:, -1:], past_key_values=cache, use_cache=True).logits


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_5"])
def test_every_family_is_known_and_the_same(family: str) -> None:
    model = tiny_qwen3_5() if family == "qwen3_5" else tiny_mixture(family, mixture_table())
    norms = own_norms(model)
    assert norms
    assert all(form_of(norm) is not None for norm in norms)
    assert torch.equal(decode(model, True)[1], decode(model, False)[1])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        norm = copy.deepcopy(norms[0]).to(dtype)
        x = 3 * torch.randn(2, 1, norm.get_parameter("weight").numel(), dtype=dtype)
        with torch.no_grad():
            wanted = norm(x + x.flip(0))
            with few_launches(norm, with_sums=True):
                assert torch.equal(norm(x + x.flip(0)), wanted)


@pytest.mark.parametrize(("family", "norms"), [("llama", 9), ("gemma2", 17), ("olmo2", 9)])
def test_which_sums_the_kernel_computes(family: str, norms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four layers: all, where a norm follows the sum. OLMo 2 adds what its norms return."""
    model = tiny_teacher(family)
    wanted = decode(model, False)[1]
    kernels = Kernels(monkeypatch)
    torch.testing.assert_close(decode(model, True)[1], wanted, rtol=1e-5, atol=1e-5)
    if family == "olmo2":
        norms += 2 * len(model.model.layers)  # of queries and keys
        assert (kernels.alone, kernels.added) == (norms - 1, 1)
    else:
        assert (kernels.alone, kernels.added) == (norms - 8, 8)


def launches(model: PreTrainedModel, fused: bool) -> list[str]:
    """Of one layer's decoding step, from its input to that of the next layer."""
    cache = DynamicCache(config=model.config)
    model(TOKENS[:1, :-1], past_key_values=cache, use_cache=True)
    x = torch.randn(1, 1, 32).to(model.dtype)
    positions = model.model.rotary_emb(x, torch.full((1, 1), 7))
    with Launches() as counted, few_launches(model, with_sums=True) if fused else nullcontext():
        y = model.model.layers[1](x, past_key_values=cache, position_embeddings=positions)
        before = len(counted.names)
        model.model.layers[2](y, past_key_values=cache, position_embeddings=positions)
        return counted.names[before:]


@pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter")
@torch.no_grad()
def test_launches_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_student("mistral", window=5, sinks=2).bfloat16()
    join_projections(model)
    real = Operator.unchecked

    def unchecked(operator: Operator[..., Any, Any], call: Any) -> Any:
        if call[0].shape[1] > 1:  # the prompt
            return real(operator, call)
        function: Any = operator.triton()
        return function(call)

    monkeypatch.setattr(Operator, "unchecked", unchecked)
    before, after = launches(model, False), launches(model, True)
    # Two norms of eight operations and two sums are two kernels; SiLU and product, and two projections, are one each.
    assert len(before) - len(after) == 18
    assert after.count("rms_norm_op") == 2
    assert not {"add", "pow", "mean", "rsqrt"} & set(after)
    assert after.count("silu_product_op") == 1
    assert len(after) <= 11


def hooked(norm: nn.Module) -> None:
    norm.register_forward_hook(lambda module, args, output: output)


def hooked_before(norm: nn.Module) -> None:
    norm.register_forward_pre_hook(lambda module, args: None)


def replaced(norm: nn.Module) -> None:
    norm.forward = lambda x: type(norm).forward(norm, x)  # type: ignore[method-assign, misc]


def compiled(norm: nn.Module) -> None:
    norm.compile(backend="eager")


def of_another_class(norm: nn.Module) -> None:
    norm.__class__ = type("LlamaRMSNorm", (type(norm),), {"__module__": "mine"})


def with_another_weight(norm: nn.Module) -> None:
    class Other(nn.Parameter):
        pass

    norm.weight = Other(norm.get_parameter("weight").detach())


@pytest.mark.parametrize(
    ("change", "counts"),
    [
        (hooked, (1, 7)),
        (hooked_before, (1, 7)),
        (of_another_class, (1, 7)),
        (with_another_weight, (1, 7)),
        (replaced, (0, 0)),
        (compiled, (0, 0)),
    ],
)
def test_what_is_not_plain_computes_itself(
    change: Any, counts: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_teacher("llama")
    change(model.model.layers[1].post_attention_layernorm)
    kernels = Kernels(monkeypatch)
    wanted = decode(model, False)[1]
    torch.testing.assert_close(decode(model, True)[1], wanted, rtol=1e-5, atol=1e-5)
    assert (kernels.alone, kernels.added) == counts


def test_a_hook_between_sum_and_norm_sees_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = tiny_teacher("llama"), []
    model.model.layers[1].register_forward_hook(lambda module, args, output: seen.append(output.clone()))
    kernels = Kernels(monkeypatch)
    logits = [decode(model, fused)[1] for fused in (False, True)]
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(seen[3], seen[1], rtol=1e-5, atol=1e-5)
    assert (kernels.alone, kernels.added) == (2, 7)


def test_modules_are_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_teacher("llama")
    before, names = wiring(model), list(model.state_dict())
    with torch.no_grad(), few_launches(model, with_sums=True):
        assert list(model.state_dict()) == names
    assert wiring(model) == before
    with torch.no_grad(), pytest.raises(IndexError), few_launches(model, with_sums=True):
        model(TOKENS + 1000)
    assert wiring(model) == before
    kernels = Kernels(monkeypatch)
    with few_launches(model, with_sums=True):
        model(TOKENS, labels=TOKENS).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with torch.no_grad(), few_launches(model, with_sums=True), torch.enable_grad():
        model(TOKENS, labels=TOKENS).loss.backward()
    assert kernels.alone == kernels.added == 0


def test_weights_of_another_dtype() -> None:
    mixed = tiny_teacher("qwen2").bfloat16()
    mixed.model.norm.float()  # whose product with the weight is float32
    mixed.lm_head.float()
    assert torch.equal(decode(mixed, True)[1], decode(mixed, False)[1])


@pytest.fixture
def unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nothing has been written to holds NaN."""
    monkeypatch.setattr(torch, "empty_like", lambda x: torch.full_like(x, torch.nan))


READERS: dict[str, Callable[[Tensor], Any]] = {
    "list": Tensor.tolist,
    "numpy": lambda x: x.numpy().tolist(),
    "view": lambda x: x[:, 1:].tolist(),
    "data": lambda x: x.data.tolist(),
    "product": lambda x: (x @ x.T).tolist(),
    "in place": lambda x: x.mul_(2).tolist(),
    "into": lambda x: torch.empty(2, 3).copy_(x).tolist(),
    "another sum": lambda x: (x + x).tolist(),
    "copy": lambda x: copy.deepcopy(x).tolist(),
    "detached": lambda x: torch.utils.dlpack.from_dlpack(x).tolist(),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_whoever_reads_a_sum_finds_it(read: Callable[[Tensor], Any], unwritten: None) -> None:
    x, y = torch.randn(2, 2, 3)
    wanted = read(x + y)
    with torch.no_grad(), DeferredSum():
        assert read(x + y) == wanted


def test_sums_that_are_not_put_off(unwritten: None) -> None:
    x, y = torch.randn(2, 2, 3)
    sums = DeferredSum()
    with torch.no_grad(), sums:
        for made in (x + 1, x + y[0], x.T + y.T, x + y.half(), torch.add(x, y, alpha=2), x.add(y, alpha=2), 1 + x):
            assert sums.take(made) is None
        whole = torch.ones(2, 2, dtype=torch.long)
        assert sums.take(whole + whole) is None
        total, wanted = x + y, x.clone().add_(y)
        assert torch.equal(total, wanted)
        total = x + y
        x.add_(1)
        assert torch.equal(total, wanted)
        last = x + y
    assert torch.equal(last, x + y)
