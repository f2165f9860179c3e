"""The model families that can be converted.

How to add one: append a row. The family's attention must follow the common pattern of transformers: `q_proj`,
`k_proj`, `v_proj` (or one fused `qkv_proj` holding q|k|v) and `o_proj`; optional `q_norm`/`k_norm`, over a head or over
the whole projection; `apply_rotary_pos_emb` and `eager_attention_forward` in its modeling module. Everything else
(biases, head counts, partial rotary, layers without rotary, sliding windows) is read off the module that the family's
own constructor builds. `tests/plugin` and `tests/convert` run over every row of this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import transformers
from transformers import PreTrainedConfig

from deltanet_hf.model_types import PREFIX

if TYPE_CHECKING:
    from transformers import PreTrainedModel  # whose import is that of the Auto classes, see configurations.py


@dataclass(frozen=True)
class Family:
    """One supported teacher: its `model_type` and the names of its classes in transformers."""

    model_type: str
    config_name: str
    model_name: str

    @property
    def converted_model_type(self) -> str:
        """`model_type` of a converted model; never the teacher's, which would load as plain softmax."""
        return PREFIX + self.model_type

    @property
    def converted_model_name(self) -> str:
        """Class of a converted model."""
        return f"DeltaNet{self.model_name}"

    @property
    def config_class(self) -> type[PreTrainedConfig]:
        return getattr(transformers, self.config_name)

    @property
    def model_class(self) -> type[PreTrainedModel]:
        return getattr(transformers, self.model_name)


FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family("llama", "LlamaConfig", "LlamaForCausalLM"),
        Family("mistral", "MistralConfig", "MistralForCausalLM"),
        Family("qwen2", "Qwen2Config", "Qwen2ForCausalLM"),
        Family("qwen3", "Qwen3Config", "Qwen3ForCausalLM"),
        Family("olmo2", "Olmo2Config", "Olmo2ForCausalLM"),
        Family("olmo3", "Olmo3Config", "Olmo3ForCausalLM"),
        Family("granite", "GraniteConfig", "GraniteForCausalLM"),
        Family("smollm3", "SmolLM3Config", "SmolLM3ForCausalLM"),
        Family("gemma2", "Gemma2Config", "Gemma2ForCausalLM"),
        Family("gemma3_text", "Gemma3TextConfig", "Gemma3ForCausalLM"),
        Family("phi3", "Phi3Config", "Phi3ForCausalLM"),
        Family("qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
        Family("olmoe", "OlmoeConfig", "OlmoeForCausalLM"),
        Family("mixtral", "MixtralConfig", "MixtralForCausalLM"),
        Family("granitemoe", "GraniteMoeConfig", "GraniteMoeForCausalLM"),
        Family("gpt_oss", "GptOssConfig", "GptOssForCausalLM"),
    )
}


def caps_scores(config: PreTrainedConfig | type[PreTrainedConfig]) -> bool:
    """Whether softmax scores are capped, as C tanh(s / C) (Gemma 2). PyTorch's attention (SDPA) has no cap."""
    return getattr(config, "attn_logit_softcapping", None) is not None
