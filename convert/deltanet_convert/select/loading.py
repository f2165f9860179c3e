"""Loads a teacher to be switched."""

from __future__ import annotations

import contextlib

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from deltanet_hf.errors import UserError, one_line

from ..teacher_model import Teacher, attention_implementation


def load_teacher(teacher: Teacher, device: torch.device) -> PreTrainedModel:
    """The teacher in eval mode, without gradients: bfloat16 on a GPU, float32 on a CPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    try:
        with _quiet():
            model: PreTrainedModel = teacher.family.model_class.from_pretrained(
                teacher.folder,
                dtype=dtype,
                attn_implementation=attention_implementation(teacher.config),
                use_safetensors=True,
            )
        return model.to(device).eval().requires_grad_(False)  # type: ignore[arg-type]
    except torch.cuda.OutOfMemoryError as error:
        raise UserError(
            f"{teacher.folder}: the teacher does not fit into the GPU's memory; use --device cpu"
        ) from error
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{teacher.folder}: cannot be loaded ({one_line(error, 200)}); check the weights") from error


@contextlib.contextmanager
def _quiet():  # type: ignore[no-untyped-def]
    """Without transformers' progress bar over weights, which would break this command's own."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
