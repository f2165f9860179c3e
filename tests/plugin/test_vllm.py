"""vLLM gives the tokens of `generate`, whatever it makes of prompts, steps and pages. Needs vLLM (docs/serving.md)."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from packaging.version import Version
from transformers import PreTrainedModel

from deltanet_hf.mixers import FLOAT32_NAMES, MIXERS
from deltanet_hf.mixers.layer.mixer import Mixer
from deltanet_hf.models import qwen3_5
from deltanet_hf.models.families import FAMILIES
from deltanet_hf.models.far_positions import FarPositions
from deltanet_hf.models.layers import LayerTable
from support.replayed_step import EmulatedCapture
from support.tiny_models import ONE_NORM, READS_ALL, mixed_mixture_table, mixture_table, tiny_table
from support.vllm_engine import TOKENS, Answer, by_generate, by_vllm, prompts, served_model

LENGTHS = (5, 1, 40, 150, 33, 7, 200)
NEAR = {"mixer": "gated_deltanet+window", "window": 5, "sinks": 2, "state_dtype": "float32", **READS_ALL}
DELAYED = {"mixer": "gated_deltanet+window", "window": 33, "state_dtype": "float32"}  # of what has left the window


def skip_where_refused(refused: bool = True) -> None:
    """Skips what vLLM 0.25 does not serve (docs/serving.md)."""
    import vllm

    if refused and Version(vllm.__version__) < Version("0.32"):
        pytest.skip("needs vLLM 0.32")


def packed(table: LayerTable, bits: int = 4, key_order: bool = False) -> LayerTable:
    return dataclasses.replace(table, cache_bits=bits, key_order=key_order)


def few_pages(count: int) -> dict[str, int]:
    """So many pages of at least 128 tokens, vLLM's size on CPUs; on GPUs it is 16, and more pages hold a sequence."""
    return {"num_gpu_blocks_override": count, "block_size": 128}


def assert_equal(model: PreTrainedModel, texts: list[list[int]], tolerance: float = 2e-3, **settings: Any) -> list[int]:
    """Compares all tokens and their log probabilities; returns how many tokens of each prompt vLLM found cached."""
    expected, found = by_generate(model, texts), by_vllm(model, texts, **settings)
    assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=tolerance)
    return [answer.cached for answer in found]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_with_states_windows_and_softmax_layers(model_type: str) -> None:
    skip_where_refused(model_type == "gpt_oss")
    assert_equal(served_model(model_type, mixture_table()), prompts(*LENGTHS))


@pytest.mark.parametrize("mixer", [name for name in MIXERS if name not in ("window", "mixed_heads")])
def test_every_mixer_between_softmax_layers(mixer: str) -> None:
    assert_equal(served_model("llama", tiny_table(layers=(0, 2), mixer=mixer)), prompts(*LENGTHS))


@pytest.mark.parametrize(
    ("mixer", "beside"), [("deltaproduct+window", NEAR), ("kda+window", NEAR), ("kda+window", DELAYED)], ids=str
)
def test_other_rules_beside_a_window(mixer: str, beside: dict[str, Any]) -> None:
    model = served_model("llama", tiny_table(layers=(0, 2), **{**beside, "mixer": mixer}))
    assert_equal(model, prompts(*LENGTHS))


@pytest.mark.parametrize("mixer", ["fox", "path"])
@pytest.mark.parametrize("model_type", ["gemma2", "olmo3"])
def test_kinds_of_attention_in_families_with_sliding_windows(model_type: str, mixer: str) -> None:
    skip_where_refused(mixer == "fox")
    assert_equal(served_model(model_type, tiny_table(layers=(0, 1, 2), mixer=mixer)), prompts(*LENGTHS))


@pytest.mark.parametrize(
    "changes",
    [{}, NEAR, DELAYED, {"mixer": "window", "window": 5, "sinks": 2}, {"mixer": "fox"}, {"mixer": "path"}],
    ids=str,
)
def test_models_without_softmax_layers(changes: dict[str, Any]) -> None:
    assert_equal(served_model("llama", tiny_table(**changes)), prompts(*LENGTHS))


