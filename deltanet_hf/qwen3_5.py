"""Models that are Gated DeltaNet from birth: Qwen3.5's text model, with this project's layer in its linear layers.

Such a checkpoint has gated softmax attention in its kept layers, so the base class is `Qwen3_5ForCausalLM` itself and
only `layers[i].linear_attn` is replaced. What is gained: these kernels, LoRA on q, k, v apart, packing, left padding
and a cache that counts tokens. `deltanet-hf convert` renames the weights (convert/deltanet_convert/export).
"""

from __future__ import annotations

from os import PathLike
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

from deltanet_hf.config import DeltaNetOptions
from deltanet_hf.layer import DecayGate, GatedDeltaNet, GatedRMSNorm, ShortConv
from deltanet_hf.padding import announce_packing
from deltanet_hf.shim import write_shim

MODEL_TYPE = "deltanet_qwen3_5_text"


class NativeGatedDeltaNet(GatedDeltaNet):
    """The native profile with Qwen3.5's own head counts: fewer query and key heads than value heads.

    Sits at `model.layers[i].linear_attn`. q_proj, k_proj [key heads * D], v_proj, g_proj [value heads * D].
    """

    def __init__(self, config: DeltaNetQwen3_5TextConfig, layer_idx: int) -> None:
        nn.Module.__init__(self)
        self.options, self.layer_idx = DeltaNetOptions.from_dict(config.deltanet or {}), layer_idx
        self.head_dim = config.linear_value_head_dim
        self.num_heads = self.num_kv_heads = config.linear_num_value_heads
        self.use_rope = False
        self.q_norm = self.k_norm = None
        hidden, keys, values = config.hidden_size, config.linear_num_key_heads, config.linear_num_value_heads
        self.q_proj = nn.Linear(hidden, keys * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, keys * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, values * self.head_dim, bias=False)
        self.o_proj = nn.Linear(values * self.head_dim, hidden, bias=False)
        self.conv1d = ShortConv((2 * keys + values) * self.head_dim, self.options.conv_size)
        self.a_proj = nn.Linear(hidden, values, bias=False)
        self.b_proj = nn.Linear(hidden, values, bias=False)
        self.decay = DecayGate(values)
        self.householder = nn.ModuleList()
        self.g_proj = nn.Linear(hidden, values * self.head_dim, bias=False)
        self.norm = GatedRMSNorm((self.head_dim,), config.rms_norm_eps)

    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        cache_params: Cache | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """`linear_attn`'s signature. hidden_states [B, T, hidden] -> [B, T, hidden]."""
        output, _ = super().forward(hidden_states, None, attention_mask, cache_params, **kwargs)
        return output


class DeltaNetQwen3_5TextConfig(Qwen3_5TextConfig):
    """Qwen3_5TextConfig whose linear layers are this project's. `deltanet` follows from `layer_types`."""

    model_type = MODEL_TYPE
    deltanet: dict | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.linear_key_head_dim != self.linear_value_head_dim:
            raise ValueError(
                f"linear_key_head_dim: got {self.linear_key_head_dim}, expected linear_value_head_dim "
                f"({self.linear_value_head_dim}): one head size for keys and values"
            )
        linear = [i for i, kind in enumerate(self.layer_types or []) if kind == "linear_attention"]
        native = {**DeltaNetOptions.native(linear).to_dict(), "conv_size": self.linear_conv_kernel_dim}
        given = native if self.deltanet is None else self.deltanet
        self.deltanet = DeltaNetOptions.from_dict(given).to_dict()
        if self.deltanet != native:
            raise ValueError(f"deltanet: got {self.deltanet}, expected {native}, which layer_types and the sizes imply")
        plan = Qwen3_5TextConfig.base_model_tp_plan or {}
        # Its styles are for the fused projections.
        plan = {name: style for name, style in plan.items() if ".linear_attn." not in name}
        self.base_model_tp_plan = plan  # type: ignore[misc]

    def save_pretrained(self, save_directory: str | PathLike, *args: Any, **kwargs: Any) -> None:
        self.auto_map = write_shim(str(save_directory), type(self).__name__, DeltaNetQwen3_5ForCausalLM.__name__)
        super().save_pretrained(save_directory, *args, **kwargs)


class DeltaNetQwen3_5ForCausalLM(Qwen3_5ForCausalLM):
    """Qwen3_5ForCausalLM whose linear layers are `NativeGatedDeltaNet`."""

    config_class = DeltaNetQwen3_5TextConfig
    _is_stateful = True
    _keep_in_fp32_modules_strict = ["A_log", "dt_bias"]  # noqa: RUF012

    def __init__(self, config: DeltaNetQwen3_5TextConfig) -> None:
        super().__init__(config)
        for index in (config.deltanet or {})["layers"]:
            self.model.layers[index].linear_attn = NativeGatedDeltaNet(config, index)
        self.model.register_forward_pre_hook(announce_packing, with_kwargs=True)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (DecayGate, ShortConv, GatedRMSNorm)):
            module.reset_parameters()
        else:
            super()._init_weights(module)
