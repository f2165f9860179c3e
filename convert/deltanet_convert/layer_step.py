"""One decoder layer's part of a conversion: run the teacher, fit the new layer, check it, run the student."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deltanet_hf.layer import DecayGate, GatedDeltaNet, GatedRMSNorm, ShortConv

from .activations import Activations
from .initialise import LayerCalibration, initialise_layer
from .stream import LayerStream
from .verify import LayerCheck, compare_outputs, softmax_error


@dataclass(frozen=True)
class LayerStep:
    """Turns layers of a stream, one after the other.

    Args:
        stream: the teacher.
        student: the converted model on the meta device.
        dtype: of the stored weights; the student is run with its weights rounded to it.
        seed: of the fit; each layer draws from its own generator, so that a resumed run repeats it.
        fit_memory: fit decay and write strength; see `initialise_layer`.
    """

    stream: LayerStream
    student: Any
    dtype: torch.dtype
    seed: int
    fit_memory: bool

    def run(self, index: int, activations: Activations) -> tuple[nn.Module, dict[str, Any]]:
        """Advances `activations` by layer `index`; the layer as it is to be stored, and its figures.

        Unconverted layers have no figures.
        """
        layer: Any = self.stream.load_layer(index)
        kwargs = self.stream.layer_kwargs[index]
        attention, figures = layer.self_attn, {}
        if isinstance(self.student.model.layers[index].self_attn, GatedDeltaNet):
            inputs, _ = _advance(layer, activations.calibration, kwargs, keep=True)
            mixer = _empty_mixer(self.student.model.layers[index].self_attn)
            figures = self._fit(index, attention, mixer, inputs, kwargs)
            del inputs
            inputs, wanted = _advance(layer, activations.held_out, kwargs, keep=True)
            error = softmax_error(attention, mixer, inputs[:1], kwargs)
            _round(mixer, self.dtype)
            cosine, relative_mse = compare_outputs(mixer, inputs, wanted, kwargs)
            figures |= dataclasses.asdict(LayerCheck(error, cosine, relative_mse))
            layer.self_attn = mixer
            del attention
        else:
            _advance(layer, activations.calibration, kwargs)
            _advance(layer, activations.held_out, kwargs)
        _round(layer, self.dtype)
        _advance(layer, activations.student, kwargs)
        return layer, figures

    def _fit(
        self, index: int, attention: nn.Module, mixer: GatedDeltaNet, inputs: Tensor, kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed * 1_000_003 + index)
            found = initialise_layer(attention, mixer, LayerCalibration(inputs, kwargs), self.fit_memory)
        for name, parameter in mixer.named_parameters():
            if not bool(torch.isfinite(parameter).all()):
                raise RuntimeError(f"layer {index}: the start values of {name} are not finite")
        return dataclasses.asdict(found)

    def release(self, index: int) -> None:
        """Gives the memory of layer `index` back."""
        layer = self.stream.layers[index]
        layer.self_attn.to("meta")
        layer.to("meta")


@torch.no_grad()
def _advance(layer: Any, hidden: Tensor, kwargs: dict[str, Any], *, keep: bool = False) -> tuple[Tensor, Tensor]:
    """Replaces hidden [n, T, hidden] by the layer's output, one sequence at a time.

    With `keep`, returns the inputs and outputs of its attention, [n, T, hidden]; else two empty tensors.
    """
    seen: list[Tensor] = []
    made: list[Tensor] = []

    def catch(module: nn.Module, args: tuple[Any, ...], inner: dict[str, Any], output: Any) -> None:
        seen.append(inner["hidden_states"] if "hidden_states" in inner else args[0])
        made.append(output[0])

    handle = layer.self_attn.register_forward_hook(catch, with_kwargs=True) if keep else None
    for row in hidden.split(1):
        row.copy_(layer(row, **kwargs))
    if handle is None:
        return hidden.new_empty(0), hidden.new_empty(0)
    handle.remove()
    return torch.cat(seen), torch.cat(made)


def _empty_mixer(mixer: GatedDeltaNet) -> GatedDeltaNet:
    """A meta layer in float32 memory: at its start where one is defined, else NaN until it is fitted."""
    mixer.float().to_empty(device="cpu").requires_grad_(False)
    for parameter in mixer.parameters():
        parameter.fill_(torch.nan)
    for module in mixer.modules():
        if isinstance(module, (DecayGate, GatedRMSNorm, ShortConv)):
            module.reset_parameters()
    return mixer


@torch.no_grad()
def _round(module: nn.Module, dtype: torch.dtype) -> None:
    """Rounds the weights to what will be stored; a decay gate is stored in float32."""
    for child in module.modules():
        if not isinstance(child, DecayGate):
            for parameter in child.parameters(recurse=False):
                parameter.copy_(parameter.to(dtype))