@pytest.mark.parametrize("model_type", [name for name in FAMILIES if name not in ONE_NORM])
def test_mixed_heads(model_type: str) -> None:
    skip_where_refused(model_type == "gpt_oss")
    assert_equal(served_model(model_type, mixed_mixture_table(delayed=False)), prompts(*LENGTHS))


def test_a_number_of_softmax_heads_that_does_not_divide_that_of_other_layers() -> None:
    skip_where_refused()
    table = LayerTable.from_dict(
        {
            "kinds": {"most": {"mixer": "mixed_heads", "heads": ["softmax", "window", "softmax", "softmax"]}},
            "layers": ["most", "softmax", "most", "most"],
        },
        4,
    )
    assert_equal(served_model("llama", table, num_key_value_heads=4), prompts(*LENGTHS))


def test_the_layer_of_qwen3_5_between_its_gated_attention() -> None:
    config = qwen3_5.DeltaNetQwen3_5TextConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        max_position_embeddings=512,
        layer_types=["linear_attention", "full_attention"] * 2,
        architectures=[qwen3_5.MODEL_NAME],
    )
    torch.manual_seed(0)
    assert_equal(qwen3_5.model_class()(config).eval(), prompts(*LENGTHS))


@pytest.mark.parametrize(
    "table",
    [
        tiny_table(layers=(0, 2), **NEAR),
        tiny_table(**NEAR),
        tiny_table(layers=(0, 2), **DELAYED),
        tiny_table(layers=(0, 2), mixer="path"),
        mixed_mixture_table(delayed=False),
    ],
    ids=["hybrid", "states", "delayed", "path", "mixed_heads"],
)
def test_prompts_that_begin_alike_go_on_from_cached_states(table: LayerTable) -> None:
    first, second, *ends = prompts(300, 140, 10, 30, 3, 5, 100)
    texts = [first + ends[0], first + ends[1], first[:290] + ends[2], second + ends[3], second + ends[4]]
    settings: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 256, "enable_prefix_caching": True}
    model = served_model("llama", table)
    cached = assert_equal(model, texts * 2, **settings)
    assert sum(tokens > 0 for tokens in cached) >= 5, cached
    assert assert_equal(model, texts, **{**settings, "enable_prefix_caching": False}) == [0] * len(texts)


@pytest.mark.parametrize("caching", [True, False])
def test_preempted_sequences_begin_again(caching: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    preempted, original = [], Scheduler._preempt_request

    def count(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        preempted.append(request.request_id)
        original(self, request, *args, **kwargs)

    monkeypatch.setattr(Scheduler, "_preempt_request", count)
    model = served_model("llama", tiny_table(layers=(0, 2), **NEAR))
    texts = prompts(120, 125, 118, 122, 60, 30, 1, 1)  # the last ones get pages that others have used
    settings = {"max_num_seqs": 6, "max_num_batched_tokens": 128, "enable_prefix_caching": caching}
    assert_equal(model, texts, **few_pages(10), **settings)
    assert preempted


def test_an_engine_in_processes_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `vllm serve` runs it: the configuration reaches the process with the model pickled."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    assert_equal(served_model("qwen3", mixture_table()), prompts(*LENGTHS))


@pytest.mark.parametrize("changes", [{**NEAR, "state_dtype": "bfloat16"}, {"mixer": "comba"}, {"mixer": "deltaformer"}])
def test_in_bfloat16_the_tokens_are_as_good_as_those_of_generate(changes: dict[str, Any]) -> None:
    """Rounding decides between nearly equal tokens, so both are measured by the logits of the model in float32."""
    model = served_model("llama", tiny_table(layers=(0, 2), **changes)).bfloat16()
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[2] in FLOAT32_NAMES:
            parameter.data = parameter.data.float()
    exact, texts = copy.deepcopy(model).float(), prompts(*LENGTHS)

    def shortfall(answers: list[Answer]) -> float:
        """The largest distance of a chosen token's logit from the best one's."""
        worst = 0.0
        for text, (tokens, _, _) in zip(texts, answers, strict=True):
            with torch.no_grad():
                logits = exact(torch.tensor([text + tokens])).logits[0, -TOKENS - 1 : -1]
            chosen = logits.gather(-1, torch.tensor(tokens)[:, None]).squeeze(-1)
            worst = max(worst, float((logits.amax(-1) - chosen).max()))
        return worst

    found = by_vllm(model, texts, dtype="bfloat16")
    assert shortfall(found) <= 2 * shortfall(by_generate(model, texts, "cpu")) <= 0.6


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"enable_lora": True}, "enable_lora"),
    ],
    ids=str,
)
def test_what_is_not_served_is_refused_by_name(settings: dict[str, Any], named: str) -> None:
    if "parallel" in named and torch.cuda.device_count() == 1:
        pytest.skip("needs two GPUs: with one, vLLM itself refuses two workers, before it asks the plugin")
    with pytest.raises(ValueError, match=f"{named}: not served for models with converted layers; pass"):
        by_vllm(served_model("llama", tiny_table(layers=(0, 2))), prompts(3), **settings)


