"""On a GPU: decoding by CUDA graph gives the tokens of decoding by separate launches, and is captured in time."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from deltanet_hf.decoding import capture, decoded_by
from deltanet_hf.decoding.captured_graphs import captured_graphs_of, read_prompt
from deltanet_hf.evaluation.speed.random_models import KINDS, SHAPES, random_model
from deltanet_hf.mixers import MIXERS
from deltanet_hf.models.families import FAMILIES
from support.cache_tensors import cache_tensors
from support.tiny_models import HYBRID, mixed_mixture_table, mixture_table, tiny_mixture, tiny_student

pytestmark = pytest.mark.gpu
TOKENS = torch.randint(3, 97, (3, 9), generator=torch.Generator().manual_seed(4))


def generate(model: PreTrainedModel, side: str = "left", **options: Any) -> Any:
    mask = torch.ones_like(TOKENS)
    mask[1, slice(0, 4) if side == "left" else slice(5, 9)] = 0
    torch.manual_seed(0)
    greedy = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    returned = {"return_dict_in_generate": True, "output_logits": True}
    return model.generate(TOKENS.cuda(), attention_mask=mask.cuda(), **{**greedy, **returned, **options})


def check_same(model: PreTrainedModel, rtol: float = 2e-3, **options: Any) -> torch.Tensor:
    """Compares with separate launches, twice: with a new graph and, in pure models, with the kept one."""
    wanted = generate(model, **options, disable_compile=True)
    for _ in range(2):
        found = generate(model, **options)
        assert decoded_by(model) == "CUDA graph"
        assert found.sequences.tolist() == wanted.sequences.tolist()
        torch.testing.assert_close(torch.stack(found.logits), torch.stack(wanted.logits), rtol=rtol, atol=rtol)
        assert found.past_key_values.get_seq_length() == wanted.past_key_values.get_seq_length()
    return found.sequences


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


@pytest.mark.parametrize("share", ["all", "half"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_every_mixer(mixer: str, share: str) -> None:
    heads = {"heads": ["softmax", "linear"]} if mixer == "mixed_heads" else {}
    check_same(tiny_student("llama", mixer=mixer, layers=HYBRID if share == "half" else None, **heads).cuda())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str) -> None:
    check_same(tiny_mixture(family, mixture_table()).cuda())


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_mixed_heads_sampling_and_ends(side: str, attention: str) -> None:
    model = tiny_mixture("llama", mixed_mixture_table()).cuda()
    model.set_attn_implementation(attention)
    drawn = check_same(model, side=side, do_sample=True, temperature=2.0, top_k=40)
    stops = [int(drawn[0, 12]), int(drawn[1, 15]), int(drawn[2, 20])]
    ended = check_same(model, side=side, do_sample=True, temperature=2.0, top_k=40, eos_token_id=stops)
    assert ended.shape[1] < drawn.shape[1]


def test_beams_fall_back() -> None:
    model = tiny_student("llama", mixer="gated_deltanet+window", window=5, sinks=2).cuda()
    options = {"num_beams": 2, "output_logits": False, "return_dict_in_generate": False}
    wanted = generate(model, **options, disable_compile=True)
    assert generate(model, **options).tolist() == wanted.tolist()
    assert decoded_by(model) == "separate launches: the mode is beam_search"


def test_a_capture_takes_less_than_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    times = []
    original = capture.capture_cuda_graph

    def timed(*args: Any) -> Any:
        torch.cuda.synchronize()
        started = time.perf_counter()
        made = original(*args)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
        return made

    monkeypatch.setitem(capture.CAPTURES, "cuda", timed)
    model = tiny_student("llama", mixer="gated_deltanet+window", window=5, sinks=2).cuda().bfloat16()
    generate(model)
    assert decoded_by(model) == "CUDA graph"
    assert max(times) < 2.0


@pytest.mark.parametrize("kind", [kind for kind, layout in KINDS.items() if layout.served])
@torch.inference_mode()
def test_prompts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured ones against separate launches: logits, cache, and the tokens after it."""
    shape = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 4, "vocab_size": 97}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    monkeypatch.setitem(SHAPES, "small", shape | heads)
    model = random_model("small", kind, torch.float32, torch.device("cuda"))
    for length in (768, 700, 2, 513, 33, 64, 768):
        ids = torch.randint(0, 97, (2, length), device="cuda")
        caches = [DynamicCache(config=model.config) for _ in range(2)]
        options = {"use_cache": True, "logits_to_keep": 1}
        wanted = model(ids, past_key_values=caches[0], **options).logits
        found = read_prompt(model, {"input_ids": ids, "past_key_values": caches[1], **options})
        pairs = [(found.logits, wanted)]
        for (name, one), (_, other) in zip(*map(cache_tensors, reversed(caches)), strict=True):
            assert one.shape == other.shape, name
            if one.is_floating_point():
                pairs.append((one, other))
            else:  # counts are equal; a number between two codes may be rounded to the other
                most = one.numel() // 100 if one.dtype in (torch.uint8, torch.int8) else 0
                assert (one != other).sum() <= most, (length, name)
        for _ in range(2):
            token = ids[:, -1:]
            pairs.append(tuple(model(token, past_key_values=cache).logits for cache in reversed(caches)))
        for one, other in pairs:
            assert (one.double() - other.double()).norm() <= 5e-3 * other.double().norm(), (length, one.shape)
    prompts = captured_graphs_of(model).prompts
    assert prompts.capturable
    assert list(prompts.kept) == [(2, 64), (2, 768)]
    assert len({prompt.memory for prompt in prompts.kept.values()}) == 1
