"""A layer without gradients computes its elementwise work in few kernels: the same results, and no part passed over."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, PreTrainedModel

from deltanet_hf.evaluation.lesions import switch_off_state, switch_off_window
from deltanet_hf.mixers import gated_deltanet, prompt, window_branch
from deltanet_kernels.dispatch import Operator
from support.tiny_models import tiny_student

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
JOINED = {"prompt_inputs", "gate_values", "window_mixture", "window_keep"}
TOKENS = torch.randint(3, 97, (2, 13), generator=torch.Generator().manual_seed(4)).to(DEVICE)
WINDOW = {"window": 3, "sinks": 2}
ROUNDING = {"rtol": 1e-4, "atol": 1e-4}
SETTINGS: dict[str, dict[str, Any]] = {
    "faithful": {},
    "beside a window": WINDOW,
    "one state per key head": {**WINDOW, "expand_kv": False, "k_offset": False},
    "qwen3_5": {"profile": "qwen3_5"},
    "activations": {**WINDOW, "qk_activation": "silu", "v_activation": "silu", "conv_size": 2},
    "nothing around the state": {**WINDOW, "conv_size": 0, "k_offset": False, "output_norm": "none"},
    "no gate": {**WINDOW, "output_gate": False, "output_norm": "shared"},
    "neither norm nor gate": {**WINDOW, "output_gate": False, "output_norm": "none"},
    "a low-rank gate": {**WINDOW, "output_gate_rank": 4},
    "no rotation": {**WINDOW, "rope": False},
    "shared projections": {**WINDOW, "shared_kv": True},
    "convolved keys": {**WINDOW, "conv_on": "k"},
    "strong writes": {"allow_neg_eigval": True},
}
MIXERS = ["deltaproduct", "comba", "efla", "deltanet", "kda", "linear", "mesa"]


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Sends the joined operators to their Triton form, and lists the calls of them."""
    calls: list[str] = []
    real = Operator.unchecked

    def unchecked(operator: Operator[..., Any, Any], call: Any) -> Any:
        if operator.__name__ not in JOINED:
            return real(operator, call)
        calls.append(operator.__name__)
        function = operator.triton() if INTERPRETED or ON_GPU else operator.cpu
        assert function is not None
        return function(call)

    monkeypatch.setattr(Operator, "unchecked", unchecked)
    return calls


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Computes a function without the joined operators."""

    def compute(function: Callable[..., Any], *args: Any) -> Any:
        with monkeypatch.context() as patch:
            for module in (prompt, window_branch, gated_deltanet):
                patch.setattr(module, "without_gradients", lambda: False)
            return function(*args)

    return compute


def student(family: str = "llama", layers: tuple[int, ...] = (0, 2), **changes: Any) -> PreTrainedModel:
    return tiny_student(family, layers=layers, **changes).to(DEVICE)


@torch.no_grad()
def read(model: Any, lengths: tuple[int, ...] = (13,), mask: Tensor | None = None, rows: int = 2) -> Tensor:
    """Logits of the tokens, read in parts of these lengths."""
    cache, found, first = DynamicCache(config=model.config), [], 0
    for length in lengths:
        last, options = first + length, {}
        if mask is not None:
            positions = (mask[:, :last].cumsum(-1) - 1).clamp(min=0)
            options = {"attention_mask": mask[:, :last], "position_ids": positions[:, first:]}
        found.append(model(TOKENS[:rows, first:last], past_key_values=cache, use_cache=True, **options).logits)
        first = last
    return torch.cat(found, dim=1)


@pytest.mark.skipif(ON_GPU, reason="compares the PyTorch forms")
@pytest.mark.parametrize(
    "changes", [*SETTINGS.values(), *({"mixer": name, **WINDOW} for name in MIXERS)], ids=[*SETTINGS, *MIXERS]
)
def test_on_a_cpu_every_bit_is_as_before(changes: dict[str, Any], apart: Any) -> None:
    model = student(layers=(1,), **changes).bfloat16()
    assert torch.equal(read(model, (9, 3, 1)), apart(read, model, (9, 3, 1)))


@pytest.mark.skipif(ON_GPU, reason="compares the PyTorch forms")
@pytest.mark.parametrize("family", ["phi3", "gemma2", "olmo2", "smollm3", "qwen3"])
def test_families_on_a_cpu(family: str, apart: Any) -> None:
    model = student(family, (0, 1), **WINDOW)
    assert torch.equal(read(model, (9, 4)), apart(read, model, (9, 4)))


@pytest.mark.parametrize(
    "name",
    ["beside a window", "nothing around the state", "faithful", pytest.param("activations", marks=pytest.mark.slow)],
)
def test_kernels_compute_the_same(name: str, joined: list[str], apart: Any) -> None:
    """Whole, in parts, and token by token."""
    model = student(layers=(0,), **SETTINGS[name])
    wanted = apart(read, model)
    assert not joined
    for lengths, rows in (((13,), 1), ((7, 1, 2), 2)):
        found = read(model, lengths, rows=rows)
        torch.testing.assert_close(found, wanted[:rows, : sum(lengths)], **ROUNDING)
    beside = "window" in SETTINGS[name]
    assert (
        joined[: 4 if beside else 2]
        == ["gate_values", "prompt_inputs", "window_keep", "window_mixture"][: 4 if beside else 2]
    )


@pytest.mark.parametrize("family", ["phi3", pytest.param("gemma3_text", marks=pytest.mark.slow)])
def test_kernels_in_other_families(family: str, joined: list[str], apart: Any) -> None:
    """Partly rotated heads; a window of the family's own, and learned norms."""
    model = student(family, (0,), **WINDOW)
    wanted = apart(read, model, (8,))
    torch.testing.assert_close(read(model, (5, 3)), wanted, **ROUNDING)
    assert set(joined) == JOINED