WINDOW = {"mixer": "window", "window": 40, "sinks": 2}
STEP = 0.03  # of a log probability: rounding errors in float32 decide which of two steps of 4 bits a number is
FEW_TIES, FEW_TIES_REPLAYED = 4, 3  # seeds of prompts in which no such decision moves a token


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_with_packed_keys_and_values(model_type: str) -> None:
    """Windows, states beside a window and softmax layers."""
    assert_equal(
        served_model(model_type, packed(mixture_table())), prompts(*LENGTHS, 64, 65, 31, 32, 33, seed=FEW_TIES), STEP
    )


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("changes", [{}, NEAR, DELAYED, WINDOW], ids=str)
def test_packed_tokens_of_all_and_of_no_softmax_layers(changes: dict[str, Any], bits: int) -> None:
    for table in (tiny_table(layers=(), **changes), tiny_table(**changes)):
        assert_equal(served_model("llama", packed(table, bits)), prompts(*LENGTHS, 64, 32, 33), STEP)


@pytest.mark.parametrize("tokens", [512, 96])
@pytest.mark.parametrize(
    "table",
    [
        tiny_table(layers=(0, 2), **DELAYED),
        packed(tiny_table(layers=(0, 2), **DELAYED)),
        packed(tiny_table(**{**DELAYED, "mixer": "kda+window"}), 8),
        packed(mixed_mixture_table(delayed=True), key_order=True),
    ],
    ids=["16 bits", "4 bits", "kda, 8 bits", "mixed heads, 4 bits"],
)
def test_prompts_that_begin_in_one_step(table: LayerTable, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a window and far beyond it, beside later parts of others and sequences that are being continued."""
    from deltanet_hf.vllm_plugin.layer import StateLayer

    called: list[tuple[int, ...]] = []
    read = StateLayer.several_tokens

    def several_tokens(self: Any, steps: Any, prompts: Any, *rest: Any) -> torch.Tensor:
        called.append(prompts.lengths)
        return read(self, steps, prompts, *rest)

    monkeypatch.setattr(StateLayer, "several_tokens", several_tokens)
    texts = prompts(33, 1, 150, 31, 32, 2, 100, 65, 3, 200, 64, seed=FEW_TIES)
    assert_equal(served_model("llama", table), texts, STEP, max_num_seqs=8, max_num_batched_tokens=tokens)
    assert any(len(lengths) > 2 and max(lengths) >= min(tokens, 150) // 3 for lengths in called), called


def test_states_in_8_bits() -> None:
    """They are rounded where a part of a prompt ends, so prompts are read whole, as `generate` reads them."""
    table = packed(tiny_table(layers=(0, 2), **{**DELAYED, "state_dtype": "int8"}))
    assert_equal(served_model("llama", table), prompts(*LENGTHS, 64, 32, 33), STEP, max_num_batched_tokens=512)


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_packed_single_heads(model_type: str, delayed: bool) -> None:
    assert_equal(
        served_model(model_type, packed(mixed_mixture_table(delayed=delayed))), prompts(*LENGTHS, 64, 32, 33), STEP
    )


def test_packed_tokens_and_prefix_caching() -> None:
    """Pages of packed tokens are long, as they are as large as a state."""
    common, *ends = prompts(400, 10, 30, 5)
    settings = {"max_num_seqs": 2, "max_num_batched_tokens": 512, "enable_prefix_caching": True}
    model = served_model("llama", packed(tiny_table(layers=(0, 2), mixer="window", window=5, sinks=2)))
    cached = assert_equal(model, [common + end for end in ends * 2], STEP, **settings)
    assert sum(tokens > 0 for tokens in cached) >= 4, cached


DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}}


@pytest.mark.parametrize(
    "table",
    [
        mixture_table(),
        packed(mixture_table()),
        packed(mixed_mixture_table(delayed=False)),
        packed(tiny_table(layers=(0, 2), **DELAYED), 8),
        tiny_table(layers=(0, 2), mixer="kda"),
        tiny_table(layers=(0, 2), mixer="fox"),
    ],
    ids=["mixture", "packed", "packed_heads", "delayed, 8 bits", "kda", "fox"],
)
def test_drafts_of_which_some_are_rejected(table: LayerTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that go wrong at random places, beside prompts in parts; every third step has none."""
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer

    model, texts = served_model("llama", table), prompts(*LENGTHS, 64, 32, 33, 1, 1)  # the last ones get used pages
    answers = by_generate(model, texts)
    whole = [text + answer.tokens for text, answer in zip(texts, answers, strict=True)]
    accepted: list[int] = []
    steps = itertools.count()
    random = torch.Generator().manual_seed(0)

    def propose(_: Any, count: int, sampled: list[list[int]], totals: Any, ids: Any, **__: Any) -> list[list[int]]:
        drafts, count = [], count if next(steps) % 3 else 0
        for new, total, row in zip(sampled, totals, ids, strict=False):
            accepted.append(len(new))
            begun = row[:total].tolist()
            rest = next((text[total:] for text in whole if text[:total] == begun), [])[:count]
            wrong = int(torch.randint(count + 1, (), generator=random))
            drafts.append([(token + (place == wrong)) % 97 for place, token in enumerate(rest)] if new else [])
        return drafts

    monkeypatch.setattr(NgramProposer, "propose", propose)
    settings: dict[str, Any] = {**DRAFTS, "enable_prefix_caching": torch.cuda.is_available()}
    if torch.cuda.is_available():  # Only there can vLLM copy states between pages; a step then takes a page of tokens.
        settings["max_num_batched_tokens"] = 288
    found = by_vllm(model, texts, **settings)
    assert [answer.tokens for answer in found] == [answer.tokens for answer in answers]
    for one, other in zip(found, answers, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=STEP)
    assert set(accepted) >= {1, 2, 3, 4}


def test_drafts_beside_path_are_refused() -> None:
    with pytest.raises(ValueError, match="speculative_config: not served for models with converted layers; pass none"):
        by_vllm(served_model("llama", tiny_table(layers=(0, 2), mixer="path")), prompts(3), **DRAFTS)


def test_bits_without_a_packed_form_and_further_positions_are_refused() -> None:
    with pytest.raises(ValueError, match="cache_bits: not served for models with converted layers; pass a model"):
        by_vllm(served_model("llama", packed(tiny_table(layers=(0, 2)), 3)), prompts(3))
    further = dataclasses.replace(LayerTable.preset(4, "window"), positions=FarPositions("yarn", 128, 256))
    with pytest.raises(ValueError, match="positions: not served for models with converted layers; pass a model"):
        by_vllm(served_model("llama", further), prompts(3), max_model_len=256)


@pytest.fixture
def captured_steps(monkeypatch: pytest.MonkeyPatch) -> EmulatedCapture:
    """Layers capture their steps of single tokens, one for each number of sequences, and replay them from then on."""
    from deltanet_hf.vllm_plugin.batch import StepBuilder
    from deltanet_hf.vllm_plugin.layer import ServedLayer

    capture, graphs = EmulatedCapture(), {}
    build, compute = StepBuilder.build, ServedLayer.compute

    def widest(self: Any, common_prefix_len: int, common_attn_metadata: Any) -> Any:
        """As vLLM asks for it when it captures a graph."""
        return build(self, common_prefix_len, dataclasses.replace(common_attn_metadata, max_seq_len=512))

    def replayed(self: Any, steps: dict[str, Any], x: torch.Tensor, angles: Any) -> torch.Tensor:
        step, inputs = steps[self.leading], [x, *(angles or ())]
        if step.prompts:
            return compute(self, steps, x, angles)
        if (self.name, step.num_decodes) not in graphs:
            held = [part.clone() for part in inputs]
            captured = capture(lambda: compute(self, steps, held[0], held[1:] or None), x.device)
            graphs[self.name, step.num_decodes] = held, captured
        held, captured = graphs[self.name, step.num_decodes]
        for part, new in zip(held, inputs, strict=True):
            part.copy_(new)
        captured.replay()
        return captured.output.clone()

    monkeypatch.setattr(StepBuilder, "build", widest)
    monkeypatch.setattr(ServedLayer, "compute", replayed)
    return capture


# Mesa looks at its residuals on CPUs only.
RECURRENT = [name for name, kind in MIXERS.items() if issubclass(kind, Mixer) and name != "mesa"]
CAPTURED = {
    **{mixer: tiny_table(layers=(0,), mixer=mixer) for mixer in RECURRENT},
    "near": tiny_table(layers=(0,), **NEAR),
    "window": tiny_table(layers=(0,), **WINDOW),
    "near, 4 bits": packed(tiny_table(layers=(0,), **NEAR)),
    "delayed, 4 bits": packed(tiny_table(layers=(0,), **DELAYED)),
    "window, 4 bits": packed(tiny_table(layers=(0,), **WINDOW)),
    "mixed heads, 4 bits": packed(mixed_mixture_table(delayed=False), key_order=True),
}


@pytest.mark.parametrize("table", CAPTURED.values(), ids=CAPTURED)
def test_steps_can_be_replayed_as_cuda_graphs_are(table: LayerTable, captured_steps: EmulatedCapture) -> None:
    """No operation reads a number on the host, and what a step reads and writes stays where it is."""
    texts = prompts(*LENGTHS, 64, 32, 33, seed=FEW_TIES_REPLAYED)
    assert_equal(served_model("llama", table), texts, STEP, **few_pages(40))
    assert 0 < captured_steps.captured < captured_steps.replayed / 4


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["FULL_DECODE_ONLY", "NONE"])
@pytest.mark.parametrize(
    "table",
    [
        tiny_table(**NEAR),
        tiny_table(mixer="kda"),
        tiny_table(**WINDOW),
        packed(tiny_table(layers=(0, 2), **WINDOW)),
        packed(tiny_table(layers=(0, 2), **NEAR)),
        packed(tiny_table(layers=(0, 2), **DELAYED)),
    ],
    ids=["near", "kda", "window", "window, 4 bits", "near, 4 bits", "delayed, 4 bits"],
)
def test_heads_that_the_kernels_take_with_and_without_cuda_graphs(table: LayerTable, mode: str) -> None:
    """None has vLLM's own attention, which in float32 may not let a graph capture it."""
    model = served_model("llama", table, head_dim=64)
    settings = {"compilation_config": {"cudagraph_mode": mode}, "max_num_seqs": 6}
    assert_equal(model, prompts(*LENGTHS, 64, 32, 33), STEP, **settings)
