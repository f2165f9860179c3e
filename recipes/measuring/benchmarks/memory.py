"""Compares the peak memory of a conversion with its bound: largest layer + its activations + embeddings + 1 GiB.

    python -m measuring.benchmarks.memory FOLDER [--layers 18] [--profile faithful] [--calibration-tokens 512]
    python -m measuring.benchmarks.memory FOLDER --layers 32 --vocabulary 128256 --device cuda

Writes a Llama checkpoint of random bfloat16 weights into FOLDER (18 layers of an 8B model: 8.4 GB), unless it exists,
converts it in a separate process and prints the peak of that process's resident set. The bound counts the weights
(input and output embedding, one layer) as stored, in bfloat16, although the conversion computes in float32. FOLDER must
have space for two such models. On a GPU, the peak of its memory is printed too. Linux only.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from deltanet_convert.meta_model import meta_model
from deltanet_convert.options import ConvertOptions
from measuring.benchmarks.random_teacher import write_teacher

GIB = 2**30
SHAPE: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
CONVERT = """
import torch
from deltanet_recipes.cli import main
try:
    main()
finally:
    if torch.cuda.is_available():
        open({gpu_peak!r}, "w").write(str(torch.cuda.max_memory_reserved()))
"""


def bound(config: LlamaConfig, tokens: int) -> dict[str, int]:
    """The parts of the bound in bytes.

    The activations of a layer are its input and output and its attention's inputs and outputs, in float32, for all
    tokens: calibration text, and held-out text through teacher and student, with `tokens` tokens each.
    """
    model = meta_model(LlamaForCausalLM, config, torch.bfloat16)
    layer = sum(p.numel() * 2 for p in model.model.layers[0].parameters())
    embeddings = 2 * int(config.vocab_size) * int(config.hidden_size) * 2
    activations = 3 * tokens * int(config.hidden_size) * 4 * 3
    return {"largest_layer": layer, "activations": activations, "embeddings": embeddings, "allowance": GIB}


def main() -> None:
    """Writes the checkpoint, converts it and prints the comparison as JSON; exits with 1 above the bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--convert-layers", default="every:4", help="--layers of `convert`")
    parser.add_argument("--profile", default="faithful")
    parser.add_argument("--calibration-tokens", type=int, help="default: 512 on the CPU, that of `convert` on a GPU")
    parser.add_argument("--vocabulary", type=int, default=SHAPE["vocab_size"])
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    on_cpu = options.device == "cpu"
    tokens = options.calibration_tokens or (512 if on_cpu else ConvertOptions().calibration_tokens)
    teacher, out = options.folder / "teacher", options.folder / "out"
    config = LlamaConfig(**{**SHAPE, "vocab_size": options.vocabulary, "num_hidden_layers": options.layers})
    write_teacher(teacher, config, options.device)
    gpu_peak = options.folder / "gpu_peak"
    command = [sys.executable, "-c", CONVERT.format(gpu_peak=str(gpu_peak)), "convert", str(teacher), str(out)]
    command += [
        "--layers",
        options.convert_layers,
        "--profile",
        options.profile,
        "--calibration-tokens",
        str(tokens),
        "--overwrite",
    ]
    command += ["--device", options.device]
    begin = time.perf_counter()
    subprocess.run(command, check=True)
    seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    parts = bound(config, tokens)
    result = {
        "checkpoint_bytes": sum(file.stat().st_size for file in teacher.glob("*.safetensors")),
        "layers": options.layers,
        "converted": options.convert_layers,
        "profile": options.profile,
        "calibration_tokens": tokens,
        "device": options.device if on_cpu else torch.cuda.get_device_name(options.device),
        "peak_bytes": peak,
        "gpu_peak_bytes": None if on_cpu else int(gpu_peak.read_text()),
        "bound_bytes": sum(parts.values()),
        **{f"bound_{name}": value for name, value in parts.items()},
        "seconds": round(seconds),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("torch", "transformers")},
    }
    print(json.dumps(result, indent=2))
    sys.exit(on_cpu and peak > result["bound_bytes"])


if __name__ == "__main__":
    main()
