"""A loaded model has start values where its checkpoint has no tensor, never memory without a value."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from support.tiny_models import tiny_student


@pytest.fixture
def nan_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that transformers does not fill is NaN."""
    empty_like = torch.empty_like

    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        tensor = empty_like(*args, **kwargs)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() and not tensor.is_meta else tensor

    monkeypatch.setattr(torch, "empty_like", poisoned)


def student() -> PreTrainedModel:
    return tiny_student("llama", window=5, sinks=2, k_offset=True)


def test_parts_that_are_missing_have_their_start_and_the_others_what_was_saved(
    tmp_path: Path, nan_memory: None
) -> None:
    student().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    missing = ("A_log", "k_offset.weight", "far_slope", "conv1d.weight")
    kept = {key: tensor for key, tensor in load_file(file).items() if not key.endswith(missing)}
    save_file(kept, file, metadata={"format": "pt"})
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert len(info["missing_keys"]) == 4 * len(missing)
    tensors = loaded.state_dict()
    assert all(torch.equal(tensors[key], tensor) for key, tensor in kept.items())
    mixer = loaded.model.layers[1].self_attn
    torch.testing.assert_close(mixer.decay.A_log, torch.linspace(1.0, 16.0, 4).log())
    assert mixer.k_offset.weight.count_nonzero() == 0
    assert mixer.window_branch.slopes.far_slope.tolist() == [1.0] * 4
    assert mixer.conv1d.weight.squeeze(1).tolist() == [[0.0, 0.0, 0.0, 1.0]] * len(mixer.conv1d.weight)


def test_a_second_initialisation_leaves_trained_parts_alone() -> None:
    model = student()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.init_weights()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
