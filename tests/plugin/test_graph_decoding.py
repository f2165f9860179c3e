"""Decoding by a captured step gives the tokens of decoding by separate launches; on a CPU, by operations run again.

`support/replayed_step.py` stands for the CUDA graph. `test_graph_decoding_gpu.py` has the same with real graphs.
"""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import DynamicCache, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from deltanet_hf import LayerTable
from deltanet_hf.decoding import captured_step, decoded_by, forget_graphs, serve
from deltanet_hf.decoding.capture import capture_cuda_graph
from deltanet_hf.evaluation.baselines import switch_off_state
from deltanet_hf.mixers import MIXERS
from deltanet_hf.mixers.attention import single_query
from deltanet_hf.mixers.cache.state import MixerCacheLayer
from deltanet_hf.models.cache_bits import set_cache_bits
from deltanet_hf.models.families import FAMILIES
from deltanet_hf.sessions import Snapshot, load_session, save_session
from deltanet_kernels.flash_decoding.attention import decode_attention_triton
from deltanet_kernels.flash_decoding.calls import DecodeAttentionCall
from support.replayed_step import EmulatedCapture
from support.tiny_conversion import tiny_tokenizer
from support.tiny_models import (
    HYBRID,
    mixed_mixture_table,
    mixed_table,
    mixture_table,
    tiny_mixture,
    tiny_qwen3_5,
    tiny_student,
    tiny_teacher,
)

pytestmark = pytest.mark.usefixtures("capture")

TOKENS = torch.randint(3, 97, (3, 9), generator=torch.Generator().manual_seed(4))
ALIKE = ("linear", "retention", "gated_linear", "gla", "deltanet", "alibi")  # their steps are those of other mixers
IN_FULL = ("llama", "mistral", "gemma3_text")  # one mask, one sliding mask, one mask per kind of layer


def padding(side: str, rows: int = 2) -> torch.Tensor:
    mask = torch.ones(rows, 9, dtype=torch.long)
    if side == "left":
        mask[1, :4] = 0
    elif side == "right":
        mask[1, 5:] = 0
    return mask


def generate(model: PreTrainedModel, tokens: int = 12, side: str = "left", rows: int = 2, **options: Any) -> Any:
    torch.manual_seed(0)
    greedy = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    returned = {"return_dict_in_generate": True, "output_logits": True}
    return model.generate(TOKENS[:rows], attention_mask=padding(side, rows), **{**greedy, **returned, **options})


def check_same(model: PreTrainedModel, **options: Any) -> Any:
    """Compares tokens and logits with those of separate launches; returns the output."""
    wanted = generate(model, **options, disable_compile=True)
    assert decoded_by(model) == "separate launches: disable_compile is set"
    found = generate(model, **options)
    assert found.sequences.tolist() == wanted.sequences.tolist()
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(wanted.logits), rtol=1e-4, atol=1e-4)
    return found


def pure() -> PreTrainedModel:
    return tiny_student("llama", mixer="gated_deltanet+window", window=5, sinks=2, state_dtype="float32")


@pytest.mark.parametrize(
    "mixer", [pytest.param(name, marks=pytest.mark.slow if name in ALIKE else ()) for name in MIXERS]
)
def test_one_graph_serves_all_positions(mixer: str, capture: EmulatedCapture, monkeypatch: pytest.MonkeyPatch) -> None:
    if mixer == "mesa":  # looks at its residuals on CPUs only
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    heads = {"heads": ["softmax", "linear"]} if mixer == "mixed_heads" else {}
    model = tiny_student("llama", mixer=mixer, layers=HYBRID, **heads)
    check_same(model)
    assert decoded_by(model) == "CUDA graph"
    assert (capture.captured, capture.replayed) == (1, 10)  # of 12 tokens, prefill and one step come before


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in IN_FULL else pytest.mark.slow) for name in FAMILIES]
)
def test_windows_go_round_in_every_family(family: str, capture: EmulatedCapture) -> None:
    model = tiny_mixture(family, mixture_table())
    check_same(model, tokens=16)
    assert decoded_by(model) == "CUDA graph"
    assert capture.captured == 1


@pytest.mark.parametrize("side", ["left", "right", "none"])
def test_paddings(side: str, capture: EmulatedCapture) -> None:
    for model in (pure(), tiny_mixture("llama", mixed_mixture_table())):
        check_same(model, side=side)
    assert capture.captured == 2


