"""CPU seconds per part of a fit: `python tools/fit_times.py FOLDER 3,12,20`, the figures of docs/results.md.

FOLDER holds a teacher. Its layers are fitted as `deltanet-hf convert --calibration-tokens 4096` does it, with a window
beside the state, and nothing is written. The number of threads is chosen by OMP_NUM_THREADS.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from deltanet_convert.compare_to_teacher import compare_outputs
from deltanet_convert.convert import calibration_text
from deltanet_convert.job import prepare
from deltanet_convert.layer_step import _advance, _empty_layer, _round
from deltanet_convert.layer_stream import LayerStream
from deltanet_convert.options import ConvertOptions
from deltanet_convert.start import gated_deltanet
from deltanet_convert.start.calibration import LayerCalibration
from deltanet_convert.storage.saved_tokenizer import load_tokenizer

PARTS = ("Samples", "choose_key_offset", "search_memory", "descend", "relative_mse")


def timed(function: Callable[..., Any], name: str, seconds: Counter[str]) -> Callable[..., Any]:
    """The function, which adds its CPU time to `seconds`."""

    def run(*args: Any, **kwargs: Any) -> Any:
        began = time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[name] += time.process_time() - began  # type: ignore[assignment]

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("layers", help="indices, separated by commas")
    args = parser.parse_args()
    chosen = {int(index) for index in args.layers.split(",")}
    seconds: Counter[str] = Counter()
    for name in PARTS:
        setattr(gated_deltanet, name, timed(getattr(gated_deltanet, name), name, seconds))
    options = ConvertOptions(mixer="gated_deltanet+window", calibration_tokens=4096, device="cpu")
    job = prepare(str(args.folder), args.folder.parent / "fit-times", options)
    text = calibration_text(job, load_tokenizer(job.teacher.folder))
    stream = LayerStream(job.teacher)
    stream.learn_arguments(text.calibration.shape[1])
    calibration, held_out = stream.embed(text.calibration, text.held_out)
    print(f"{torch.get_num_threads()} threads, sequences {list(text.calibration.shape)}")
    for index in range(max(chosen) + 1):
        layer: Any = stream.load_layer(index)
        kwargs = stream.layer_kwargs[index]
        inputs, _ = _advance(layer, calibration, kwargs, keep=True)
        unseen, wanted = _advance(layer, held_out, kwargs, keep=True)
        if index in chosen:
            new: Any = _empty_layer(job.plan.student.model.layers[index].self_attn, torch.device("cpu"))
            torch.manual_seed(index)
            seconds.clear()
            began = time.process_time()
            gated_deltanet.start_gated_deltanet(layer.self_attn, new, LayerCalibration(inputs, kwargs))
            all_of_it = time.process_time() - began
            _round(new, job.dtype)
            error = compare_outputs(new, unseen, wanted, kwargs)[1]
            parts = ", ".join(f"{name} {value:.2f}" for name, value in seconds.items())
            print(f"layer {index}: {all_of_it:.2f} s ({parts}), relative MSE {error:.5f}", flush=True)
        layer.to("meta")
    job.close()


if __name__ == "__main__":
    main()
