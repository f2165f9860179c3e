"""Every family, rule and kind of layer: loading, generation, padding, packing, beams and PEFT."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from deltanet_hf.mixers import MIXERS
from deltanet_hf.mixers.cache.state import MixerCacheLayer
from deltanet_hf.model_types import UNPACKABLE, family_type
from deltanet_hf.models.families import FAMILIES
from deltanet_hf.models.unwrapped import decoder_layers
from support.float64 import Float64, double
from support.read_in_parts import read_in_parts
from support.registry import IN_FULL
from support.tiny_models import HYBRID, ONE_NORM, mixed_mixture_table, mixture_table, tiny_mixture, tiny_student

LENGTH = 19
BESIDE: dict[str, Any] = {"mixer": "gated_deltanet+window", "window": 5, "sinks": 2, "state_dtype": "float32"}
STUDENTS: dict[str, Callable[[str], PreTrainedModel]] = {
    "faithful": lambda family: tiny_student(family, conv_size=3),
    "window": lambda family: tiny_student(family, layers=HYBRID, **BESIDE),
    "mixture": lambda family: tiny_mixture(family, mixture_table()),
    "qwen3_5": lambda family: tiny_student(family, "qwen3_5"),
    "qwen3_5-hybrid": lambda family: tiny_student(family, "qwen3_5", HYBRID),
    "levers": lambda family: tiny_student(
        family, layers=HYBRID, window=5, sinks=2, shared_kv=True, k_offset=True, allow_neg_eigval=True
    ),
    "mixed heads": lambda family: tiny_mixture(family, mixed_mixture_table()),
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {  # options of the rules, beside their defaults
    "elu": ("llama", {"mixer": "linear", "feature_map": "elu", "expand_kv": False}),
    "taylor": ("gemma3_text", {"mixer": "linear", "feature_map": "taylor", "feature_dim": 3, "expand_kv": False}),
    "normalised": ("phi3", {"mixer": "deltanet", "normalised": True}),
    "normalised, grouped": ("llama", {"mixer": "deltanet", "normalised": True, "expand_kv": False}),
    "implicit": ("phi3", {"mixer": "efla", "flow_step": "implicit", "expand_kv": False}),
    # With seed 0, the random weights enlarge the rounding of float32 tenfold; in float64 the difference is 1e-12.
    "explicit": ("gemma3_text", {"mixer": "efla", "flow_step": "explicit", "shared_kv": True, "seed": 1}),
    "up to 2": ("llama", {"mixer": "comba", "allow_neg_eigval": True, "expand_kv": False}),
    "conv on k": ("llama", {"conv_on": "k"}),
    "conv on k, shared": ("phi3", {"conv_on": "k", "shared_kv": True, "window": 5, "sinks": 1}),
    "conv on k, two writes": ("qwen3", {"mixer": "deltaproduct", "conv_on": "k"}),
    "three writes, grouped": ("llama", {"mixer": "deltaproduct", "num_householder": 3, "expand_kv": False}),
    "two writes, norms over all heads": ("olmo2", {"mixer": "deltaproduct", "conv_size": 0, "seed": 1}),
    "two writes, no norm": ("phi3", {"mixer": "deltaproduct", "v_activation": "silu", "output_norm": "none"}),
    "retention, grouped": ("gemma3_text", {"mixer": "retention", "expand_kv": False}),
    "deltanet, grouped": ("phi3", {"mixer": "deltanet", "expand_kv": False}),
    "shared states": ("llama", {"layers": HYBRID, "mixer": "mesa", "expand_kv": False, "conv_size": 0}),
    "momentum, shared states, window": (
        "llama", {"layers": HYBRID, "mixer": "titans", "expand_kv": False, "window": 5, "sinks": 2},
    ),
    "inner norm, shared states": (
        "llama", {"layers": HYBRID, "mixer": "ttt", "inner_norm": True, "mini_batch": 4, "expand_kv": False},
    ),
}  # fmt: skip
IN_EVERY_FAMILY = ("window", "mixed heads")  # students with both kinds of layers, and of heads
# Families that are plain, have sliding layers, or fused projections: those of the other students, and of "mixed heads"
# by default.
REPRESENTATIVES = {
    "faithful": ("llama", "gemma3_text"),
    "mixture": ("gemma3_text", "phi3"),
    "qwen3_5": ("llama",),
    "qwen3_5-hybrid": ("phi3",),
    "levers": ("gemma3_text",),
    "mixed heads": ("gemma3_text", "phi3"),
}


def families_of(mixer: str, turn: int) -> list[str]:
    """The families in which a mixer is tested: all for what works inside a family's attention, else llama and another.

    Families differ in what a rule is given (`AttentionShape`), which is the same for all rules; "window" above has all
    families.
    """
    others = [family for family in FAMILIES if family != "llama"]
    return list(FAMILIES) if MIXERS[mixer].keeps_all_tokens else ["llama", others[turn % len(others)]]


def cases() -> Iterator[tuple[str, Callable[[], PreTrainedModel], bool]]:
    """Name and maker of every student, and whether the tests of every mixer take it by default."""
    for what in STUDENTS:
        for family in FAMILIES if what in IN_EVERY_FAMILY else REPRESENTATIVES[what]:
            if what == "mixed heads" and family in ONE_NORM:
                continue
            quick = what == "window" or family in REPRESENTATIVES[what]
            yield f"{family}-{what}", functools.partial(STUDENTS[what], family), quick
    for turn, mixer in enumerate(mixer for mixer in MIXERS if mixer not in IN_FULL):
        for family in families_of(mixer, turn):
            make = functools.partial(tiny_student, family, layers=HYBRID, mixer=mixer)
            yield f"{family}-{mixer}", make, family == "llama"
    for what, (family, changes) in VARIANTS.items():
        yield f"{family}-{what}", functools.partial(tiny_student, family, **changes), True


CASES = list(cases())


def students(all_mixers: bool, left_out: tuple[str, ...] = ()) -> Any:
    """Runs a test over the students that are not left out; unless `all_mixers`, over mixers that are not in `IN_FULL`
    in llama alone, and by default without these and with three families of "window"."""
    brief = set()
    if not all_mixers:
        brief = {f"llama-{mixer}" for mixer in MIXERS}
        brief |= {f"{family}-window" for family in FAMILIES if family not in ("llama", "gemma3_text", "phi3")}
    parameters = [
        pytest.param(make, id=name, marks=() if quick and name not in brief else pytest.mark.slow)
        for name, make, quick in CASES
        if name.partition("-")[2] not in left_out
        and (all_mixers or name in brief or name.partition("-")[2] in STUDENTS)
    ]
    return pytest.mark.parametrize("folder", parameters, indirect=True, scope="module")


every_mixer, mixers_in_full = students(all_mixers=True), students(all_mixers=False)
by_default = students(True, tuple(VARIANTS))
# Mixers whose states have tokens from the first one on.
every_state = students(True, (*IN_EVERY_FAMILY, *(name for name in MIXERS if MIXERS[name].keeps_all_tokens)))


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("model")
    request.param().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(3, 97, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def logits(model: PreTrainedModel, tokens: torch.Tensor, **kwargs: object) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens, **kwargs).logits


def close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(ours, expected, rtol=2e-4, atol=2e-4)


@by_default
def test_greedy_generation_equals_full_forward(model: PreTrainedModel, tokens: torch.Tensor) -> None:
    generated = model.generate(
        tokens, max_new_tokens=8, do_sample=False, eos_token_id=None, return_dict_in_generate=True, output_logits=True
    )
    assert generated.sequences.shape == (2, LENGTH + 8)
    full = logits(model, generated.sequences)[:, LENGTH - 1 : -1]
    close(torch.stack(generated.logits, dim=1), full)


@every_mixer
def test_padded_batch_equals_single_rows(model: PreTrainedModel, tokens: torch.Tensor) -> None:
    """In logits and in states, which a token that is padding leaves alone, its neighbour's not."""
    single = logits(model, tokens[1:, 5:])
    left = torch.ones_like(tokens)
    left[1, :5] = 0
    right = left.flip(-1)
    shifted = torch.cat([tokens[:, 5:], tokens[:, :5]], dim=1)
    for rows, mask, real in ((tokens, left, slice(5, None)), (shifted, right, slice(LENGTH - 5))):
        for given in ({}, {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}):
            close(logits(model, rows, attention_mask=mask, **given)[1:, real], single)
    padded, alone = DynamicCache(config=model.config), DynamicCache(config=model.config)
    logits(model, tokens, attention_mask=left, past_key_values=padded, use_cache=True)
    logits(model, tokens[1:, 5:], past_key_values=alone, use_cache=True)
    pairs = [pair for pair in zip(padded.layers, alone.layers, strict=True) if type(pair[0]) is MixerCacheLayer]
    written = {"state", "key_sum"}
    before = [{name: layer.state[name].clone() for name in written & layer.state.keys()} for layer, _ in pairs]
    for layer, other in pairs:
        for name, x in other.state.items():
            close(layer.state[name][1:], x)
    step = {"attention_mask": torch.cat([left, torch.tensor([[1], [0]])], dim=1), "use_cache": True}
    logits(model, tokens[:, :1], position_ids=torch.tensor([[LENGTH], [LENGTH - 5]]), past_key_values=padded, **step)
    for (layer, _), old in zip(pairs, before, strict=True):
        for name, x in old.items():
            close(layer.state[name][1], x[1])
            assert not x.any() or not torch.equal(layer.state[name][0], x[0])


