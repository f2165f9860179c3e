"""Runs a model that does not fit in memory: embedding, one decoder layer at a time, output head.

The model class itself is run, with its parts swapped, so nothing here knows a family: recorders in the place
of the decoder layers learn what each layer is called with, and a stand-in layer feeds hidden states to the
real output head. Everything is computed in float32, with eager attention (the one implementation that every
family's options apply to).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .storage.safetensors_folder import BLOCK_ELEMENTS, Checkpoint
from .teacher_model import Teacher


class _Recorder(nn.Module):
    """Stands for a decoder layer: hands the hidden states on and keeps the other arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Any] = {}

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        self.seen = {name: value for name, value in kwargs.items() if value is not None}
        return hidden_states


class _StandIn(nn.Module):
    """Stands for all decoder layers: whatever goes in, `hidden` comes out."""

    hidden: Tensor

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        return self.hidden


class StoredLinear(nn.Linear):
    """A linear layer whose weight stays in its stored dtype: computes in float32, some rows of it at a time."""

    rounding: torch.dtype | None = None  # the weight is rounded to it first

    def forward(self, input: Tensor) -> Tensor:
        out = input.new_empty(*input.shape[:-1], self.out_features)
        step = max(1, BLOCK_ELEMENTS // self.in_features)
        for start in range(0, self.out_features, step):
            rows = self.weight[start : start + step]
            rows = rows if self.rounding is None else rows.to(self.rounding)
            out[..., start : start + step] = F.linear(input, rows.float())
        return out if self.bias is None else out + self.bias.float()


class LayerStream:
    """The teacher's forward pass in pieces. Only what is loaded takes memory."""

    def __init__(self, teacher: Teacher) -> None:
        self.teacher = teacher
        self.model: Any = teacher.model
        self.layers = list(self.model.model.layers)  # on the meta device
        self.layer_kwargs: list[dict[str, Any]] = []
        for module in self.model.modules():
            _materialise_buffers(self.model, module)

    @torch.no_grad()
    def embed(self, *batches: Tensor, rounding: torch.dtype | None = None) -> list[Tensor]:
        """ids [n, T] -> the first layer's input [n, T, hidden] float32, with the needed rows only."""
        used, positions = torch.unique(torch.cat([ids.flatten() for ids in batches]), return_inverse=True)
        table = self.model.model.embed_tokens
        rows = read_rows(self.teacher.checkpoint, "model.embed_tokens.weight", used)
        table.weight = nn.Parameter(rows if rounding is None else rows.to(rounding).float(), False)
        table.padding_idx = None  # an index into the whole table
        outputs, offset = [], 0
        for ids in batches:
            compact = positions[offset : offset + ids.numel()].view_as(ids)
            offset += ids.numel()
            outputs.append(torch.cat([self._through_recorders(input_ids=row.unsqueeze(0)) for row in compact]))
        table.weight = nn.Parameter(table.weight.to("meta"), False)
        return outputs

    @torch.no_grad()
    def learn_arguments(self, length: int) -> None:
        """Fills `layer_kwargs` for sequences of `length` tokens; `embed` is not needed for it."""
        self._through_recorders(inputs_embeds=torch.zeros(1, length, self.teacher.config.hidden_size))

    def _through_recorders(self, **inputs: Tensor) -> Tensor:
        recorders = [_Recorder() for _ in self.layers]
        self.model.model.layers = nn.ModuleList(recorders)
        self.model.model.norm, norm = nn.Identity(), self.model.model.norm
        hidden: Tensor = self.model.model(**inputs, use_cache=False).last_hidden_state
        self.model.model.norm = norm
        self.layer_kwargs = [recorder.seen for recorder in recorders]
        return hidden

    def load_layer(self, index: int) -> nn.Module:
        """Decoder layer `index`, its attention and norms in float32; `.to("meta")` gives the memory back."""
        layer = self.layers[index]
        for name, module in layer.named_modules():
            if type(module) is nn.Linear and not name.startswith("self_attn."):
                module.__class__ = StoredLinear
        return load_module(layer, self.teacher.checkpoint, f"model.layers.{index}.")

    def load_head(self) -> "Head":
        return Head(self)


class Head:
    """Final norm, output head and whatever the family does to the logits."""

    def __init__(self, stream: LayerStream) -> None:
        checkpoint, tied = stream.teacher.checkpoint, stream.teacher.tied
        self.model = stream.model
        self.stand_in = _StandIn()
        self.model.model.layers = nn.ModuleList([self.stand_in])
        load_module(self.model.model.norm, checkpoint, "model.norm.")
        name = "model.embed_tokens.weight" if tied else "lm_head.weight"
        self.head = self.model.lm_head
        self.head.__class__ = StoredLinear
        self.head.weight = nn.Parameter(checkpoint.read(name), False)
        self.norms = {name: value.clone() for name, value in self.model.model.norm.state_dict().items()}

    @torch.no_grad()
    def logits(self, hidden: Tensor, rounding: torch.dtype | None = None) -> Tensor:
        """hidden [n, T, hidden] -> logits [n, T, vocab] float32; weights rounded to `rounding` if given."""
        self.head.rounding = rounding
        for name, value in self.model.model.norm.state_dict().items():
            value.copy_(self.norms[name] if rounding is None else self.norms[name].to(rounding))
        self.stand_in.hidden = hidden
        result: Tensor = self.model(inputs_embeds=hidden, use_cache=False).logits
        return result


def load_module(module: nn.Module, checkpoint: Checkpoint, prefix: str) -> nn.Module:
    """Gives a meta module its weights in float32, those of `StoredLinear` as stored."""
    stored = {f"{name}.weight" for name, child in module.named_modules() if isinstance(child, StoredLinear)}
    weights = {
        name: checkpoint.read(prefix + name, None if name in stored else torch.float32) for name in module.state_dict()
    }
    module.load_state_dict(weights, assign=True)
    return module.requires_grad_(False)


def read_rows(checkpoint: Checkpoint, name: str, rows: Tensor) -> Tensor:
    """Chosen rows (ascending, distinct) of a matrix, float32, without the rest in memory."""
    width = checkpoint.entries[name].shape[1]
    found, first = [], 0
    for block in checkpoint.blocks(name):
        matrix = block.view(-1, width)
        inside = rows[(rows >= first) & (rows < first + len(matrix))] - first
        found.append(matrix[inside].float())
        first += len(matrix)
    return torch.cat(found)


def _materialise_buffers(model: Any, module: nn.Module) -> None:
    """Buffers are computed from the config by the model's own initialisation, which a meta device skipped."""
    missing = [name for name, buffer in module.named_buffers(recurse=False) if buffer.device.type == "meta"]
    for name in missing:
        setattr(module, name, torch.empty_like(getattr(module, name), device="cpu"))
    if missing:
        model._init_weights(module)
