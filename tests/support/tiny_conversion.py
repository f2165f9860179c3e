"""Tiny teacher folders with a tokenizer, and their conversion."""

from __future__ import annotations

import hashlib
import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from deltanet_convert.conversion import convert
from deltanet_convert.job import Job, prepare, sole_conversion
from deltanet_convert.options import ConvertOptions
from deltanet_convert.start.copy_weights import copy_attention
from deltanet_convert.start.samples import LayerCalibration
from deltanet_convert.storage.teacher_source import Source
from deltanet_convert.teacher_model import Teacher, open_teacher
from deltanet_hf.data import shipped_texts
from deltanet_hf.mixers.gated_deltanet import GatedDeltaNet
from support.tiny_models import COMMON, tiny_teacher

TOKENS = 256  # calibration tokens: two sequences of the tiny models' 128 positions


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character."""
    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    vocabulary = [*special, *string.ascii_letters, *string.digits, " ", *".,;:!?'-"]
    assert len(vocabulary) <= COMMON["vocab_size"]
    backend = Tokenizer(WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="<unk>"))
    backend.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


def teacher_folder(path: Path, model_type: str, max_shard_size: str = "50MB", **changes: Any) -> Path:
    """Saves the family's tiny teacher, with random weights, and a tokenizer."""
    tiny_teacher(model_type, **changes).save_pretrained(path, max_shard_size=max_shard_size)
    tiny_tokenizer().save_pretrained(path)
    return path


def opened(folder: Path) -> Teacher:
    """The teacher in a folder."""
    return open_teacher(Source(folder.name, folder, None))


def digest(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def text_file(folder: Path) -> Path:
    """Writes a short calibration text."""
    file = folder / "text.txt"
    file.write_text(shipped_texts()[0].read_text(encoding="utf-8")[5000:8000], encoding="utf-8")
    return file


PLAIN: dict[str, Any] = {"layers": "all", "mixer": "gated_deltanet", "cache_bits": 16}  # options of most tests


def tiny_job(teacher: Path, out: Path, **options: Any) -> Job:
    """Plans a conversion on the short text beside `out`; every layer to states alone unless options say otherwise."""
    options = {**PLAIN, "text": text_file(out.parent), "calibration_tokens": TOKENS, **options}
    return prepare(str(teacher), out, ConvertOptions(**options))


def tiny_conversion(teacher: Path, out: Path, **options: Any) -> dict[str, Any]:
    """Converts `teacher` and returns the report."""
    with sole_conversion(out):
        return convert(tiny_job(teacher, out, **options), out, lambda *args: None)


@torch.no_grad()
def quick_start(attention: Any, layer: GatedDeltaNet, calibration: LayerCalibration) -> dict[str, Any]:
    """A rule of `START` that sets deterministic start values without the fit, for tests of the code around it."""
    copy_attention(attention, layer)
    for name in ("a_proj", "b_proj", "g_proj"):
        projection = getattr(layer, name)
        projection.weight.normal_(0, 0.1)
        if projection.bias is not None:
            projection.bias.fill_(1.0)
    if layer.window_branch is not None:
        layer.window_branch.share_proj.weight.normal_(0, 0.1)
        layer.window_branch.share_proj.bias.zero_()
    figures = {"half_life": [1.0] * layer.num_states, "beta": [0.5] * layer.num_states}
    return {**figures, "search_mse": 1.0, "fit_mse": float(calibration.hidden_states.square().mean())}