def test_kernels_of_several_writes(joined: list[str], apart: Any) -> None:
    model = student(layers=(0,), mixer="deltaproduct", **WINDOW, k_offset=True)
    torch.testing.assert_close(read(model, (9, 4), rows=1), apart(read, model)[:1], **ROUNDING)
    assert set(joined) == JOINED


def test_padding_keeps_the_separate_convolution(joined: list[str], apart: Any) -> None:
    model = student(layers=(0,), **WINDOW)
    mask = torch.ones_like(TOKENS)
    mask[1, :4] = 0
    real = mask.bool()
    wanted = apart(read, model, (13,), mask)
    torch.testing.assert_close(read(model, (9, 4), mask)[real], wanted[real], **ROUNDING)
    assert set(joined) == {"gate_values", "window_mixture"}


def test_packed_rows_keep_the_separate_convolution(joined: list[str], apart: Any) -> None:
    model = student(layers=(0,), **WINDOW)
    positions = torch.cat([torch.arange(8), torch.arange(5)]).expand(2, -1).to(DEVICE)

    @torch.no_grad()
    def packed() -> Tensor:
        return model(TOKENS, position_ids=positions, use_cache=False).logits

    torch.testing.assert_close(packed(), apart(packed), **ROUNDING)
    assert set(joined) == {"gate_values", "window_mixture"}


def test_gradients_take_nothing_of_it(joined: list[str]) -> None:
    model = student(**WINDOW)
    model(TOKENS, labels=TOKENS).loss.backward()
    assert not joined
    assert model.model.layers[0].self_attn.conv1d.weight.grad is not None


def test_a_compiler_sees_the_separate_operations(joined: list[str]) -> None:
    layer = student(layers=(0,), **WINDOW).model.layers[0].self_attn
    x, angles = torch.randn(1, 6, 32, device=DEVICE), torch.randn(2, 1, 6, 8, device=DEVICE)
    compiled = torch.compile(lambda: layer(x, tuple(angles))[0], backend="eager")
    with torch.no_grad():
        found = compiled()
        assert not joined
        torch.testing.assert_close(found, layer(x, tuple(angles))[0], **ROUNDING)
    assert joined


PARTS = {
    "conv1d": {"gate_values", "window_mixture", "window_keep"},
    "k_offset": {"gate_values", "window_mixture", "window_keep"},
    "decay": {"prompt_inputs", "window_mixture", "window_keep"},
    "norm": {"prompt_inputs", "gate_values"},
    "window_branch": {"prompt_inputs", "gate_values"},
    "window_branch.slopes": {"prompt_inputs", "gate_values"},
    "q_proj": JOINED,
    "window_branch.share_proj": JOINED,
}


@pytest.mark.parametrize(
    ("name", "put"), [*((name, "a hook") for name in PARTS), ("conv1d", "another forward"), ("norm", "another forward")]
)
def test_a_part_that_is_not_plain_is_called(name: str, put: str, joined: list[str], apart: Any) -> None:
    model, seen = student(layers=(0,), **WINDOW, k_offset=True), []
    part = model.model.layers[0].self_attn.get_submodule(name)
    if put == "a hook":
        part.register_forward_hook(lambda module, args, output: seen.append(output))
    else:
        own = part.forward
        part.forward = lambda *args, **kwargs: (seen.append(args), own(*args, **kwargs))[1]  # type: ignore[method-assign]
    found = read(model, rows=1)
    assert len(seen) == 1
    assert set(joined) == PARTS[name]
    torch.testing.assert_close(found, apart(read, model)[:1], **ROUNDING)


@pytest.mark.parametrize("switch_off", [switch_off_state, switch_off_window])
def test_a_share_that_is_replaced_counts(switch_off: Any, joined: list[str], apart: Any) -> None:
    model = student(layers=(0,), **WINDOW)
    whole = apart(read, model)
    found = read(switch_off(model), rows=1)
    assert "window_mixture" not in joined
    assert not torch.allclose(found, whole[:1], **ROUNDING)
    torch.testing.assert_close(found, apart(read, model)[:1], **ROUNDING)