@pytest.mark.parametrize(("side", "chunk"), [("left", 1), ("right", 4)])
def test_a_chunk_of_one_padded_token_is_no_step(side: str, chunk: int, capture: EmulatedCapture) -> None:
    model = tiny_student("llama", layers=HYBRID)
    found = generate(model, side=side, prefill_chunk_size=chunk)
    wanted = generate(model, side=side, disable_compile=True)
    assert found.sequences.tolist() == wanted.sequences.tolist()
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(wanted.logits), rtol=1e-4, atol=1e-4)
    assert capture.replayed


def test_eager_attention_reads_masks_of_numbers(capture: EmulatedCapture) -> None:
    model = tiny_mixture("gemma2", mixture_table())
    model.set_attn_implementation("eager")
    check_same(model, tokens=14)
    assert capture.captured == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is no interpreter of Triton beside a GPU")
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_softmax_layers_attend_by_the_kernels(
    family: str, capture: EmulatedCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = []

    def attend(q: torch.Tensor, *rest: Any) -> torch.Tensor:
        heads.append(q.shape[1])
        return decode_attention_triton(DecodeAttentionCall(q, *rest))

    monkeypatch.setattr(single_query, "decode_attention", attend)
    model = tiny_mixture(family, mixed_mixture_table() if family == "llama" else mixture_table())
    check_same(model, tokens=8)
    assert capture.replayed == 6
    assert len(heads) >= 2  # the step before the graph, and the captured one


@pytest.mark.parametrize("name", ["hybrid", "mixed heads", "whole and windows", "sliding"])
def test_packed_keys_and_values(name: str, capture: EmulatedCapture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that grow run out of places and are captured again; rings stay.

    In float64, but states have float32: where a code falls on the other side of a half, that row differs from there on.
    """
    monkeypatch.setattr(captured_step, "SPARE", 8)
    monkeypatch.setattr(captured_step, "ALIGNMENT", 16)
    hybrid, sliding = tiny_student("llama", layers=HYBRID, window=40), tiny_mixture("gemma3_text", mixture_table())
    both = tiny_mixture("llama", mixed_table("softmax", "window").with_windows((40, 70, 33, 97)))
    models = {"hybrid": hybrid, "sliding": sliding, "whole and windows": both}
    model = set_cache_bits(models.get(name) or tiny_mixture("llama", mixed_mixture_table()), 4).double()
    for side in ("left", "none") if name == "hybrid" else ("left",):
        wanted, found = (generate(model, 40, side, disable_compile=disabled) for disabled in (True, None))
        assert found.sequences.tolist() == wanted.sequences.tolist()
        differences = (torch.stack(found.logits) - torch.stack(wanted.logits)).abs().amax(-1)  # [40, 2]
        assert differences.max() < 0.01
        assert (differences < 5e-6).float().mean() > 0.6
    assert capture.captured >= 2
    assert capture.replayed


@pytest.mark.parametrize(("bits", "state_dtype"), [(4, "int8"), (16, "float32")])
def test_groups_leave_a_window(bits: int, state_dtype: str, capture: EmulatedCapture) -> None:
    """Before the tokens 64 and 96 of each row, which padding sets apart."""
    table = LayerTable.preset(2, "gated_deltanet+window", window=33, state_dtype=state_dtype)
    model = set_cache_bits(tiny_mixture("llama", table), bits)
    check_same(model, tokens=95)
    assert decoded_by(model) == "CUDA graph"
    assert (capture.captured, capture.replayed) == (1, 93)


def test_under_the_compiler_softmax_layers_attend_by_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(single_query, "decode_attention", None)
    q, k = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 5, 8)
    mask = torch.ones(2, 1, 1, 5, dtype=torch.bool)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, k, mask, scale=0.5, enable_gqa=True)
    torch.testing.assert_close(single_query.attend(None, q, k, k, mask, 0.5)[0], wanted.transpose(1, 2))


def test_a_replaced_state_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_student("llama", mixer="comba")
    wanted = generate(model, disable_compile=True)
    monkeypatch.setattr(MixerCacheLayer, "_copy_in_place", lambda self, state: setattr(self, "state", state))
    found = generate(model)
    assert decoded_by(model) == "CUDA graph"
    assert found.sequences.tolist() != wanted.sequences.tolist()


def test_sampling_stopping_and_streaming(capture: EmulatedCapture) -> None:
    class Keeps:
        def __init__(self) -> None:
            self.tokens: list[list[int]] = []

        def put(self, value: torch.Tensor) -> None:
            self.tokens.append(value.flatten().tolist())

        def end(self) -> None:
            self.tokens.append([])

    model = pure()
    drawn = check_same(model, do_sample=True, temperature=2.0, top_k=40, side="right").sequences
    stops = [int(drawn[0, 12]), int(drawn[1, 15])]  # the rows end at different times
    ended = check_same(model, do_sample=True, temperature=2.0, top_k=40, side="right", eos_token_id=stops).sequences
    assert (ended[0, 13:] == 0).all()
    assert ended.shape[1] < drawn.shape[1]

    class After(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return torch.full((len(input_ids),), input_ids.shape[1] >= 15)

    heard: list[Keeps] = [Keeps(), Keeps()]
    for streamer, alone in zip(heard, (True, False), strict=True):
        options = {"rows": 1, "side": "none", "streamer": streamer, "disable_compile": alone}
        found = generate(model, **options, stopping_criteria=StoppingCriteriaList([After()]))
        assert found.sequences.shape[1] == 15
    assert heard[0].tokens == heard[1].tokens
    assert capture.replayed > 0
    generate(model, rows=1, side="none", tokenizer=tiny_tokenizer())  # as the command does, for stop strings
    assert decoded_by(model) == "CUDA graph"


def test_a_batch_size_is_captured_once(capture: EmulatedCapture) -> None:
    model = pure()
    plain = {"return_dict_in_generate": False, "output_logits": False}
    for call in range(2):
        for rows in (1, 2):
            options = {"rows": rows, "tokens": 5 + 3 * call + rows, "side": "none", **plain}
            wanted = generate(model, **options, disable_compile=True)
            assert generate(model, **options).tolist() == wanted.tolist()
    assert capture.captured == 2
    forget_graphs(model)
    generate(model)
    assert capture.captured == 3


def test_a_hybrid_is_captured_again_where_its_cache_is_returned(capture: EmulatedCapture) -> None:
    model = tiny_mixture("mistral", mixture_table())
    plain = {"return_dict_in_generate": False, "output_logits": False}
    for _ in range(2):
        generate(model, **plain)
    assert capture.captured == 1
    for _ in range(2):
        check_same(model)
    assert capture.captured == 2  # the first of these calls took the graph, the second made one


@pytest.mark.parametrize("family", ["llama", "olmo3"])
def test_places_that_run_out(family: str, capture: EmulatedCapture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_step, "SPARE", 4)
    monkeypatch.setattr(captured_step, "ALIGNMENT", 1)
    model = tiny_mixture(family, mixture_table())
    check_same(model, tokens=18, max_length=64)
    assert capture.captured == 4


@pytest.mark.parametrize("inference", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_conversation_goes_on_with_the_returned_cache(inference: bool, capture: EmulatedCapture) -> None:
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for model in (pure(), tiny_mixture("gemma2", mixed_mixture_table()), tiny_mixture("gemma2", mixture_table())):
        caches = [DynamicCache(config=model.config) for _ in range(2)]
        said = [TOKENS[:1], TOKENS[:1]]
        for _ in range(3):
            for index, cache in enumerate(caches):
                with torch.inference_mode(inference):
                    said[index] = model.generate(
                        said[index], past_key_values=cache, disable_compile=index == 0, **options
                    )
                assert cache.get_seq_length() == said[index].shape[1] - 1
                assert all(layer.get_seq_length() == cache.get_seq_length() for layer in cache.layers)
            assert said[0].tolist() == said[1].tolist()
            said = [torch.cat([one, TOKENS[1:2, :3]], dim=1) for one in said]
    assert decoded_by(model) == "CUDA graph"
    assert capture.replayed == 3 * 3 * 6 + 2  # pure models keep their graph, and need no step before it


def test_snapshots_sessions_and_assistance_with_captured_steps(capture: EmulatedCapture, tmp_path: Path) -> None:
    for model in (pure(), tiny_mixture("gemma2", mixed_mixture_table())):
        options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 8}
        cache = DynamicCache(config=model.config)
        first = model.generate(TOKENS[:1], past_key_values=cache, **options)
        assert decoded_by(model) == "CUDA graph"
        save_session(tmp_path / "talk", model, cache, first)
        loaded, before = load_session(tmp_path / "talk", model), Snapshot(cache)
        longer = torch.cat([first, TOKENS[1:2, :3]], dim=1)
        options["attention_mask"] = torch.ones_like(longer)
        wanted = model.generate(longer, disable_compile=True, **options).tolist()
        for held in (cache, cache, loaded.cache):
            assert model.generate(longer, past_key_values=held, **options).tolist() == wanted
            assert decoded_by(model) == "CUDA graph"
            before.rewind()
        model.generate(longer, past_key_values=cache, **options)
        with pytest.raises(ValueError, match="no history"):
            cache.crop(-1)
        assert model.generate(longer, prompt_lookup_num_tokens=3, **options).tolist() == wanted
        assert decoded_by(model) == "separate launches: the mode is assisted_generation"


def test_a_changed_model_is_captured_again(capture: EmulatedCapture) -> None:
    model = pure()
    before = check_same(model).sequences
    model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(model.model.layers[0].mlp.up_proj.weight * 0.5)
    check_same(model)
    model.model.layers[1].self_attn.window_branch.scale *= 3
    assert check_same(model).sequences.tolist() != before.tolist()
    assert capture.captured == 3
    generate(switch_off_state(model))
    assert decoded_by(model).endswith("window_branch: its method mixing_gate is replaced")


def test_what_is_not_captured(capture: EmulatedCapture) -> None:
    model = tiny_mixture("llama", mixture_table())
    model.set_attn_implementation("eager")
    bare = {"output_logits": False, "return_dict_in_generate": False}

    def reason(model: Any = model, **options: Any) -> str:
        generate(model, **{**bare, **options})
        assert capture.captured == 0
        return decoded_by(model).removeprefix("separate launches: ")

    assert reason(num_beams=2) == "the mode is beam_search"
    assert "returned" in reason(output_hidden_states=True, return_dict_in_generate=True)
    assert "returned" in reason(output_attentions=True, return_dict_in_generate=True)
    assert reason(tokens=3).startswith("fewer than")
    assert "static" in reason(cache_implementation="static")
    with torch.autocast("cpu", torch.bfloat16):
        assert reason() == "autocast is on"
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    assert reason() == "model.layers.1.mlp: it has forward hooks"
    handle.remove()
    model.train()
    assert reason() == "the model: it is in training mode"
    model.eval()
    adapted = get_peft_model(tiny_student("llama"), LoraConfig(r=2, target_modules=["up_proj"])).eval()
    inner = adapted.base_model.model
    adapted.generate(input_ids=TOKENS[:1], max_new_tokens=6, do_sample=False)
    assert decoded_by(inner).endswith("its adapter is not merged")
    adapted.merge_adapter()
    adapted.generate(input_ids=TOKENS[:1], max_new_tokens=6, do_sample=False)
    assert decoded_by(inner) == "CUDA graph"


def test_a_step_that_cannot_be_captured_goes_on_by_launches(capture: EmulatedCapture) -> None:
    model = tiny_student("llama", mixer="mesa", layers=HYBRID)  # reads its residuals on CPUs
    check_same(model)
    assert decoded_by(model).startswith("separate launches: _local_scalar_dense")
    assert capture.replayed == 0


def test_the_error_that_broke_a_capture_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of the end of the capture, which CUDA then has."""

    @contextmanager
    def broken_at_its_end(*args: Any, **options: Any) -> Iterator[None]:
        yield
        raise RuntimeError("the capture was invalidated")

    stand_ins = {"CUDAGraph": object, "Stream": str, "device": nullcontext, "graph": broken_at_its_end}
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)

    def step() -> torch.Tensor:
        raise RuntimeError("the host reads a tensor")

    with pytest.raises(RuntimeError, match="the host reads a tensor"):
        capture_cuda_graph(step, torch.device("cuda"))


def test_graphs_do_not_keep_a_model_alive(capture: EmulatedCapture) -> None:
    model = pure()
    generate(model, return_dict_in_generate=False, output_logits=False)
    assert capture.captured == 1
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_softmax_models(family: str, capture: EmulatedCapture) -> None:
    model = tiny_teacher(family)
    own, wanted = type(model), generate(model, disable_compile=True).sequences.tolist()
    assert serve(serve(model)) is model
    assert check_same(model).sequences.tolist() == wanted
    assert decoded_by(model) == "CUDA graph"
    assert capture.captured == 1
    assert str(type(model)) == str(own)
    again = pickle.loads(pickle.dumps(model))
    assert type(again) is type(model)
    assert check_same(again).sequences.tolist() == wanted


def test_a_model_in_the_format_of_qwen3_5(capture: EmulatedCapture) -> None:
    model = tiny_qwen3_5()
    check_same(model)
    assert decoded_by(model) == "CUDA graph"
