"""Where the Triton kernels run in the tests: on the GPU when there is one, else on the CPU in Triton's interpreter.

Import this before anything that imports triton: the interpreter is chosen when a kernel is defined.
"""

import os
import sys

import pytest
import torch

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
if not GPU:
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("triton was imported before TRITON_INTERPRET could be set", allow_module_level=True)
    os.environ["TRITON_INTERPRET"] = "1"
