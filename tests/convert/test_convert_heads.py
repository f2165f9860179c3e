"""Conversions that keep single key/value heads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, DynamicCache

from deltanet_convert.compare_to_teacher import softmax_error
from deltanet_convert.job import prepare
from deltanet_convert.options import ConvertOptions
from deltanet_convert.start import START
from deltanet_convert.start.samples import LayerCalibration
from deltanet_convert.views.plan_view import print_plan
from deltanet_hf import LayerTable
from deltanet_hf.errors import QualityError, UserError
from deltanet_hf.mixers import mixed_heads as mixed_module
from deltanet_hf.mixers.attention.head_split import narrow_weights
from deltanet_hf.mixers.cache.cache_bytes import cache_bytes
from deltanet_hf.mixers.gated_deltanet import GatedDeltaNet
from deltanet_hf.mixers.mixed_heads import MixedHeads
from deltanet_hf.models.restrict import restrict_heads
from support.blank_layers import layer_inputs
from support.tiny_conversion import quick_start, teacher_folder, tiny_conversion, tiny_job
from support.tiny_models import LAYERS, mixed_heads, tiny_teacher
from support.tiny_selection import selection_file

KEPT = [[0, 1], [1, 0], [1, 1], [3, 1]]  # layer 1 whole, layer 2 not at all
WANTED = ("heads_1", "softmax", "linear", "heads_1")
start_mixed_heads = START["mixed_heads"]
IDS = torch.randint(4, 60, (2, 40), generator=torch.Generator().manual_seed(0))


def selection(folder: Path, model_type: str = "llama", kept: Any = KEPT) -> str:
    """A selection of heads for the family's tiny teacher."""
    return selection_file(folder, model_type=model_type, kept=kept)