@mixers_in_full
def test_left_padded_generation_equals_single_row(model: PreTrainedModel, tokens: torch.Tensor) -> None:
    mask = torch.ones_like(tokens)
    mask[0, :7] = 0
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    batch = model.generate(tokens, attention_mask=mask, **options)
    alone = model.generate(tokens[:1, 7:], **options)
    assert batch[0, LENGTH:].tolist() == alone[0, LENGTH - 7 :].tolist()


@every_mixer
def test_packed_equals_unpacked(model: PreTrainedModel, tokens: torch.Tensor) -> None:
    row = tokens[:1]
    parts = torch.cat([logits(model, row[:, :6]), logits(model, row[:, 6:7]), logits(model, row[:, 7:])], dim=1)
    positions = torch.cat([torch.arange(6), torch.arange(1), torch.arange(LENGTH - 7)]).unsqueeze(0)
    boundaries = torch.tensor([0, 6, 7, LENGTH], dtype=torch.int32)
    if family_type(model.config) in UNPACKABLE:
        for packed in ({"position_ids": positions}, {"cu_seq_lens_q": boundaries}):
            with pytest.raises(ValueError, match="packed sequences: softmax attention of gpt_oss"):
                logits(model, row, **packed)
        return
    close(logits(model, row, position_ids=positions), parts)
    close(logits(model, row, cu_seq_lens_q=boundaries), parts)
    close(logits(model, row, cu_seq_lens_q=boundaries, position_ids=positions), parts)  # as data collators give them
    with pytest.raises(ValueError, match=r"^attention_mask: got one beside cu_seq_lens_q"):
        logits(model, row, cu_seq_lens_q=boundaries, attention_mask=torch.ones_like(row))