def test_dropped_windows_keep_their_draws(joined: list[str]) -> None:
    model = student(layers=(0,), **WINDOW).train()
    read(model, (2,), rows=1)
    assert "window_mixture" not in joined


def test_adapters_count(joined: list[str], apart: Any) -> None:
    config = LoraConfig(target_modules=["q_proj", "share_proj", "g_proj"], modules_to_save=["conv1d", "slopes"])
    model = get_peft_model(student(layers=(0,), **WINDOW), config).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator).to(DEVICE))
    torch.testing.assert_close(read(model), apart(read, model), **ROUNDING)
    assert set(joined) == {"gate_values"}


class Operations(TorchDispatchMode):
    """Counts what is computed, views apart."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        shared = isinstance(output, Tensor) and any(
            isinstance(x, Tensor) and x.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()
            for x in args
        )
        if not shared:
            self.names.append(func._schema.name)
        return output


@pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter")
def test_operations_of_a_layer(joined: list[str], apart: Any) -> None:
    model = student("mistral", (0,), **WINDOW, expand_kv=False, state_dtype="bfloat16").bfloat16()
    layer = model.model.layers[0].self_attn
    x, angles = torch.randn(1, 6, 32).bfloat16(), tuple(torch.randn(2, 1, 6, 16).bfloat16())

    outputs: list[Tensor] = []

    @torch.no_grad()
    def operations() -> list[str]:
        real = Operator.unchecked

        def unchecked(operator: Operator[..., Any, Any], call: Any) -> Any:
            return operator.triton()(call)  # type: ignore[misc]

        Operator.unchecked = unchecked  # type: ignore[method-assign]
        try:
            with Operations() as counted:
                y, _ = layer(x, angles, past_key_values=DynamicCache(config=model.config))
            outputs.append(y)
        finally:
            Operator.unchecked = real  # type: ignore[method-assign]
        return counted.names

    before, after = apart(operations), operations()
    assert len(after) <= 15, " ".join(after)  # eight projections, six operators, the state in its dtype
    assert len(before) > 4 * len(after)
    rounding = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(outputs[1], outputs[0], rtol=rounding, atol=rounding * outputs[0].abs().max().item())


CHANGES: dict[str, Callable[[Any], Any]] = {
    "weights in place": lambda layer: [one.data.mul_(1.5) for one in layer.parameters()],
    "other memory": lambda layer: [setattr(one, "data", one.data * 1.5) for one in layer.parameters()],
    "other parameters": lambda layer: [
        setattr(module, name, torch.nn.Parameter(one.detach() * 1.5))
        for module in layer.modules()
        for name, one in list(module._parameters.items())
        if one is not None
    ],
    "loaded": lambda layer: layer.load_state_dict({name: one * 1.5 for name, one in layer.state_dict().items()}),
    "another dtype": lambda layer: layer.double().float().bfloat16().float(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_after_a_call_counts(change: str, apart: Any) -> None:
    model = student(layers=(0,), **WINDOW, k_offset=True)
    before = read(model, (3,), rows=1)
    with torch.no_grad():
        CHANGES[change](model.model.layers[0])
    found = read(model, (3,), rows=1)
    assert not torch.equal(found, before)
    torch.testing.assert_close(found, apart(read, model, (3,))[:1], **ROUNDING)


@pytest.mark.parametrize("name", ["conv1d", "norm", "decay", "window_branch.slopes"])
def test_hooks_after_a_call_count(name: str) -> None:
    model, seen = student(layers=(0,), **WINDOW, k_offset=True), []
    read(model, (3,), rows=1)
    hook = model.model.layers[0].self_attn.get_submodule(name).register_forward_hook(lambda *_: seen.append(1))
    read(model, (3,), rows=1)
    hook.remove()
    read(model, (3,), rows=1)
    assert seen == [1]


@torch.no_grad()
@pytest.mark.parametrize(
    ("angles", "error"),
    [((1, 4, 8), "cos"), ((3, 5, 8), "cos"), ((1, 5, 7), "cos"), ((1, 5, 64), "cos"), ((5, 8), "cos")],
)
def test_a_rotation_that_does_not_fit_is_refused(angles: tuple[int, ...], error: str) -> None:
    model = student(layers=(0,), **WINDOW)
    x = torch.zeros(2, 5, model.config.hidden_size, device=DEVICE)
    table = torch.ones(angles, device=DEVICE)
    with pytest.raises(ValueError, match=error):
        model.model.layers[0].self_attn(x, (table, table))


@torch.no_grad()
def test_a_prompt_without_tokens_is_refused() -> None:
    model = student(layers=(0,), **WINDOW)
    x, table = torch.zeros(1, 0, model.config.hidden_size), torch.zeros(1, 0, 8)
    with pytest.raises(ValueError, match="T >= 1"):
        model.model.layers[0].self_attn(x.to(DEVICE), (table.to(DEVICE), table.to(DEVICE)))
