"""A conversion with windows beside the states is the teacher while a sequence fits into window and sinks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from deltanet_convert.start import START
from deltanet_convert.start.samples import LayerCalibration
from deltanet_hf.errors import UserError
from deltanet_hf.mixers.cache.cache_bytes import cache_bytes
from deltanet_hf.mixers.gated_deltanet import GatedDeltaNet
from deltanet_hf.mixers.layer.masks import sliding_window
from deltanet_hf.models.cache_bits import KEY_ORDER, cache_bits_of
from support.read_in_parts import read_in_parts
from support.tiny_conversion import quick_start, teacher_folder, tiny_conversion, tiny_job
from support.tiny_models import LAYERS, READS_ALL, tiny_teacher
from tests.convert.test_convert_families import held_out_check, texts_of

WINDOW, SINKS = 12, 3
FITS = WINDOW + SINKS
OWN: dict[str, dict[str, Any]] = {"gemma2": {"attn_logit_softcapping": 1.0, "attn_implementation": "eager"}}
IDS = torch.randint(4, 60, (2, 3 * WINDOW + 5), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def short_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates and shares that were fitted to nothing: the window does not depend on them."""

    def start(attention: Any, layer: GatedDeltaNet, calibration: LayerCalibration) -> dict[str, Any]:
        layer.window_branch.share_proj.weight.normal_(0, 0.1)
        layer.window_branch.share_proj.bias.fill_(1.0)
        return quick_start(attention, layer, calibration)

    monkeypatch.setitem(START, "gated_deltanet", start)


def converted(folder: Path, family: str, **options: Any) -> tuple[Any, dict[str, Any]]:
    """The model, and the report of its conversion."""
    teacher = teacher_folder(folder / "teacher", family, **OWN.get(family, {}))
    reads_all = (f"{name}={str(value).lower()}" for name, value in READS_ALL.items())
    changes = (f"window={WINDOW}", f"sinks={SINKS}", *reads_all, *options.pop("changes", ()))
    report = tiny_conversion(teacher, folder / "out", mixer="gated_deltanet+window", changes=changes, **options)
    return AutoModelForCausalLM.from_pretrained(folder / "out").eval(), report


def close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to the rounding of float32."""
    torch.testing.assert_close(ours, expected, rtol=2e-5, atol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *((family, ()) for family in ("granite", "smollm3", "phi3", "olmo2", "mistral", "gemma2")),
        ("llama", ("expand_kv=true", "shared_kv=true", "k_offset=true")),
    ],
    ids=str,
)
def test_a_short_sequence_gets_the_teachers_logits(tmp_path: Path, family: str, changes: tuple[str, ...]) -> None:
    """A longer one does not, unless the family's own window of 8 fits into the layer's in all layers."""
    model, _ = converted(tmp_path, family, changes=changes)
    teacher = tiny_teacher(family, **OWN.get(family, {}))
    assert model.model.layers[0].self_attn.window_branch.window <= WINDOW
    found, wanted = model(IDS).logits, teacher(IDS).logits
    everywhere = all(sliding_window(model.config, index) for index in range(LAYERS))
    exact = IDS.shape[1] if everywhere else FITS
    close(found[:, :exact], wanted[:, :exact])
    assert everywhere == (family == "mistral")
    assert everywhere or (found - wanted)[:, FITS].abs().max() > 1e-2
    close(read_in_parts(model, IDS, [4, 1, 1, exact - 6]), wanted[:, :exact])


@torch.no_grad()
def test_the_bits_of_the_cache_are_written_and_measured_and_change_no_weights(tmp_path: Path) -> None:
    """The loaded model has the cache of the plan."""
    plain, exact = converted(tmp_path, "llama", layers="every:2")
    shutil.rmtree(tmp_path / "out")
    model, report = converted(tmp_path, "llama", layers="every:2", cache_bits=4)
    ids = texts_of(tiny_job(tmp_path / "teacher", tmp_path / "other", mixer="window")).held_out
    for each, made in ((exact, plain), (report, model)):
        assert each["held_out"] == held_out_check(tmp_path / "teacher", made, ids)
    weights = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith(KEY_ORDER)}
    assert weights.keys() == plain.state_dict().keys()
    assert all(torch.equal(tensor, plain.state_dict()[name]) for name, tensor in weights.items())
    assert report["options"]["cache_bits"] == model.config.deltanet["cache_bits"] == cache_bits_of(model) == 4
    ids = torch.arange(128)[None] % 60  # all positions of the teacher, which the plan counts
    caches = [each(ids, use_cache=True, logits_to_keep=1).past_key_values for each in (plain, model)]
    sizes = [each["plan"]["cache_bytes"][0]["converted"] for each in (exact, report)]
    assert [cache_bytes(cache) for cache in caches] == sizes
    assert "keeps keys and values in 4 bits" in (tmp_path / "out" / "README.md").read_text()


def test_layers_without_a_packed_form_are_refused_before_the_work(tmp_path: Path) -> None:
    teacher = teacher_folder(tmp_path / "teacher", "llama")
    with pytest.raises(UserError, match=r"^cache bits: alibi layers keep every token in 16 bits; leave it at 16$"):
        tiny_conversion(teacher, tmp_path / "out", mixer="alibi", cache_bits=4)
    assert not (tmp_path / "out").exists()
