"""Hugging Face's Trainer on a converted model: an interrupted training equals an uninterrupted one, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from support.tiny_models import HYBRID, tiny_student


class _Rows(Dataset):
    def __init__(self) -> None:
        self.rows = torch.randint(3, 97, (16, 12), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def _trainer(folder: Path, profile: str, layers: tuple[int, ...] | None) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=4,
        per_device_train_batch_size=4,
        save_steps=2,
        learning_rate=1e-2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        seed=3,
    )
    return Trainer(model=tiny_student("llama", profile, layers), args=arguments, train_dataset=_Rows())


@pytest.mark.parametrize(("profile", "layers"), [("faithful", None), ("qwen3_5", HYBRID)])
def test_resumed_training_is_bit_equal(profile: str, layers: tuple[int, ...] | None, tmp_path: Path) -> None:
    whole = _trainer(tmp_path / "run", profile, layers)
    start = {name: p.detach().clone() for name, p in whole.model.named_parameters()}
    whole.train()
    resumed = _trainer(tmp_path / "run", profile, layers)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert resumed.state.global_step == whole.state.global_step == 4
    ends = dict(resumed.model.named_parameters())
    for name, parameter in whole.model.named_parameters():
        assert torch.equal(parameter, ends[name]), name
        assert not torch.equal(parameter, start[name]), name
