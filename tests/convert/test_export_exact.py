"""A converted model and its export compute the same function, and the import undoes the export bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

from deltanet_convert.export.import_qwen3_5 import plan_import, write_import
from deltanet_convert.export.norms import centre, divide_columns, fold_factors, loses_bits, multiply_columns
from deltanet_convert.storage.saved_tokenizer import load_tokenizer, same_tokens
from deltanet_hf.errors import UserError
from support.float64 import Float64, assert_same_function, float64_logits
from support.tiny_export import EVERY_OTHER, ROTARY, exportable_model, exported, randomise, saved

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, every layer": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 1, 0, 1]}),
    "qwen3, hybrid": ("qwen3", {"layers": EVERY_OTHER}),
    "qwen3, hybrid, tied": ("qwen3", {"layers": EVERY_OTHER, "tie_word_embeddings": True}),
    "qwen3, hybrid, uneven": ("qwen3", {"layers": (1, 2)}),
    "grouped states": ("qwen3", {"layers": EVERY_OTHER, "wiring": {"expand_kv": False}}),
    "three taps": ("llama", {"wiring": {"conv_size": 3}}),
    "linear rotary": ("qwen3", {"layers": EVERY_OTHER, "rope_parameters": ROTARY["linear"]}),
    "llama 3's rotary": ("qwen3", {"layers": EVERY_OTHER, "rope_parameters": ROTARY["llama3"]}),
    "yarn": ("qwen3", {"layers": EVERY_OTHER, "rope_parameters": ROTARY["yarn"]}),
    "head size 64": ("qwen3", {"layers": (0,), "num_hidden_layers": 2, "head_dim": 64}),
    "head size 128": ("qwen3", {"layers": (0,), "num_hidden_layers": 2, "head_dim": 128}),
}


def build(case: str) -> PreTrainedModel:
    model_type, changes = CASES[case]
    return exportable_model(model_type, **changes)


def token_ids(rows: int = 2, length: int = 70) -> torch.Tensor:
    return torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(1))


def load(folder: Path, **kwargs: Any) -> Any:
    model, report = Qwen3_5ForCausalLM.from_pretrained(folder, output_loading_info=True, **kwargs)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return model.eval()


def restored(folder: Path, out: Path, dtype: torch.dtype | None = None) -> Path:
    plan = plan_import(folder, dtype, 10**9)
    write_import(plan, out, resume=False, overwrite=False, progress=lambda done, total: None)
    return out


def assert_same_tensors(first: Path, second: Path) -> None:
    one, two = load_file(first / "model.safetensors"), load_file(second / "model.safetensors")
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert tensor.dtype == two[name].dtype, name
        assert torch.equal(tensor, two[name]), name


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits_are_ours(case: str, tmp_path: Path) -> None:
    model = build(case)
    theirs = load(exported(saved(model, tmp_path / "model"), tmp_path / "out"))
    assert_same_function(model, theirs, token_ids())


@torch.no_grad()
def test_comparison_finds_small_errors(tmp_path: Path) -> None:
    """In one tap of a convolution, or in the epsilon of a norm."""
    model = build("llama, every layer")
    out = exported(saved(model, tmp_path / "model"), tmp_path / "out")
    tap, epsilon = load(out), load(out)
    tap.model.layers[1].linear_attn.conv1d.weight[0, 0, 0] += 1e-5
    epsilon.model.layers[1].linear_attn.norm.variance_epsilon *= 1.01
    for theirs in (tap, epsilon):
        with pytest.raises(AssertionError):
            assert_same_function(model, theirs, token_ids())


@pytest.mark.parametrize("kept", [(0,), (2, 3), (0, 3)])
@torch.no_grad()
def test_idle_layers_make_uneven_hybrids_even(kept: tuple[int, ...], tmp_path: Path) -> None:
    """Exports with idle layers, for runtimes in which every N-th layer is attention, and imports them again."""
    model = exportable_model("qwen3", tuple(sorted({0, 1, 2, 3} - set(kept))))
    out = exported(saved(model, tmp_path / "model"), tmp_path / "out", style="mlx")
    config = json.loads((out / "config.json").read_text())["text_config"]
    interval = config["full_attention_interval"]
    for place, kind in enumerate(config["layer_types"]):
        assert kind == ("linear_attention" if (place + 1) % interval else "full_attention")
    theirs, ids = AutoModelForCausalLM.from_pretrained(out).eval(), token_ids()
    greedy = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **greedy), theirs.generate(ids, **greedy))  # type: ignore[operator]
    assert_same_function(model, theirs, ids)
    assert_same_tensors(tmp_path / "model", restored(out, tmp_path / "back"))


@torch.no_grad()
def test_decoding_continues_the_prefill(tmp_path: Path) -> None:
    """Decoding the export token by token gives the model's output for the complete text."""
    model = build("grouped states")
    theirs = load(exported(saved(model, tmp_path / "model"), tmp_path / "out"))
    ids = token_ids(length=12)
    greedy = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **greedy), theirs.generate(ids, **greedy))  # type: ignore[operator]
    wanted = float64_logits(model, ids)
    theirs.double()
    with Float64():
        first = theirs(ids[:, :5], use_cache=True)
        cache, logits = first.past_key_values, [first.logits]
        for i in range(5, 12):
            step = theirs(ids[:, i : i + 1], past_key_values=cache, use_cache=True)
            logits.append(step.logits)
    assert (torch.cat(logits, dim=1) - wanted).abs().max() <= 1e-7


