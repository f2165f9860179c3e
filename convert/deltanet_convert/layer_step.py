"""The steps for one decoder layer: run the teacher's, start the new one, check it, run the student's."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from deltanet_hf.errors import QualityError
from deltanet_hf.mixers import FLOAT32_NAMES
from deltanet_hf.mixers.attention.family_attention import kind_of
from deltanet_hf.mixers.attention.still_key_bias import drop_still_key_bias
from deltanet_hf.mixers.layer.layer_kind import branches_of
from deltanet_hf.mixers.layer.parts import Part
from deltanet_hf.models.far_positions import FarRotary, make_far
from deltanet_hf.models.layers import INSERTED_QK_NORMS, LayerTable
from deltanet_hf.process_memory import give_back_freed_memory

from .activations import Activations
from .compare_to_teacher import compare_outputs, softmax_error
from .expert_stream import round_experts
from .layer_stream import LayerStream
from .start import start_rule
from .start.key_order import measured_key_order, set_key_order
from .start.norm_fit import compare_attention, insert_norms
from .start.samples import LayerCalibration


@dataclass
class LayerWork:
    """A decoder layer on its way through the steps of `LayerStep`."""

    index: int
    layer: Any  # the teacher's, with its weights
    kwargs: dict[str, Any]  # its arguments, on its device
    new: Any  # the attention that takes the place of the teacher's; the teacher's own where it stays
    converted: bool  # whether softmax attention is replaced; otherwise it gets q/k norms at most
    inputs: Tensor | None  # [n, T, hidden]: inputs of the attention on the calibration text, until the fit is done
    key_order: Tensor | None  # [HK, 2, D], where the model has one (`start/key_order.py`)
    figures: dict[str, Any] = field(default_factory=dict)  # of the fit

    @property
    def changes(self) -> bool:
        """Whether there is something to fit."""
        return self.new is not self.layer.self_attn


@dataclass(frozen=True)
class LayerStep:
    """Converts the decoder layers of a stream in ascending order, each by `begin`, `fit` and `finish`.

    Args:
        stream: the teacher.
        student: the converted model on the meta device.
        dtype: dtype of the stored weights; the student runs in float32 with its weights rounded to this dtype.
        seed: random seed of the start values. Each layer has its own, so that a resumed run repeats them.
        device: the device on which layers run and are fitted; activations and finished layers are in main memory.
    """

    stream: LayerStream
    student: Any
    dtype: torch.dtype
    seed: int
    device: torch.device

    def begin(self, index: int, calibration: Tensor) -> LayerWork:
        """Loads layer `index` and advances `calibration`, the teacher's activations [n, T, hidden], in place.

        Where the student's keys have few bits, the teacher loses the biases that softmax does not see.
        """
        layer: Any = self.stream.load_layer(index).to(self.device)
        table = LayerTable.of(self.student.config)
        if table.cache_bits < 16:
            # The distances of windows end within the teacher's positions, and further ones turn no more by YaRN.
            teacher: Any = self.stream.model
            drop_still_key_bias(layer.self_attn, teacher.model.rotary_emb, teacher.config.max_position_embeddings)
        kwargs = tree_map_only(Tensor, lambda x: x.to(self.device), self.stream.layer_kwargs[index])
        new = self.student.model.layers[index].self_attn
        converted, ordered = table[index] is not None, table.key_order
        changes = converted or index in getattr(self.student.config, INSERTED_QK_NORMS, ())
        inputs, _ = _advance(layer, calibration, kwargs, keep=changes or ordered)
        order = measured_key_order(layer.self_attn, inputs, kwargs) if ordered else None
        kept = inputs if changes else None
        new = new if changes else layer.self_attn
        return LayerWork(index, layer, kwargs, new, converted, kept, order)

    def fit(self, work: LayerWork) -> None:
        """Gives the new attention its start values."""
        new, inputs = work.new, work.inputs
        assert inputs is not None
        if work.converted:
            _empty_layer(new, self.device)
            self._place_positions(new)
            work.figures = self._start(work, inputs)
        else:
            normed = new.float().to_empty(device=self.device)
            work.figures = dataclasses.asdict(insert_norms(work.layer.self_attn, normed, inputs, work.kwargs))
        work.inputs = None
        give_back_freed_memory()

    def finish(self, work: LayerWork, activations: Activations) -> tuple[nn.Module, dict[str, Any]]:
        """Checks the layer and advances `activations` by it; returns the layer to be stored, and its figures.

        The student's outputs are those of the stored layer, with the rounding of its weights and of its cache. Layers
        that keep softmax attention have figures only if q/k norms are inserted.
        """
        layer, new, kwargs, changes = work.layer, work.new, work.kwargs, work.changes
        inputs, wanted = _advance(layer, activations.held_out, kwargs, keep=changes)
        figures = self._check(work, inputs) if changes else {}
        layer.self_attn = new
        self._place_positions(new)
        if work.key_order is not None:
            set_key_order(new, work.key_order)
        _round(layer, self.dtype)
        kind_of(new).use_cache_bits(LayerTable.of(self.student.config).cache_bits)
        if changes:
            figures |= compare_outputs(new, inputs, wanted, self._of_student(kwargs))
        _advance(layer, activations.student, self._of_student(kwargs))
        return layer.to("cpu"), figures

    def _check(self, work: LayerWork, inputs: Tensor) -> dict[str, Any]:
        """The figures of the fit, and what compares the new attention's scores or weights with the teacher's."""
        attention, new, kwargs = work.layer.self_attn, work.new, work.kwargs
        if not work.converted:
            _round(new, self.dtype)
            kl, error = compare_attention(attention, new, inputs, kwargs)
            return {"attention_kl": kl, "logit_error": error} | work.figures
        if new.rearranges_weights:
            return work.figures | {"softmax_error": softmax_error(attention, new, inputs[:1], kwargs)}
        return work.figures

    def _start(self, work: LayerWork, inputs: Tensor) -> dict[str, Any]:
        """Runs the start rule of the new attention on the inputs [n, T, hidden]; returns its figures."""
        index, new = work.index, work.new
        calibration = LayerCalibration(inputs, work.kwargs)
        on_gpu = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=on_gpu), self.device:
            torch.manual_seed(self.seed * 1_000_003 + index)
            figures = start_rule(new.name)(work.layer.self_attn, new, calibration)
        for name, parameter in new.named_parameters():
            if not bool(torch.isfinite(parameter).all()):
                raise QualityError(
                    f"layer {index}: the start values of {name} are not finite; check the teacher's weights and the "
                    "numbers in its config.json"
                )
        return figures

    @functools.cached_property
    def _rotary(self) -> FarRotary | None:
        """The rotary embedding of a student that reads further, made from the teacher's."""
        meta = self.student.model.rotary_emb
        if not isinstance(meta, FarRotary):
            return None
        return FarRotary(self.stream.model.model.rotary_emb, meta.positions, meta.sink_bound, self.student.config)

    def _place_positions(self, attention: nn.Module) -> None:
        """Let the whole heads of a student that reads further rotate by the teacher's rotary embedding."""
        if self._rotary is not None:
            for branch in branches_of(attention).values():
                if kind_of(branch).keeps_all_tokens:
                    make_far(branch, self._rotary)

    def _of_student(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of the student's layer for those of the teacher's."""
        if self._rotary is None:
            return kwargs
        cos = kwargs["position_embeddings"][0]
        positions = torch.arange(cos.shape[1], device=cos.device).unsqueeze(0)
        return kwargs | {"position_embeddings": self._rotary(cos, positions)}

    def release(self, index: int) -> None:
        """Frees the memory of layer `index`."""
        layer = self.stream.layers[index]
        layer.self_attn.to("meta")
        layer.to("meta")


@torch.no_grad()
def _advance(layer: Any, hidden: Tensor, kwargs: dict[str, Any], *, keep: bool = False) -> tuple[Tensor, Tensor]:
    """Replaces hidden [n, T, hidden] by the layer's output, one sequence at a time.

    Returns:
        With `keep`, the inputs and outputs of the layer's attention, both [n, T, hidden]; otherwise two empty tensors.
    """
    device = next(layer.parameters()).device
    seen: list[Tensor] = []
    made: list[Tensor] = []

    def catch(module: nn.Module, args: tuple[Any, ...], inner: dict[str, Any], output: Any) -> None:
        seen.append(inner["hidden_states"] if "hidden_states" in inner else args[0])
        made.append(output[0])

    handle = layer.self_attn.register_forward_hook(catch, with_kwargs=True) if keep else None
    for row in hidden.split(1):
        row.copy_(layer(row.to(device), **kwargs))
    if handle is None:
        return hidden.new_empty(0), hidden.new_empty(0)
    handle.remove()
    return torch.cat(seen), torch.cat(made)


def _empty_layer(layer: nn.Module, device: torch.device) -> nn.Module:
    """Moves a layer from the meta device to float32 memory: parts get their start values, all else is NaN."""
    layer.float().to_empty(device=device).requires_grad_(False)
    for parameter in layer.parameters():
        parameter.fill_(torch.nan)
    for module in layer.modules():
        if isinstance(module, Part):
            module.reset_parameters()
    return layer


@torch.no_grad()
def _round(module: nn.Module, dtype: torch.dtype) -> None:
    """Rounds the weights to the dtype in which they are stored."""
    for name, parameter in module.named_parameters():
        if name.rpartition(".")[2] not in FLOAT32_NAMES:
            parameter.copy_(parameter.to(dtype))
    round_experts(module, dtype)
