"""A mixer without gradients by few launches: the steps of `Mixer` that it computes in another way.

The projections of x are one matrix product, and each learned norm of q and k one kernel. Of a prompt, one kernel
computes the gates (those of Gated DeltaNet), one the inputs of recurrence and window; after the recurrence, one
computes norm and gate, or, with a window, three its attention, its cache and the mixture. Of a step of the gated delta
rule, one kernel computes everything between the projections and the window, another (three in 8 or 4 bits) attends in
the window at the same time, and one mixes. A step of another rule is computed as a prompt of one token.

The inputs of padded prompts, of several sequences in a row and of convolutions of the keys alone are computed as in
`Mixer`; so are, with a window in 8 or 4 bits, padded steps, in 3 or 2 bits every step, and what `packed.py` does not
compute of a state of what has left a window.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from deltanet_hf.fast.parts import MergedProjection, fronted
from deltanet_hf.fast.window import mixture, window_attended, window_step
from deltanet_hf.mixers.cache.state import State
from deltanet_hf.mixers.layer.delta_rule import DeltaRule
from deltanet_hf.mixers.layer.layer_call import LayerCall, Projected
from deltanet_hf.mixers.layer.layer_kind import PositionEmbeddings
from deltanet_hf.mixers.layer.mixer import Mixer
from deltanet_hf.mixers.layer.parts import DecayGate
from deltanet_kernels import gate_values, gated_delta_step_, gated_rms_norm, prompt_inputs
from deltanet_kernels.arguments import GatedNormCall
from deltanet_kernels.common.device import two_streams
from deltanet_kernels.prompt.calls import GateValuesCall, PromptInputs, PromptInputsCall


class FastMixer(Mixer):
    """Comes before the class of a mixer (`paired_class`), so that `super()` is the mixer's own."""

    merged: MergedProjection
    has_step: bool = False
    """Whether kernels compute all of a step, which changes the state in place and takes the `state_indices` of a
    server's cache."""

    @classmethod
    def of(cls, mixer: Mixer, may_move: bool) -> Any:
        """A second layer with the parts of `mixer`; `may_move` as in `MergedProjection`."""
        return fronted(cls, mixer, [linear for linear in mixer.readers if linear is not None], may_move)

    @property
    def takes_prompt_length(self) -> bool:  # type: ignore[override]
        return self.has_prompt or self.delays

    @cached_property
    def has_prompt(self) -> bool:
        """Whether a kernel computes the inputs of a prompt without padding."""
        branch = self.window_branch
        if self.conv1d is not None and self.settings.conv_on == "k":
            return False
        return branch is None or (branch.learned_sinks is None and not branch.delayed)

    def project(self, x: Tensor) -> Projected:
        outputs = iter(self.merged(x))
        return self.projected(x, [None if linear is None else next(outputs) for linear in self.readers])

    @property
    def conv_weight(self) -> Tensor | None:
        """The taps of the convolution [C, W]."""
        return None if self.conv1d is None else self.conv1d.weight.detach().squeeze(1)

    def inputs(
        self, projected: Projected, position_embeddings: PositionEmbeddings | None, call: LayerCall
    ) -> PromptInputs:
        """As in the base class, by one kernel."""
        if not self.has_prompt or call.padding is not None or call.cu_seqlens is not None:
            return super().inputs(projected, position_embeddings, call)
        (q, k, v), branch, state, size = projected[1:4], self.window_branch, call.state, self.head_dim
        conv_weight = self.conv_weight
        cos, sin = self.angles(position_embeddings)
        own_heads = 0 if branch is None else self.k_proj.out_features // size
        differs = self.conv1d is not None or self.k_offset is not None or self.qk_silu or self.kv_repeats > 1
        kernel = PromptInputsCall(
            q,
            k,
            v,
            size,
            conv_weight=conv_weight,
            conv_tail=None if conv_weight is None or state is None else state["conv_tail"],
            cos=cos,
            sin=sin,
            k_offset=self.key_offset,
            qk_silu=self.qk_silu,
            v_silu=self.v_silu,
            window_heads=own_heads if differs else 0,
            output_tail=conv_weight is not None and call.keep_state,
            kv_repeats=self.kv_repeats,
        )
        # The state comes with the cache and the rotation with the call: from elsewhere than the layer.
        if state is not None or not _rotates(q, cos, sin, size):
            prompt_inputs.check(kernel)
        found = prompt_inputs.unchecked(kernel)
        if branch is not None and not differs:
            found = found._replace(window_q=found.q, window_k=found.k[:, :, -own_heads:])
        if found.tail is not None and conv_weight is not None and call.prompt_length is not None:
            found = found._replace(tail=self._tail((q, k, v), conv_weight.shape[1] - 1, call.prompt_length))
        return found

    def _tail(self, parts: tuple[Tensor, Tensor, Tensor], size: int, prompt_length: Tensor) -> Tensor:
        """The last `size` inputs of the convolution [B, C, size] before padding; zeros before the first token."""
        places = prompt_length + torch.arange(-size, 0, device=prompt_length.device)
        q, k, v = self.repeated(*(x.index_select(1, places.clamp_min(0)) for x in parts))
        tail = torch.cat([q, k, v], dim=-1).masked_fill((places < 0).unsqueeze(-1), 0)
        return tail.transpose(1, 2).contiguous()

    def finished(
        self, output: Tensor, projected: Projected, inputs: PromptInputs, call: LayerCall
    ) -> tuple[Tensor, State]:
        """As in the base class: norm and gate are one kernel, with a window that of the mixture."""
        branch, norm, gate = self.window_branch, self.norm, projected.gate
        if branch is not None:
            q, k, v = inputs.window_q, inputs.window_k, self.window_values(projected)
            window_output, state = window_attended(branch, q, k, v, call)  # type: ignore[arg-type]
            return mixture(branch, projected.mixing_logits, window_output, output, gate, norm), state  # type: ignore[arg-type]
        if norm is None:
            return super().finished(output, projected, inputs, call)
        return gated_rms_norm.unchecked(GatedNormCall(output, gate, norm.weight, norm.eps)), {}

    @property
    def qk_silu(self) -> bool:
        return bool(self.settings.qk_activation == "silu")

    @property
    def v_silu(self) -> bool:
        return bool(self.settings.v_activation == "silu")

    @property
    def key_offset(self) -> Tensor | None:
        """[HK, D], subtracted from the keys."""
        return None if self.k_offset is None else self.k_offset.weight


