"""Loads the model that a run made and generates 8 tokens.

python -m measuring.benchmarks.final_model FOLDER
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from deltanet_hf.loading import load_model

NEW_TOKENS = 8


def generate(folder: Path) -> dict[str, Any]:
    """The number of new tokens, the seconds that loading and generating took, and whether all logits are finite."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    began = time.perf_counter()
    model: Any = load_model(str(folder), folder, "auto")
    model.to(device)
    loaded = time.perf_counter()
    prompt = torch.arange(2, 34, device=device)[None]
    with torch.no_grad():
        finite = bool(model(prompt).logits.isfinite().all())
    tokens = model.generate(prompt, min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS, do_sample=False)
    return {
        "generated_tokens": tokens.shape[1] - prompt.shape[1],
        "finite": finite,
        "load_s": round(loaded - began, 1),
        "generate_s": round(time.perf_counter() - loaded, 1),
    }


if __name__ == "__main__":
    print(json.dumps(generate(Path(sys.argv[1]))))
