"""Behaviour that one family stands for: caches, checkpointing, dtypes, offload, registration."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    DynamicCache,
    PreTrainedModel,
    StaticCache,
    pipeline,
)

from deltanet_hf import LayerTable, converted_config
from deltanet_hf.errors import UserError
from deltanet_hf.mixers import FLOAT32_NAMES
from deltanet_hf.models.families import FAMILIES
from support.read_in_parts import read_in_parts
from support.refusals import assert_refused
from support.tiny_models import (
    HYBRID,
    LAYERS,
    mixed_table,
    mixture_table,
    teacher_config,
    tiny_mixture,
    tiny_qwen3_5,
    tiny_student,
    tiny_table,
    tiny_teacher,
)


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(3, 97, (2, 21), generator=torch.Generator().manual_seed(2))


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_mixture("llama", mixture_table())


def test_data_classes_that_are_called_are_not_frozen() -> None:
    """torch.compile in torch 2.11 cannot call an instance of a frozen one, and training calls those of attention."""
    modules = [module for name, module in sys.modules.items() if name.startswith("deltanet_hf.mixers")]
    classes = {kind for module in modules for kind in vars(module).values() if isinstance(kind, type)}
    called = {kind for kind in classes if is_dataclass(kind) and "__call__" in vars(kind)}
    assert {"PackedCall", "SoftmaxCall", "Scores"} <= {kind.__name__ for kind in called}
    assert not any(kind.__dataclass_params__.frozen for kind in called)  # type: ignore[attr-defined]


def test_a_cache_made_without_config_works(model: PreTrainedModel, tokens: torch.Tensor) -> None:
    found = read_in_parts(model, tokens, [13, 8], cache=DynamicCache())
    torch.testing.assert_close(found, model(tokens).logits, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("table", [tiny_table(), mixture_table()], ids=["all", "mixture"])
def test_static_cache_equals_dynamic(table: LayerTable, tokens: torch.Tensor) -> None:
    model = tiny_mixture("qwen3", table)
    mask = torch.ones_like(tokens)
    mask[1, :4] = 0
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "attention_mask": mask}
    dynamic = model.generate(tokens, **options)
    static = model.generate(tokens, cache_implementation="static", disable_compile=True, **options)
    assert static.tolist() == dynamic.tolist()


@torch.no_grad()
@pytest.mark.parametrize("name", ["gated_deltanet", "window", "mixed_heads"])
def test_a_static_cache_is_as_good_beyond_the_sliding_window_of_all_layers(name: str, tokens: torch.Tensor) -> None:
    """Such a cache does not know how many tokens there may be, and no token behind the window is padding."""
    table = mixed_table("linear", "window") if name == "mixed_heads" else tiny_table(mixer=name)
    model, mask = tiny_mixture("mistral", table), torch.ones_like(tokens)
    mask[1, :4] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    wanted = model(tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits
    for parts in ([tokens.shape[1]], [5, *[1] * (tokens.shape[1] - 5)], [3, 10, tokens.shape[1] - 13]):
        found = read_in_parts(model, tokens, parts, mask, StaticCache(config=model.config, max_cache_len=32))
        torch.testing.assert_close(found[mask.bool()], wanted[mask.bool()], rtol=2e-4, atol=2e-4)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "attention_mask": mask}
    static = model.generate(tokens, cache_implementation="static", disable_compile=True, **options)
    assert static.tolist() == model.generate(tokens, **options).tolist()


def test_masks_of_eager_attention(tokens: torch.Tensor, tmp_path: Path) -> None:
    tiny_student("gemma3_text", "qwen3_5", HYBRID).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    mask = torch.ones_like(tokens)
    mask[1, :6] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    padded = model(tokens, attention_mask=mask, position_ids=positions).logits[1:, 6:]
    torch.testing.assert_close(padded, model(tokens[1:, 6:]).logits, rtol=2e-4, atol=2e-4)


def test_nan_in_padding_does_not_spread() -> None:
    model = tiny_student("llama", "faithful")
    hidden = torch.randn(1, 6, 32)
    hidden[:, :2] = float("nan")
    positions = model.model.rotary_emb(hidden, torch.arange(6).unsqueeze(0))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
    output, _ = model.model.layers[0].self_attn(hidden, positions, mask)
    assert output[:, 2:].isfinite().all()


def test_packed_rows_of_a_batch_do_not_leak(model: PreTrainedModel, tokens: torch.Tensor) -> None:
    positions = torch.stack([torch.cat([torch.arange(9), torch.arange(12)]), torch.arange(21)])
    packed = model(tokens, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(packed[1:], model(tokens[1:]).logits, rtol=2e-4, atol=2e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", ["gated_deltanet", "window", "path"])
def test_one_row_of_packed_positions_stands_for_all_rows(name: str, tokens: torch.Tensor) -> None:
    model = tiny_student("llama", mixer=name)
    positions = torch.cat([torch.arange(9), torch.arange(12)])[None]
    wanted = torch.cat([model(tokens[:, :9]).logits, model(tokens[:, 9:]).logits], dim=1)
    torch.testing.assert_close(model(tokens, position_ids=positions).logits, wanted, rtol=2e-4, atol=2e-4)
    embeddings = model.get_input_embeddings()(tokens)
    found = model(inputs_embeds=embeddings, position_ids=positions).logits
    torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-4)


def test_packed_input_with_a_cache_is_refused(model: PreTrainedModel, tokens: torch.Tensor) -> None:
    boundaries = torch.tensor([0, 4, 21], dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seq_lens_q"):
        model.model.layers[0].self_attn(
            torch.randn(1, 21, 32),
            model.model.rotary_emb(torch.randn(1, 21, 32), torch.arange(21).unsqueeze(0)),
            past_key_values=DynamicCache(config=model.config),
            cu_seq_lens_q=boundaries,
        )


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_gives_the_same_gradients(
    reentrant: bool, model: PreTrainedModel, tokens: torch.Tensor
) -> None:
    model.train()

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = gradients()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    checkpointed = gradients()
    assert len(plain) == len(checkpointed)
    for one, other in zip(plain, checkpointed, strict=True):
        torch.testing.assert_close(one, other)


def test_autocast_over_float32_weights_trains(tokens: torch.Tensor) -> None:
    model = tiny_student("qwen3", layers=HYBRID, mixer="deltaproduct").train()
    exact = model(tokens, labels=tokens).loss
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens, labels=tokens).loss
    loss.backward()
    torch.testing.assert_close(loss.float(), exact, rtol=3e-2, atol=0)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("make", [partial(tiny_student, "gemma3_text"), tiny_qwen3_5])
def test_other_heads_than_a_language_model_s_are_refused(make: Callable[[], PreTrainedModel], tmp_path: Path) -> None:
    """Embeddings, rewards, answers, images: before, pipelines took logits for what they had asked for."""
    config = make().config
    config.save_pretrained(tmp_path)
    only = "a converted model has the head of a language model only; load it with AutoModelForCausalLM"
    others = AutoModel, AutoModelForSequenceClassification, AutoModelForQuestionAnswering, AutoModelForImageTextToText
    for auto in others:
        for call in (lambda auto=auto: auto.from_pretrained(tmp_path), lambda auto=auto: auto.from_config(config)):
            with pytest.raises(UserError, match=only):
                call()
    for task in ("feature-extraction", "text-classification", "token-classification"):
        with pytest.raises(UserError, match=rf"^{tmp_path}: {only}"):
            pipeline(task, str(tmp_path))


def test_transformers_serve_loads_the_causal_model(tmp_path: Path) -> None:
    """Newer versions ask for a decision model first, and end at any error but ValueError."""
    from transformers.cli.serving.model_manager import ModelManager

    tiny_student("llama").save_pretrained(tmp_path)
    loaded = ModelManager(device="cpu", trust_remote_code=True)._load_model(f"{tmp_path}@main")
    assert type(loaded).__name__ == "DeltaNetLlamaForCausalLM"


def test_parameters_of_float32_stay_so(tmp_path: Path, tokens: torch.Tensor) -> None:
    model = tiny_student("llama", window=5)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    dtypes = {name.split(".")[-1]: p.dtype for name, p in loaded.named_parameters()}
    assert {dtypes[name] for name in ("A_log", "dt_bias", "far_slope", "near_slope")} == {torch.float32}
    assert dtypes["weight"] == torch.bfloat16
    cache = DynamicCache(config=loaded.config)
    assert loaded(tokens, past_key_values=cache).logits.dtype == torch.bfloat16
    assert cache.layers[0].state["state"].dtype == torch.float32


@pytest.mark.parametrize("mixer", ["gated_deltanet+window", "kda", "fox"])
def test_a_model_in_bfloat16_is_loaded_in_the_dtypes_of_its_file(
    mixer: str, tmp_path: Path, tokens: torch.Tensor
) -> None:
    model = tiny_student("llama", mixer=mixer).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[2] in FLOAT32_NAMES:
            parameter.data = parameter.data.float()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    saved = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert {name: parameter.dtype for name, parameter in loaded.named_parameters()} == saved
    assert loaded(tokens).logits.dtype == torch.bfloat16


def test_tensor_parallel_plan_spares_converted_layers() -> None:
    plan = tiny_student("llama", "faithful", HYBRID).config.base_model_tp_plan
    attention = sorted(name for name in plan if ".self_attn." in name)
    assert attention == [f"layers.{i}.self_attn.{p}_proj" for i in (1, 3) for p in "koqv"]
    assert "layers.*.mlp.down_proj" in plan


def test_shim_loads_in_a_process_that_never_imported_the_plugin(tmp_path: Path) -> None:
    tiny_student("llama", "qwen3_5", HYBRID).save_pretrained(tmp_path / "model")
    script = (
        "import transformers\n"
        f"m = transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path / 'model')!r}, trust_remote_code=True)\n"
        "assert getattr(transformers, m.config.architectures[0]) is type(m)\n"  # as `transformers serve` does
        "print(type(m).__name__, type(m.model.layers[0].self_attn).__name__)\n"
    )
    paths = {"PYTHONPATH": ":".join(p for p in sys.path if p), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=paths, check=False)
    assert run.stdout.split() == ["DeltaNetLlamaForCausalLM", "GatedDeltaNet"], run.stderr


def test_a_config_without_its_table_is_refused(tmp_path: Path) -> None:
    tiny_student("llama").config.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    for found in (None, {}):
        (tmp_path / "config.json").write_text(json.dumps({**values, "deltanet": found}))
        with pytest.raises(ValueError, match=r"deltanet: missing key in config\.json"):
            AutoConfig.from_pretrained(tmp_path)


def test_the_default_table_is_saved_too(tmp_path: Path) -> None:
    config = FAMILIES["llama"].config_class(vocab_size=97, hidden_size=32, intermediate_size=48)
    converted_config(config, LayerTable.preset(config.num_hidden_layers)).save_pretrained(tmp_path)
    assert len(AutoConfig.from_pretrained(tmp_path).deltanet["layers"]) == config.num_hidden_layers


def test_a_second_save_is_complete_too(tmp_path: Path) -> None:
    tiny_student("llama").save_pretrained(tmp_path / "one")
    AutoModelForCausalLM.from_pretrained(tmp_path / "one").save_pretrained(tmp_path / "two")
    names = [{path.name for path in (tmp_path / folder).iterdir()} for folder in ("one", "two")]
    assert names[0] == names[1]
    shutil.rmtree(tmp_path / "one")
    assert AutoConfig.from_pretrained(tmp_path / "two").deltanet["layers"] == ["linear"] * LAYERS


WRONG: list[tuple[str, object, str]] = [
    ("kinds.linear.mixer", "hybrid", r"deltanet\.kinds\.linear\.mixer: got 'hybrid', expected one of gated_deltanet"),
    ("kinds.linear.mixer", None, r"deltanet\.kinds\.linear\.mixer: missing key"),
    ("kinds.linear", 3, r"deltanet\.kinds\.linear\.mixer: missing key"),
    ("kinds.softmax", {"mixer": "window"}, r"deltanet\.kinds: 'softmax' cannot be the name"),
    ("kinds", [], r"deltanet\.kinds: got \[\]"),
    ("layers", ["linear"] * 3, r"deltanet\.layers: got 3 names, but the model has 4 layers"),
    ("layers", "linear", r"deltanet\.layers: got 'linear' names"),
    ("layers", ["linear", "local", "softmax", "linear"], r"deltanet\.layers: layer 1 is 'local', expected one of"),
    ("kinds.linear.conv_size", 1, r"deltanet\.kinds\.linear\.conv_size"),
    ("kinds.linear.rope", "yes", r"deltanet\.kinds\.linear\.rope"),
    ("kinds.linear.heads", 3, r"deltanet\.kinds\.linear\.heads: unknown key"),
    ("profile", "faithful", r"deltanet: got keys \['kinds', 'layers', 'profile'\]"),
]


def test_wrong_tables_name_the_key() -> None:
    base = converted_config(teacher_config("llama"), LayerTable.preset(LAYERS))

    def changed(path: str, value: object) -> None:
        table: Any = LayerTable.preset(LAYERS).to_dict()
        place, keys = table, path.split(".")
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value
        type(base)(**{**base.to_dict(), "deltanet": table})

    assert_refused(changed, [({"path": path, "value": value}, ValueError, message) for path, value, message in WRONG])
    table: Any = LayerTable.preset(LAYERS).to_dict()
    del table["kinds"]["linear"]["rope"]
    with pytest.raises(ValueError, match=r"deltanet\.kinds\.linear\.rope: missing key"):
        LayerTable.from_dict(table, LAYERS)


def test_nothing_converted_equals_the_teacher(tokens: torch.Tensor) -> None:
    for family in FAMILIES:
        teacher = tiny_teacher(family)
        model = tiny_student(family, layers=())
        model.load_state_dict(teacher.state_dict())
        teacher.set_attn_implementation(model.config._attn_implementation)  # transformers 5.17: SDPA for Gemma 2
        assert torch.equal(model(tokens).logits, teacher(tokens).logits)