IN_LOGITS = ("mistral", "linear rotary", "llama 3's rotary", "head size")  # their tensors are those of other cases


@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, torch.bfloat16) for case in CASES if not case.startswith(IN_LOGITS)), ("grouped states", torch.float32)],
)
def test_import_gives_the_same_bits_back(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = build(case).to(dtype)
    for name, parameter in model.named_parameters():
        if name.endswith(("A_log", "dt_bias")):
            parameter.data = parameter.data.float()
    before = saved(model, tmp_path / "model")
    after = restored(exported(before, tmp_path / "out"), tmp_path / "back")
    assert_same_tensors(before, after)
    first, second = (json.loads((folder / "config.json").read_text()) for folder in (before, after))
    assert first == second


def test_an_import_in_fewer_bits_rounds_once(tmp_path: Path) -> None:
    before = saved(exportable_model("qwen3", EVERY_OTHER), tmp_path / "model")
    out = exported(before, tmp_path / "out")
    restored(out, tmp_path / "back", torch.bfloat16)
    source, found = (load_file(folder / "model.safetensors") for folder in (before, tmp_path / "back"))
    for name, tensor in found.items():
        assert torch.equal(tensor, source[name].to(tensor.dtype)), name


@torch.no_grad()
def test_bfloat16_norms_keep_every_bit(tmp_path: Path) -> None:
    """The bfloat16 export computed in float32 equals the bfloat16 model computed in float32."""
    folder = saved(exportable_model("qwen3", EVERY_OTHER, tie_word_embeddings=True).bfloat16(), tmp_path / "model")
    out = exported(folder, tmp_path / "out")
    stored = load_file(out / "model.safetensors")
    assert stored["model.layers.0.input_layernorm.weight"].dtype == torch.bfloat16
    assert stored["model.layers.1.self_attn.q_norm.weight"].dtype == torch.float32
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    theirs, ids = load(out, dtype=torch.float32), token_ids()
    assert_same_function(ours, theirs, ids)


def test_powers_of_two_move_only_where_bits_would_be_lost() -> None:
    weight = torch.tensor([0.2, -0.7, 0.5, 1.3, 2.7, 0.0]).bfloat16()
    factors = fold_factors(weight, torch.bfloat16)
    assert factors.tolist() == [4.0, -1.0, 1.0, 1.0, 1.0, 1.0]
    assert loses_bits(weight, torch.bfloat16).tolist() == [True, True, False, False, False, False]
    assert torch.equal(centre(weight * factors, torch.bfloat16).float() + 1, weight.float() * factors)
    matrix = torch.randn(3, 6).bfloat16()
    moved = divide_columns(matrix, factors, "w")
    assert torch.equal(moved.float() * factors, matrix.float())
    assert torch.equal(multiply_columns(moved, factors), matrix)
    assert fold_factors(torch.tensor([0.75, 1.0]), torch.bfloat16) is None


def test_head_is_written_apart_only_where_the_final_norm_needs_it(tmp_path: Path) -> None:
    model = build("qwen3, hybrid, tied").bfloat16()
    out = exported(saved(model, tmp_path / "model"), tmp_path / "untied")
    assert "lm_head.weight" in load_file(out / "model.safetensors")
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    with torch.no_grad():
        model.model.norm.weight.clamp_(min=0.5)
    out = exported(saved(model, tmp_path / "other"), tmp_path / "tied")
    assert "lm_head.weight" not in load_file(out / "model.safetensors")
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is True


def test_dtype_is_the_one_asked_for(tmp_path: Path) -> None:
    out = exported(saved(build("qwen3, hybrid"), tmp_path / "model"), tmp_path / "out", dtype=torch.bfloat16)
    stored = load_file(out / "model.safetensors")
    wide = {name for name, tensor in stored.items() if tensor.dtype == torch.float32}
    assert {name.split(".")[-2] if name.endswith("weight") else name.split(".")[-1] for name in wide} == {
        "q_norm",
        "k_norm",
        "A_log",
        "dt_bias",
    }
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32, torch.bfloat16}
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def test_config_says_what_every_runtime_reads(tmp_path: Path) -> None:
    hybrid = exported(saved(build("qwen3, hybrid"), tmp_path / "model"), tmp_path / "out")
    config = json.loads((hybrid / "config.json").read_text())
    assert config["model_type"] == "qwen3_5_text"
    assert config["architectures"] == ["Qwen3_5ForCausalLM"]
    assert config["layer_types"] == ["linear_attention", "full_attention"] * 2
    assert config["full_attention_interval"] == 2
    assert config["rope_parameters"]["partial_rotary_factor"] == 1.0
    assert sum(config["rope_parameters"]["mrope_section"]) == config["head_dim"] // 2
    assert "deltanet" not in config
    whole = exported(saved(build("llama, every layer"), tmp_path / "whole"), tmp_path / "mlx", style="mlx")
    config = json.loads((whole / "config.json").read_text())
    assert config["model_type"] == "qwen3_5"
    assert config["eos_token_id"] == 2
    config = config["text_config"]
    assert config["num_hidden_layers"] == 5  # the idle layer's cache counts tokens
    assert config["full_attention_interval"] == 5


