"""Runs a teacher that does not fit in memory: embedding, one decoder layer at a time, output head.

The model class itself is run with some of its parts replaced, so that nothing here depends on the family.
`LayerwiseDecoder` learns the arguments of each decoder layer, and a stand-in layer feeds hidden states to the real
output head. Everything is computed in float32.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deltanet_hf.models.decoder import LayerwiseDecoder

from .expert_stream import leave_experts_stored
from .storage.safetensors_folder import BLOCK_ELEMENTS, Checkpoint
from .teacher_model import EMBEDDING, HEAD, Teacher


class LayerStream:
    """The forward pass of a teacher in pieces. Only the piece that is loaded takes memory.

    After `learn_arguments`, `layer_kwargs[i]` holds the keyword arguments of decoder layer i, which are passed to its
    attention too: those that are not None, and the mask, which is None if it would only be causal.
    """

    def __init__(self, teacher: Teacher) -> None:
        self.teacher = teacher
        self.model: Any = teacher.model
        for module in self.model.modules():
            _materialise_buffers(self.model, module)
        self.decoder = LayerwiseDecoder(self.model)
        self.layers = self.decoder.layers  # on the meta device
        self.layer_kwargs: list[dict[str, Any]] = []

    @torch.no_grad()
    def embed(self, *batches: Tensor, rounding: torch.dtype | None = None) -> list[Tensor]:
        """Computes the first layer's inputs, [n, T, hidden] float32, for each batch of token ids [n, T].

        Only the rows of the embedding that occur are read. `rounding`: the dtype to which they are rounded first.
        """
        used, positions = torch.unique(torch.cat([ids.flatten() for ids in batches]), return_inverse=True)
        table = self.model.model.embed_tokens
        rows = read_rows(self.teacher.checkpoint, EMBEDDING, used)
        table.weight = nn.Parameter(rows if rounding is None else rows.to(rounding).float(), False)
        table.padding_idx = None  # it is an index into the complete table
        outputs, offset = [], 0
        for ids in batches:
            compact = positions[offset : offset + ids.numel()].view_as(ids)
            offset += ids.numel()
            outputs.append(torch.cat([self.decoder.enter(input_ids=row.unsqueeze(0)).hidden for row in compact]))
        table.weight = nn.Parameter(table.weight.to("meta"), False)
        return outputs

    @torch.no_grad()
    def learn_arguments(self, length: int) -> None:
        """Fills `layer_kwargs` for sequences of `length` tokens; `embed` need not have run."""
        inputs = self.decoder.enter(inputs_embeds=torch.zeros(1, length, self.teacher.config.hidden_size))
        self.layer_kwargs = [
            {name: value for name, value in kwargs.items() if value is not None or name == "attention_mask"}
            for kwargs in inputs.kwargs
        ]

    def load_layer(self, index: int) -> nn.Module:
        """Decoder layer `index` with attention and norms in float32; `.to("meta")` releases the memory.

        The weights of experts stay on the disk until they are used.
        """
        layer, prefix = self.layers[index], f"model.layers.{index}."
        leave_experts_stored(layer, self.teacher.checkpoint, prefix)
        for name, module in layer.named_modules():
            if type(module) is nn.Linear and not name.startswith("self_attn."):
                module.__class__ = StoredLinear
        return load_module(layer, self.teacher.checkpoint, prefix)


class Head:
    """Final norm, output head and whatever else the family applies to the logits, on a device.

    From then on, the layers of the stream's model are replaced.
    """

    def __init__(self, stream: LayerStream, device: torch.device) -> None:
        self.device = device
        checkpoint, tied = stream.teacher.checkpoint, stream.teacher.tied
        self.model = stream.model
        self.stand_in = _StandIn()
        self.model.model.layers = nn.ModuleList([self.stand_in])
        load_module(self.model.model.norm, checkpoint, "model.norm.")
        self.head = self.model.lm_head
        self.head.__class__ = StoredLinear
        self.head.weight = nn.Parameter(checkpoint.read(EMBEDDING if tied else HEAD), False)
        for name, module in self.model.model.named_children():
            if name != "embed_tokens":  # not loaded
                module.to(device)
        self.head.to(device)
        self.norms = {name: value.clone() for name, value in self.model.model.norm.state_dict().items()}

    @torch.no_grad()
    def logits(self, hidden: Tensor, rounding: torch.dtype | None = None) -> Tensor:
        """Computes logits [n, T, vocab] float32 from the last layer's output [n, T, hidden].

        `rounding`: the dtype to which the weights are rounded first.
        """
        self.head.rounding = rounding
        for name, value in self.model.model.norm.state_dict().items():
            value.copy_(self.norms[name] if rounding is None else self.norms[name].to(rounding))
        self.stand_in.hidden = hidden
        result: Tensor = self.model(inputs_embeds=hidden, use_cache=False).logits
        return result


class _StandIn(nn.Module):
    """Takes the place of all decoder layers: returns `hidden`, whatever it receives."""

    hidden: Tensor

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        return self.hidden


class StoredLinear(nn.Linear):
    """A linear layer whose weight stays in its stored dtype; it computes in float32, a block of rows at a time."""

    rounding: torch.dtype | None = None  # the weight is rounded to this dtype first

    def forward(self, input: Tensor) -> Tensor:
        out = input.new_empty(*input.shape[:-1], self.out_features)
        step = max(1, BLOCK_ELEMENTS // self.in_features)
        for start in range(0, self.out_features, step):
            rows = self.weight[start : start + step]
            rows = rows if self.rounding is None else rows.to(self.rounding)
            out[..., start : start + step] = F.linear(input, rows.float())
        return out if self.bias is None else out + self.bias.float()


def load_module(module: nn.Module, checkpoint: Checkpoint, prefix: str) -> nn.Module:
    """Loads the weights of a module on the meta device, in float32; those of `StoredLinear` keep their dtype."""
    stored = {f"{name}.weight" for name, child in module.named_modules() if isinstance(child, StoredLinear)}
    weights = {
        name: checkpoint.read(prefix + name, None if name in stored else torch.float32) for name in module.state_dict()
    }
    module.load_state_dict(weights, assign=True)
    return module.requires_grad_(False)


def read_rows(checkpoint: Checkpoint, name: str, rows: Tensor) -> Tensor:
    """Reads the given rows (ascending, distinct) of a matrix as float32, without holding the others in memory."""
    width = checkpoint.entries[name].shape[1]
    found, first = [], 0
    for block in checkpoint.blocks(name):
        matrix = block.view(-1, width)
        inside = rows[(rows >= first) & (rows < first + len(matrix))] - first
        found.append(matrix[inside].float())
        first += len(matrix)
    return torch.cat(found)


def _materialise_buffers(model: Any, module: nn.Module) -> None:
    """Computes the buffers that the meta device left empty, by the model's own initialisation from its config."""
    missing = [name for name, buffer in module.named_buffers(recurse=False) if buffer.device.type == "meta"]
    for name in missing:
        setattr(module, name, torch.empty_like(getattr(module, name), device="cpu"))
    if missing:
        model._init_weights(module)
