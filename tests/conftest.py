"""Settings that every test relies on."""

import gc
import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported, here and in started processes

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# The Triton kernels are tested in Triton's interpreter where there is no GPU; that is chosen when triton is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    import support.interpreter_work  # noqa: F401

from torch._dynamo import trace_rules
from triton.language import core
from triton.runtime import interpreter

from support.command_line import CommandLine

# Processes that run side by side share the cores; with two threads each they mostly wait for one another.
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, os.cpu_count() or 1))


@pytest.fixture(autouse=True)
def _compiled_from_the_start() -> Iterator[None]:
    """Reset Dynamo after each test: what it skips in one stays skipped, and fails under `fullgraph=True` in another.

    Dynamo keeps the functions of torch that it finds at its first use, and at the next after a process group was made.
    It finds them before a test replaces `torch.empty_like`.
    """
    trace_rules.get_torch_obj_rule_map()
    yield
    torch._dynamo.reset()


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """The command `deltanet-hf`."""
    return CommandLine(monkeypatch, capsys)


@pytest.fixture
def rounding_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter cuts float32 off where it makes bfloat16; GPUs round."""
    convert = interpreter._convert_float

    def rounded(x: Any, source: Any, wanted: Any, mode: Any) -> Any:
        if source == core.float32 and wanted == core.bfloat16:
            return torch.from_numpy(x).bfloat16().view(torch.uint16).numpy()
        return convert(x, source, wanted, mode)

    monkeypatch.setattr(interpreter, "_convert_float", rounded)


def pytest_collection_finish() -> None:
    """Keep the garbage collector from searching all modules and tests at every stage of every training run."""
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Let the interpreter collect everything before it ends."""
    gc.unfreeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a CUDA device, tests with the marker `gpu` are deselected, which pytest counts."""
    if torch.cuda.is_available():
        return
    config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("gpu")])
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]