def test_folder_is_complete(tmp_path: Path) -> None:
    source = saved(build("llama, every layer"), tmp_path / "model")
    (source / "LICENSE").write_text("terms")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "generation_config.json").write_text('{"temperature": 0.7, "do_sample": true}')
    (source / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n")
    out = exported(source, tmp_path / "out", shard_size=20_000)
    assert (out / "LICENSE").read_text() == "terms"
    assert (out / "chat_template.jinja").read_text() == "{{ messages }}"
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlicense: mit\n---\n")
    assert "Qwen3_5ForCausalLM" in card
    assert "AutoModelForCausalLM.from_pretrained" in card
    assert "# Mine" in card
    assert "`deltanet-hf import` undoes the export" in card
    assert json.loads((out / "generation_config.json").read_text())["temperature"] == 0.7
    assert len(list(out.glob("model-*-of-*.safetensors"))) > 1
    text = "every word, 1 2 3"
    assert (
        AutoTokenizer.from_pretrained(out)(text)["input_ids"]
        == AutoTokenizer.from_pretrained(source)(text)["input_ids"]
    )
    assert load(out).config.num_hidden_layers == 5


def test_trained_export_is_not_undone_silently(tmp_path: Path) -> None:
    out = exported(saved(build("grouped states"), tmp_path / "model"), tmp_path / "out")
    model = load(out)
    randomise(model, seed=3)
    model.save_pretrained(out)
    with pytest.raises(UserError, match=r"export\.json"):
        restored(out, tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("key", ["source", "slots", "factors", "rounded"])
def test_a_damaged_record_of_an_export_is_refused(key: str, tmp_path: Path) -> None:
    out = exported(saved(build("grouped states"), tmp_path / "model"), tmp_path / "out")
    record = json.loads((out / "export.json").read_text())
    (out / "export.json").write_text(json.dumps({**record, key: None}))
    with pytest.raises(UserError, match=r"export\.json: is damaged, .*copy it again, or remove it"):
        restored(out, tmp_path / "back")


def test_mlx_export_keeps_its_tokenizer(tmp_path: Path) -> None:
    """transformers has its own tokenizer class for the model_type by which mlx-lm finds the model; it is not used."""
    source = saved(build("llama, every layer"), tmp_path / "model")
    out = exported(source, tmp_path / "out", style="mlx")
    card = (out / "README.md").read_text()
    assert "from mlx_lm import" in card
    assert "AutoModelForCausalLM" not in card
    text = "every word, 1 2 3"
    wanted = AutoTokenizer.from_pretrained(source)(text)["input_ids"]
    for trusted in (None, False, True):  # mlx-lm passes all three
        options = {} if trusted is None else {"trust_remote_code": trusted}
        assert AutoTokenizer.from_pretrained(out, **options)(text)["input_ids"] == wanted
    back = restored(out, tmp_path / "back")
    assert "auto_map" not in json.loads((back / "tokenizer_config.json").read_text())
    assert AutoTokenizer.from_pretrained(back, trust_remote_code=True)(text)["input_ids"] == wanted
    config = json.loads((out / "tokenizer_config.json").read_text())
    del config["auto_map"]
    (out / "tokenizer_config.json").write_text(json.dumps(config))
    if not same_tokens(*map(load_tokenizer, (source, out))):  # in newer transformers, the key makes the difference
        assert AutoTokenizer.from_pretrained(out)(text)["input_ids"] != wanted
    assert not (exported(source, tmp_path / "plain") / "own_tokenizer.py").exists()
