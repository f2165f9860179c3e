"""Every mixer that can be chosen converts, loads and decodes; a mixer needs no more than a class and a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DynamicCache

from deltanet_convert.options import ConvertOptions
from deltanet_convert.start import START, key_offset, start_rule
from deltanet_convert.start.unfitted import start_from_scratch, start_unchanged
from deltanet_hf import LayerTable
from deltanet_hf.errors import UserError
from deltanet_hf.mixers import MIXERS, LayerKind, Mixer
from deltanet_hf.mixers.cache.cache_bytes import cache_bytes
from deltanet_hf.mixers.cache.state import State, TensorShape
from deltanet_hf.mixers.layer import MixCall, Projected
from deltanet_hf.mixers.layer.delta_rule import delta_rule
from deltanet_hf.mixers.layer.parts import Opening
from deltanet_hf.mixers.mixed_heads import MixedHeads
from deltanet_hf.mixers.quadratic.attention_kind import AttentionKind, Call, Softmax
from support.read_in_parts import read_in_parts
from support.registry import rows
from support.tiny_conversion import teacher_folder, tiny_conversion

IDS = torch.randint(4, 60, (2, 80), generator=torch.Generator().manual_seed(0))  # more tokens than the window sees


class Sharpened(AttentionKind):
    """A throw-away kind that stays quadratic: queries times 1 + opening."""

    name: ClassVar[str] = "sharpened"
    title: ClassVar[str] = "sharpened attention"
    fp32: ClassVar[tuple[str, ...]] = ("opening",)
    sharpness: Opening

    def add_parts(self, hidden: int, query_heads: int, kv_heads: int) -> None:
        self.sharpness = Opening(query_heads)

    def new_parts(self) -> list[torch.nn.Module]:
        return [self.sharpness]

    def start_neutral(self, spread: float) -> None:
        self.sharpness.reset_parameters()

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, softmax: Softmax) -> torch.Tensor:
        q = q * (1 + self.sharpness())[:, None, None].to(q.dtype)
        if call.cache is not None:
            k, v = call.cache.update(k, v, self.layer_idx)
        return softmax(q, k, v, call.mask)


class ConstantDecay(Mixer):
    """A throw-away mixer: the delta rule with one constant decay per head and write strength 1."""

    name: ClassVar[str] = "constant_decay"
    title: ClassVar[str] = "constant decay"

    def add_gates(self) -> None:
        pass

    def gates(self, projected: Projected, padding: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        x = projected.x
        half_life = 2.0 ** torch.arange(1, self.num_states + 1, device=x.device)
        decay = (-torch.log(torch.tensor(2.0)) / half_life).expand(*x.shape[:2], -1)
        strength = torch.ones_like(decay)
        if padding is not None:
            decay, strength = (gate.masked_fill(padding.unsqueeze(-1), 0.0) for gate in (decay, strength))
        return decay, strength

    def mix(self, call: MixCall) -> tuple[torch.Tensor, State]:
        return delta_rule(call, "float32")

    def recurrent_shapes(self) -> dict[str, TensorShape]:
        return {"state": TensorShape((self.num_states, self.head_dim, self.head_dim), torch.float32)}


@pytest.fixture
def few_shares(short_fit: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_offset, "SHARES", (0.0, 1.0))


THROW_AWAY: dict[str, type[LayerKind]] = {kind.name: kind for kind in (ConstantDecay, Sharpened)}
NAMES = [*(name for name in MIXERS if name != MixedHeads.name), *THROW_AWAY]
every_mixer = pytest.mark.parametrize("mixer", rows(NAMES), indirect=True)


@pytest.fixture
def mixer(request: pytest.FixtureRequest, few_shares: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of each mixer in turn; the fit is short."""
    for name, kind in THROW_AWAY.items():
        monkeypatch.setitem(MIXERS, name, kind)
    return str(request.param)


@every_mixer
@torch.no_grad()
def test_conversion_loads_and_decodes(tmp_path: Path, mixer: str) -> None:
    teacher = teacher_folder(tmp_path / "teacher", "qwen3", num_hidden_layers=2)
    report = tiny_conversion(teacher, tmp_path / "out", mixer=mixer, layers="every:2")
    check_result(tmp_path / "out", report, [0], mixer)


@pytest.mark.usefixtures("few_shares")
@torch.no_grad()
def test_a_window_beside_the_state_converts_loads_and_decodes(tmp_path: Path) -> None:
    teacher = teacher_folder(tmp_path / "teacher", "qwen3", num_hidden_layers=2)
    changes = ("window=8", "sinks=1", "state_dtype=float32")  # a rounded state would differ from step to step
    report = tiny_conversion(
        teacher, tmp_path / "out", layers="every:2", mixer="gated_deltanet+window", changes=changes
    )
    check_result(tmp_path / "out", report, [0], "gated_deltanet")
    (layer,) = report["layers"]
    assert layer["softmax_error"] < 1e-5
    assert layer["fit_mse"] < min(1.0, layer["search_mse"])


