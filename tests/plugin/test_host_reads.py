"""Training a layer on a GPU reads no value of a tensor on the host, which a CUDA graph could not record.

No GPU is needed: the tensors have shapes and no values, and say that they are on one.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from deltanet_hf.mixers import MIXERS
from support.tiny_models import tiny_student

READS_LENGTHS = ("ttt", "titans")  # lay packed sequences out on the host


@pytest.mark.parametrize("mixer", MIXERS)
def test_forward_and_backward_read_nothing_on_the_host(mixer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows, and of packed sequences."""
    heads = {"heads": ["softmax", "linear"]} if mixer == "mixed_heads" else {}
    model = tiny_student("llama", mixer=mixer, layers=(0,), **heads)
    layer = model.model.layers[0].self_attn
    hidden = torch.randn(2, 40, model.config.hidden_size)
    cos, sin = model.model.rotary_emb(hidden, torch.arange(40)[None])
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for packed in (False, True):
        with FakeTensorMode() as mode:
            weights = {name: mode.from_tensor(tensor) for name, tensor in layer.state_dict(keep_vars=True).items()}
            x, *angles = (mode.from_tensor(tensor) for tensor in (hidden, cos, sin))
            arguments = {
                "hidden_states": x.requires_grad_(),
                "position_embeddings": tuple(angles),
                "cu_seq_lens_q": mode.from_tensor(torch.tensor([0, 15, 40, 80], dtype=torch.int32)) if packed else None,
            }
            refused = packed and mixer in READS_LENGTHS
            with pytest.raises(RuntimeError, match=r"engine\.cuda_graphs: false") if refused else nullcontext():
                output, _ = functional_call(layer, weights, (), arguments)
                output.float().square().sum().backward()
                assert x.grad is not None
                assert all(weight.grad is not None for weight in weights.values() if weight.requires_grad)