@pytest.mark.usefixtures("quick_fit")
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3", "gpt_oss"])
@torch.no_grad()
def test_families_convert_by_heads(tmp_path: Path, family: str) -> None:
    teacher = teacher_folder(tmp_path / "teacher", family)
    report = tiny_conversion(teacher, tmp_path / "out", layers=selection(tmp_path, family))
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert LayerTable.of(model.config).layers == WANTED
    assert [layer["index"] for layer in report["layers"]] == [0, 2, 3]
    assert max(layer["softmax_error"] for layer in report["layers"]) < 1e-5
    plan = report["plan"]
    assert plan["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    # Learned sinks have no place in states.
    dropped = [2, 0, 4, 2] if family == "gpt_oss" else [0] * LAYERS
    assert [layer["dropped"] for layer in plan["layers"]] == dropped
    for layer, module in zip(plan["layers"], model.model.layers, strict=True):
        counts = [layer[key] for key in ("copied", "expanded", "created")]
        assert sum(counts) == sum(parameter.numel() for parameter in module.parameters())

    # Kept heads compute what the teacher's do.
    original = AutoModelForCausalLM.from_pretrained(teacher, attn_implementation="eager")
    whole, mixed = original.model.layers[0].self_attn, model.model.layers[0].self_attn
    assert isinstance(mixed, MixedHeads)
    for name, tensor in narrow_weights(whole, mixed.softmax, [1]).items():
        assert torch.equal(mixed.softmax.state_dict()[name], tensor), name

    # The measured perplexity is that of the loaded model, and the planned bytes are those of its cache.
    ids = tiny_job(teacher, tmp_path / "again", layers=selection(tmp_path, family))
    assert ids.table.layers == WANTED
    cache = DynamicCache(config=model.config)
    model(IDS[:1], past_key_values=cache, use_cache=True)
    expected = 0
    for layer in plan["layers"]:
        tokens = min(40, layer["window"] - 1) if layer["window"] else 40
        expected += layer["state_bytes"] + layer["kept_kv_bytes_per_token"] * tokens
    assert cache_bytes(cache) == expected


@pytest.mark.usefixtures("short_fit")
@pytest.mark.parametrize("mixer", ["window", "deltaproduct", "gated_deltanet+window"])
@torch.no_grad()
def test_other_heads_take_the_mixer(tmp_path: Path, mixer: str) -> None:
    teacher = teacher_folder(tmp_path / "teacher", "qwen3")
    changes = ("window=7", "sinks=1") if mixer == "window" else ()
    report = tiny_conversion(
        teacher, tmp_path / "out", layers=selection(tmp_path, "qwen3"), mixer=mixer, changes=changes
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    mixed = model.model.layers[0].self_attn
    assert [layer["index"] for layer in report["layers"]] == [0, 2, 3]
    card = (tmp_path / "out" / "README.md").read_text()
    if mixer != "window":
        assert "but for 2 key/value heads, which see all; layers 1 keep softmax attention." in card
        windows = " and windows of 256 tokens" if mixer.endswith("+window") else ""
        assert f"\n# teacher with {mixed.linear.title} layers{windows}\n" in card
        assert mixed.linear.name == mixer.removesuffix("+window")
        assert (mixed.linear.settings.window > 0) == mixer.endswith("+window")
        assert max(layer["softmax_error"] for layer in report["layers"]) < 1e-5
        return
    original = AutoModelForCausalLM.from_pretrained(teacher).eval()
    kept = {0: [1], 1: [0, 1], 3: [1]}
    torch.testing.assert_close(
        model(IDS).logits, restrict_heads(original, kept, 7, 1)(IDS).logits, rtol=1e-5, atol=2e-5
    )
    assert sum(layer["created"] + layer["dropped"] for layer in report["plan"]["layers"]) == 0
    assert "see\nthe last 7 tokens and the first 1, but for 2 key/value heads, which see all; layers 1 see all." in card
    assert "All weights are the teacher's" in card


def blank(family: str, *heads: str) -> MixedHeads:
    """A layer with mixed heads whose weights are NaN."""
    teacher: Any = tiny_teacher(family, attn_implementation="eager")
    kind = mixed_heads(*heads)
    layer = MixedHeads(teacher.model.layers[0].self_attn, teacher.config, 0, kind.settings)
    layer.requires_grad_(False)
    for name, parameter in layer.named_parameters():
        if not name.endswith("conv1d.weight"):
            parameter.fill_(torch.nan)
    return layer


@torch.no_grad()
def test_the_linear_branch_is_fitted_to_the_output_of_its_own_heads() -> None:
    """A fit to the whole attention's output would not come near that of one head alone."""
    teacher = tiny_teacher("llama", attn_implementation="eager")
    attention, states, kwargs = layer_inputs(teacher, 0)
    layer = blank("llama", "softmax", "linear")
    figures = start_mixed_heads(attention, layer, LayerCalibration(states, kwargs))
    part = layer.part_of(attention, "linear")
    want = torch.cat([part(hidden_states=row, **kwargs)[0] for row in states.split(1)])
    got = torch.cat([layer.linear(hidden_states=row, **kwargs)[0] for row in states.split(1)])
    error = float((got - want).square().sum() / want.square().sum())
    assert error == pytest.approx(figures["fit_mse"], rel=1e-3)
    assert error < 0.9
    assert isinstance(layer.linear, GatedDeltaNet)
    assert len(figures["half_life"]) == layer.linear.num_states == 2


@pytest.mark.parametrize("heads", [("softmax", "linear"), ("linear", "window"), ("window", "softmax")])
@torch.no_grad()
def test_wrong_weights_of_any_branch_show_in_the_softmax_error(heads: tuple[str, ...]) -> None:
    attention, states, kwargs = layer_inputs(tiny_teacher("llama", attn_implementation="eager"), 0)
    layer = blank("llama", *heads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(START, "gated_deltanet", quick_start)
        start_mixed_heads(attention, layer, LayerCalibration(states, kwargs))
    assert softmax_error(attention, layer, states[:1], kwargs) < 1e-5
    for branch in layer.branches.values():
        for name in ("q_proj", "v_proj", "o_proj"):
            weight = getattr(branch, name).weight
            before = weight.clone()
            weight.copy_(weight.flip(0))
            assert softmax_error(attention, layer, states[:1], kwargs) > 1e-2, name
            weight.copy_(before)


@pytest.mark.usefixtures("quick_fit")
def test_a_conversion_with_wrong_rows_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def other_heads(attention: Any, narrow: Any, heads: Any) -> dict[str, torch.Tensor]:
        return narrow_weights(attention, narrow, [1 - head for head in heads])

    def wrong(attention: Any, layer: Any, *rest: Any) -> dict[str, Any]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mixed_module, "narrow_weights", other_heads)
            figures = start_mixed_heads(attention, layer, *rest)
        layer.softmax.o_proj.weight.copy_(attention.o_proj.weight[:, 16:])
        return figures

    monkeypatch.setitem(START, "mixed_heads", wrong)
    teacher = teacher_folder(tmp_path / "teacher", "llama")
    with pytest.raises(QualityError, match="layer 0: softmax attention"):
        tiny_conversion(teacher, tmp_path / "out", layers=selection(tmp_path))


def test_what_mixed_heads_drop_is_counted(tmp_path: Path) -> None:
    """A bias that the linear heads leave out, and a norm that only they leave out."""
    teacher = teacher_folder(tmp_path / "teacher", "llama")
    job = tiny_job(teacher, tmp_path / "a", layers=selection(tmp_path), changes=("qkv_bias=false",))
    assert job.plan.layers[0].dropped == 2 * 8 + 8 + 8  # of one key/value head and its two query heads
    assert job.plan.layers[2].dropped == 2 * (2 * 8 + 8 + 8)
    qwen3 = teacher_folder(tmp_path / "qwen3", "qwen3", max_position_embeddings=4096)
    job = tiny_job(qwen3, tmp_path / "b", layers=selection(tmp_path, "qwen3"), changes=("qk_norm=false",))
    assert job.plan.layers[0].dropped == 0
    assert job.plan.layers[2].dropped == 2 * 16
    console = Console(record=True, width=200)
    print_plan(job.plan, console)
    text = console.export_text()
    assert "mixed heads: softmax (1), Gated DeltaNet (1)" in text
    assert " per token" in text.split("mixed heads")[1].splitlines()[0]
    table = job.plan.cache_bytes
    growth = (table[1]["converted"] - table[0]["converted"]) / (4096 - 2048)
    assert growth * 2 == (table[1]["teacher"] - table[0]["teacher"]) / (4096 - 2048)  # 4 of 8 heads


def test_layers_that_keep_as_many_heads_share_a_row(tmp_path: Path) -> None:
    teacher = teacher_folder(tmp_path / "teacher", "llama")
    kept = [[0, 0], [1, 1], [2, 0], [3, 1]]
    console = Console(record=True, width=200)
    print_plan(tiny_job(teacher, tmp_path / "a", layers=selection(tmp_path, kept=kept)).plan, console)
    assert re.findall(r"│ (\S+) +│ mixed heads", console.export_text()) == ["0-3"]


def test_what_cannot_have_mixed_heads_is_refused(tmp_path: Path) -> None:
    teacher = teacher_folder(tmp_path / "teacher", "llama")
    with pytest.raises(UserError, match="--profile qwen3_5: the heads of one layer"):
        prepare(str(teacher), tmp_path / "out", ConvertOptions(layers=selection(tmp_path), profile="qwen3_5"))
    with pytest.raises(UserError, match=r"--mixer mixed_heads: comes of a selection"):
        ConvertOptions(mixer="mixed_heads")
    olmo = teacher_folder(tmp_path / "olmo", "olmo2")
    with pytest.raises(UserError, match="its q/k norms go over all heads of a layer together"):
        prepare(str(olmo), tmp_path / "out", ConvertOptions(layers=selection(tmp_path, "olmo2")))
    whole = selection(tmp_path, "olmo2", kept=[[1, 0], [1, 1]])  # whole layers only
    assert prepare(str(olmo), tmp_path / "out", ConvertOptions(layers=whole)).table.softmax == [1]