class FastDeltaRule(FastMixer, DeltaRule):
    """As `FastMixer`, of a `DeltaRule`."""

    def gates_of(self, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        if type(self).strength is not DeltaRule.strength or type(self.decay) is not DecayGate:
            return super().gates_of(a, b)
        return gate_values.unchecked(GateValuesCall(a, b, self.decay.A_log, self.decay.dt_bias, self.max_strength))

    @cached_property
    def has_step(self) -> bool:  # type: ignore[override]
        bits = 16 if self.window_branch is None else self.window_branch.cache_bits  # 3 and 2 have no packed form
        return self.has_prompt and bits >= 4 and self.has_operators

    def steps(self, x: Tensor, call: LayerCall) -> bool:
        """Whether a call of x [B, T, ...] is a step that changes the state in place."""
        if x.shape[1] != 1 or not self.has_step or call.cache is None or not call.cache.may_change:
            return False
        return call.padding is None or self.window_branch is None or self.window_branch.cache_bits == 16

    def masked(self, x: Tensor, call: LayerCall) -> Tensor:
        """As in the base class; the kernels of a step know its padding."""
        return x if self.steps(x, call) else super().masked(x, call)

    def attend(
        self, projected: Projected, position_embeddings: PositionEmbeddings | None, call: LayerCall
    ) -> tuple[Tensor, State]:
        """As in the base class; a step changes the state in the cache in place."""
        if not self.steps(projected.x, call):
            return super().attend(projected, position_embeddings, call)
        assert call.cache is not None
        state, padding, conv_weight, norm = call.cache.state, call.padding, self.conv_weight, self.norm
        tail = state["conv_tail"].clone() if padding is not None and conv_weight is not None else None
        x, q, k, v = projected[:4]
        rule_gates = self.step_gates(projected)
        cos, sin = self.angles(position_embeddings)

        def recur() -> Tensor:
            return gated_delta_step_(
                q,
                k,
                v,
                rule_gates.a,
                rule_gates.b,
                state["state"],
                rule_gates.A_log,
                rule_gates.dt_bias,
                conv_weight,
                state.get("conv_tail"),
                projected.gate,
                None if norm is None else norm.weight,
                padding,
                cos,
                sin,
                eps=1e-6 if norm is None else norm.eps,
                qk_silu=self.qk_silu,
                v_silu=self.v_silu,
                k_offset=self.key_offset,
                allow_neg_eigval=self.settings.allow_neg_eigval,
                use_beta_sigmoid_in_kernel=rule_gates.sigmoid,
                erase=self.erase,
                kv_repeats=self.kv_repeats,
                state_indices=call.state_indices,
            )

        branch = self.window_branch
        if branch is None:
            output = recur()
        else:
            own_q, own_k, own_v = map(self.split_heads, (q, k, v))
            rest = state, padding, cos, sin, call.state_indices
            state_output, window_output = two_streams(
                (recur, lambda: window_step(branch, own_q, own_k, own_v, *rest)), x.device
            )
            output = mixture(branch, projected.mixing_logits, window_output, state_output)  # type: ignore[arg-type]
        if tail is not None and padding is not None:  # the kernels move the tail of all rows
            state["conv_tail"].copy_(tail.where(padding.unsqueeze(-1), state["conv_tail"]))
        return output, state


def _rotates(q: Tensor, cos: Tensor | None, sin: Tensor | None, head_dim: int) -> bool:
    """Whether the tokens of q [B, T, heads * head_dim], at least one, fit the rotary embedding, if there is one."""
    if 0 in q.shape or cos is None or sin is None:
        return cos is sin and 0 not in q.shape
    if cos.dim() != 3 or cos.shape != sin.shape or not cos.device == sin.device == q.device:
        return False
    rows, tokens, turned = cos.shape
    fits = rows in (1, q.shape[0]) and tokens == q.shape[1] and 0 < turned <= head_dim and turned % 2 == 0
    return fits and cos.is_floating_point() and sin.is_floating_point()