@every_mixer
def test_chunked_prefill_equals_one_shot(model: PreTrainedModel, tokens: torch.Tensor) -> None:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        close(read_in_parts(model, tokens, [6, 1, 1, 1, 10], cache=cache), logits(model, tokens))
    assert cache.get_seq_length() == LENGTH
    for block, entry in zip(decoder_layers(model), cache.layers, strict=True):
        if type(entry) is MixerCacheLayer:
            assert entry.nbytes == len(tokens) * block.self_attn.state_bytes(torch.float32)


@every_state
def test_gradients_reach_every_parameter(model: PreTrainedModel, tokens: torch.Tensor) -> None:
    model(tokens, labels=tokens).loss.backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None or not 0 < p.grad.abs().sum() < torch.inf]
    model.zero_grad()
    assert missing == []


@mixers_in_full
def test_beam_search_reorders_the_state(model: PreTrainedModel, tokens: torch.Tensor) -> None:
    options = {"max_new_tokens": 5, "num_beams": 3, "do_sample": False, "eos_token_id": None}
    with_cache = model.generate(tokens, use_cache=True, **options)
    without = model.generate(tokens, use_cache=False, **options)
    assert with_cache.tolist() == without.tolist()


@mixers_in_full
def test_peft_trains_saves_loads_and_merges(folder: Path, tokens: torch.Tensor, tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(folder)
    before = logits(base.eval(), tokens)
    saved = ["decay"] if any(name.endswith("decay") for name, _ in base.named_modules()) else None
    model = get_peft_model(base, LoraConfig(r=4, modules_to_save=saved, task_type="CAUSAL_LM"))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for _ in range(2):
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = logits(model.eval(), tokens)
    assert (trained - before).abs().max() > 1e-3
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path).eval()
    close(logits(loaded, tokens), trained)
    with Float64():  # after steps this large, float32 rounding says little
        apart = logits(double(loaded), tokens)
        torch.testing.assert_close(logits(loaded.merge_and_unload(), tokens), apart, rtol=1e-9, atol=1e-9)
