"""Imported Qwen3.5 text checkpoints: same function, same bits, with the cache and packing of deltanet-hf."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

from deltanet_convert.export.import_qwen3_5 import plan_import, write_import
from deltanet_convert.export.obstacles import export_obstacles
from deltanet_convert.teacher_model import is_qwen3_5
from deltanet_hf.errors import UserError
from deltanet_hf.mixers.gated_deltanet import GatedDeltaNet
from deltanet_hf.models.qwen3_5 import DeltaNetQwen3_5ForCausalLM, DeltaNetQwen3_5TextConfig
from support.tiny_conversion import tiny_tokenizer
from support.tiny_export import SIZES, exported, randomise

QWEN3_5: dict[str, Any] = {
    **SIZES,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
    },
}


def qwen3_5_folder(folder: Path, **changes: Any) -> Path:
    """A random Qwen3.5 text checkpoint: three linear layers, one gated attention layer."""
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{**QWEN3_5, **changes}))
    randomise(model, scale=0.1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight") and "linear_attn" not in name:
                parameter -= 1.0  # zero-centred
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def imported(folder: Path, out: Path, dtype: torch.dtype | None = None) -> Path:
    plan = plan_import(folder, dtype, 30_000)
    write_import(plan, out, resume=False, overwrite=False, progress=lambda done, total: None)
    return out


def both(tmp_path: Path, **changes: Any) -> tuple[Any, Any]:
    folder = qwen3_5_folder(tmp_path / "qwen3_5", **changes)
    theirs = Qwen3_5ForCausalLM.from_pretrained(folder).eval()
    ours, report = AutoModelForCausalLM.from_pretrained(imported(folder, tmp_path / "ours"), output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return theirs, ours.eval()


def token_ids(rows: int = 2, length: int = 70) -> torch.Tensor:
    return torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_same_function_and_same_continuation(tied: bool, tmp_path: Path) -> None:
    theirs, ours = both(tmp_path, tie_word_embeddings=tied)
    assert sum(isinstance(module, GatedDeltaNet) for module in ours.modules()) == 3
    ids = token_ids()
    assert (theirs(ids).logits - ours(ids).logits).abs().max() <= 1e-4
    greedy = {"max_new_tokens": 10, "do_sample": False}
    assert torch.equal(theirs.generate(ids, **greedy), ours.generate(ids, **greedy))


@torch.no_grad()
def test_batches_of_uneven_prompts_are_continued_as_alone(tmp_path: Path) -> None:
    _, ours = both(tmp_path)
    ids, mask = token_ids(rows=2, length=12), torch.ones(2, 12, dtype=torch.long)
    mask[1, :5] = 0
    greedy: dict[str, Any] = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    together = ours.generate(ids * mask, attention_mask=mask, **greedy)[:, 12:]
    assert torch.equal(together[0], ours.generate(ids[:1], **greedy)[0, 12:])
    assert torch.equal(together[1], ours.generate(ids[1:, 5:], **greedy)[0, 7:])


def test_lora_trains_an_import_that_can_be_exported_again(tmp_path: Path) -> None:
    """PEFT's default target modules are found, and the merged model is exported as Qwen3.5 again."""
    _, ours = both(tmp_path)
    ids = token_ids(length=16)
    before = ours(ids, labels=ids).loss.item()
    adapted = get_peft_model(ours, LoraConfig(r=4)).train()
    trained = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for _ in range(10):
        loss = adapted(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert {name.split(".lora_")[0].split(".")[-1] for name, p in adapted.named_parameters() if p.requires_grad} == {
        "q_proj",
        "v_proj",
    }
    merged = adapted.merge_and_unload().eval()
    assert merged(ids, labels=ids).loss.item() < before - 0.1
    merged.save_pretrained(tmp_path / "merged")
    tiny_tokenizer().save_pretrained(tmp_path / "merged")
    theirs = Qwen3_5ForCausalLM.from_pretrained(exported(tmp_path / "merged", tmp_path / "out")).eval()
    with torch.no_grad():
        assert (theirs(ids).logits - merged(ids).logits).abs().max() <= 1e-4


def test_export_undoes_the_import(tmp_path: Path) -> None:
    folder = qwen3_5_folder(tmp_path / "qwen3_5")
    ours = imported(folder, tmp_path / "ours")
    assert export_obstacles(DeltaNetQwen3_5TextConfig.from_pretrained(ours)) == []
    again = exported(ours, tmp_path / "again")
    before, after = load_file(folder / "model.safetensors"), load_file(again / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    config, back = (Qwen3_5TextConfig.from_pretrained(f).to_dict() for f in (folder, again))
    assert {k: v for k, v in back.items() if k != "full_attention_interval"} == config
    third = imported(again, tmp_path / "third")
    assert load_all(ours).keys() == load_all(third).keys()
    assert all(torch.equal(tensor, load_all(third)[name]) for name, tensor in load_all(ours).items())


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def test_text_model_beside_a_vision_tower(tmp_path: Path) -> None:
    """A checkpoint like the official ones: nested config, another prefix, tensors of a vision tower."""
    folder = qwen3_5_folder(tmp_path / "qwen3_5")
    plain = imported(folder, tmp_path / "plain")
    weights = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    weights |= {"model.visual.patch_embed.weight": torch.zeros(2), "mtp.fc.weight": torch.zeros(2)}
    save_file(weights, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    whole = {"model_type": "qwen3_5", "text_config": text, "vision_config": {}, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(whole))
    assert is_qwen3_5(whole)
    nested = imported(folder, tmp_path / "nested")
    one, two = load_all(plain), load_all(nested)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert json.loads((plain / "config.json").read_text()) == json.loads((nested / "config.json").read_text())


def test_decays_stay_float32(tmp_path: Path) -> None:
    out = imported(qwen3_5_folder(tmp_path / "qwen3_5"), tmp_path / "ours", torch.bfloat16)
    wide = {name.split(".")[-1] for name, tensor in load_all(out).items() if tensor.dtype == torch.float32}
    assert wide == {"A_log", "dt_bias"}
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.model.layers[0].linear_attn.decay.A_log.dtype == torch.float32
    assert model.dtype == torch.bfloat16


def test_gradients_reach_every_parameter(tmp_path: Path) -> None:
    config = DeltaNetQwen3_5TextConfig(**QWEN3_5)
    model = DeltaNetQwen3_5ForCausalLM(config)
    randomise(model)
    ids = token_ids(length=9)
    model(ids, labels=ids).loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not bool(p.grad.any())] == []


def test_unsupported_sizes_and_other_tensors_are_named(tmp_path: Path) -> None:
    for key, value, message in (("linear_key_head_dim", 8, "linear_key_"), ("linear_conv_kernel_dim", 5, "conv_size")):
        with pytest.raises(UserError, match=message):
            plan_import(qwen3_5_folder(tmp_path / key, **{key: value}), None, 10**9)
    folder = qwen3_5_folder(tmp_path / "qwen3_5")
    weights = load_file(folder / "model.safetensors")
    conv, projection = (f"model.layers.0.linear_attn.{name}.weight" for name in ("conv1d", "in_proj_qkv"))
    for name, tensor in ((conv, weights[conv].mT), (projection, weights[projection][:-16])):  # mlx-lm's own has conv.mT
        save_file({**weights, name: tensor.contiguous()}, folder / "model.safetensors")
        with pytest.raises(UserError, match=rf"model\.safetensors: tensor '{name}' has shape"):
            plan_import(folder, None, 10**9)
    del weights["model.layers.2.linear_attn.A_log"]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"layers\.2\.linear_attn\.A_log"):
        imported(folder, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