def check_result(folder: Path, report: dict[str, Any], converted: list[int], mixer: str) -> None:
    """The model in `folder` is the planned one and decodes as it computes complete rows."""
    assert [layer["index"] for layer in report["layers"]] == report["plan"]["converted_layers"] == converted
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert sorted(LayerTable.of(model.config).converted) == converted
    for index in converted:
        assert isinstance(model.model.layers[index].self_attn, MIXERS[mixer])
    assert report["plan"]["parameters"] == sum(parameter.numel() for parameter in model.parameters())

    complete = model.eval()(IDS).logits
    torch.testing.assert_close(read_in_parts(model, IDS, [75, *[1] * 5]), complete, rtol=1e-3, atol=1e-3)

    cache = DynamicCache(config=model.config)
    model(IDS[:1], past_key_values=cache, use_cache=True)
    planned = report["plan"]["layers"]
    growing = sum(layer["kept_kv_bytes_per_token"] for layer in planned)
    assert cache_bytes(cache) == sum(layer["state_bytes"] for layer in planned) + growing * IDS.shape[1]


def test_every_mixer_has_a_start_rule() -> None:
    assert set(START) <= set(MIXERS)
    for mixer, kind in MIXERS.items():
        default = start_from_scratch if kind.has_state else start_unchanged
        assert start_rule(mixer) is START.get(mixer, default), mixer


@torch.no_grad()
def test_mixer_without_a_row_starts_from_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One class and one row in `MIXERS` are all that a conversion needs."""
    monkeypatch.setitem(MIXERS, ConstantDecay.name, ConstantDecay)
    teacher = teacher_folder(tmp_path / "teacher", "qwen2", num_hidden_layers=2)
    report = tiny_conversion(teacher, tmp_path / "out", mixer=ConstantDecay.name, changes=("output_norm=shared",))
    assert report["options"]["deltanet"]["kinds"]["linear"]["mixer"] == ConstantDecay.name
    before, after = load_file(teacher / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    for name in ("q_proj.weight", "q_proj.bias", "o_proj.weight"):
        full = f"model.layers.1.self_attn.{name}"
        assert torch.equal(before[full], after[full])
    assert float(after["model.layers.1.self_attn.g_proj.weight"].std()) == pytest.approx(0.2, rel=0.2)
    for layer in report["layers"]:
        assert layer["softmax_error"] < 1e-5
        assert "fit_mse" not in layer
    card = (tmp_path / "out" / "README.md").read_text()
    assert "their other weights start as in a model trained from scratch" in card
    assert "fitted" not in card


def test_card_and_plan_of_a_window_say_that_nothing_is_fitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console

    from deltanet_convert.views.report_view import print_report

    teacher = teacher_folder(tmp_path / "teacher", "llama", num_hidden_layers=2)
    report = tiny_conversion(teacher, tmp_path / "out", mixer="window", changes=("window=5",), cache_bits=8)
    given, stored = load_file(teacher / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert given.keys() == stored.keys()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in given.items())
    for layer in report["plan"]["layers"]:
        assert layer["created"] == layer["expanded"] == layer["dropped"] == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "2 of 2 attention layers of `teacher` (llama) see\nthe last 5 tokens and the first 4." in card
    assert "All weights are the teacher's; nothing was fitted or trained." in card
    for words in ("brings it nearer", "fitted to the teacher", "gated-deltanet", "linear-attention"):
        assert words not in card
    check = report["held_out"]
    before, after, kl = (f"{check['teacher_perplexity']:.2f}", f"{check['perplexity']:.2f}", f"{check['kl']:.3f}")
    assert f"| perplexity | {before} | {after} |\n| KL to the teacher, nats per token | 0 | {kl} |" in card
    assert "keeps keys and values in 8 bits, as in the measurements above" in card
    print_report(report, Console(width=400))
    printed = capsys.readouterr().out
    assert f"perplexity {before} -> {after}, KL to the teacher {kl} nats" in printed
    assert "copied weights" not in printed


def test_a_kind_that_stays_quadratic_begins_as_the_teacher(tmp_path: Path) -> None:
    teacher = teacher_folder(tmp_path / "teacher", "qwen2", num_hidden_layers=1)
    report = tiny_conversion(teacher, tmp_path / "out", mixer="deltaformer", dtype="bfloat16")
    before, after = load_file(teacher / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(tensor.bfloat16(), after[name]) for name, tensor in before.items())
    new = {name.partition("self_attn.")[2]: tensor for name, tensor in after.items() if name not in before}
    assert set(new) == {"correction.opening.opening", "correction.b_proj.weight", "correction.b_proj.bias"}
    assert new["correction.opening.opening"].dtype == torch.float32
    assert not any(bool(tensor.any()) for tensor in new.values())
    assert report["layers"][0]["relative_mse"] < 1e-4  # the rounding of the weights
    card = (tmp_path / "out" / "README.md").read_text()
    assert "the model\nbegins as its teacher" in card
    for words in ("fitted to the teacher", "as in a model trained from scratch", "linear-attention"):
        assert words not in card


def test_heads_of_one_layer_cannot_be_of_a_kind_that_stays_quadratic() -> None:
    with pytest.raises(UserError, match="--mixer fox: keeps all tokens in every head"):
        ConvertOptions(mixer="fox").head_table(2, 2, {(0, 1)})


@pytest.mark.usefixtures("quick_fit")
@pytest.mark.parametrize(
    ("training", "wanted", "not_wanted"),
    [
        (True, "brings it nearer", "better without training"),
        (False, "Its settings are those that are better without training", "brings it nearer"),
    ],
)
def test_card_says_whether_to_distil(tmp_path: Path, training: bool, wanted: str, not_wanted: str) -> None:
    teacher = teacher_folder(tmp_path / "teacher", "llama", num_hidden_layers=1)
    tiny_conversion(teacher, tmp_path / "out", training=training)
    card = (tmp_path / "out" / "README.md").read_text()
    assert wanted in card
    assert not_wanted not in card
    assert ("(`--no-training`)" in card) is not training
