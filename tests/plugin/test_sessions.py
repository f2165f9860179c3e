"""Snapshots of caches and sessions in files: going on from them equals never having stopped, to the last bit."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DynamicCache, GPT2Config, GPT2LMHeadModel, PreTrainedModel, StaticCache
from transformers.cache_utils import Cache

from deltanet_hf.errors import UserError
from deltanet_hf.mixers.cache.cache_bytes import cache_bytes
from deltanet_hf.models.cache_bits import add_key_order, set_cache_bits
from deltanet_hf.models.restrict import restrict_to_window
from deltanet_hf.sessions import Snapshot, load_session, save_session
from deltanet_hf.sessions.model_identity import model_identity
from support.refusals import assert_refused
from support.registry import IN_FULL, made, rows
from support.tiny_models import HYBRID, mixed_mixture_table, mixed_table, tiny_mixture, tiny_student, tiny_teacher

IDS = torch.randint(3, 97, (2, 14), generator=torch.Generator().manual_seed(4))
SIDES = {"left": slice(0, 4), "right": slice(5, 10)}  # padding of the first row in a prompt of 10 tokens


def masked(side: str) -> torch.Tensor:
    mask = torch.ones_like(IDS)
    mask[0, SIDES[side]] = 0
    return mask


@torch.no_grad()
def read(model: PreTrainedModel, cache: Cache, mask: torch.Tensor, *parts: slice) -> torch.Tensor:
    """Logits of the calls that read these parts of IDS."""
    positions, logits = (mask.cumsum(-1) - 1).clamp(min=0), []
    for part in parts:
        seen, at = mask[:, : part.stop], positions[:, part]
        output = model(IDS[:, part], attention_mask=seen, position_ids=at, past_key_values=cache, use_cache=True)
        logits.append(output.logits)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("name", [*rows(), "sliding", "teacher", "gated_deltanet+window"])
def test_a_rewound_and_a_loaded_cache_go_on_bit_by_bit(name: str, tmp_path: Path) -> None:
    model = tiny_teacher("mistral") if name == "teacher" else made(name)
    rest = (slice(10, 11), slice(11, 14)) if name in IN_FULL else (slice(10, 12),)
    for side in SIDES if name in IN_FULL else ("left",):
        mask, cache = masked(side), DynamicCache(config=model.config)
        read(model, cache, mask, slice(0, 10))
        save_session(tmp_path / "s", model, cache, IDS[:, :11], mask[:, :11])
        snapshot = Snapshot(cache)
        wanted = read(model, cache, mask, *rest)
        session = load_session(tmp_path / "s", model)
        assert session.input_ids.equal(IDS[:, :11])
        assert session.attention_mask.equal(mask[:, :11])
        assert session.cache.get_seq_length() == 10
        assert read(model, session.cache, mask, *rest).equal(wanted)
        for _ in range(2 if name in IN_FULL else 1):
            snapshot.rewind()
            assert cache.get_seq_length() == 10
            assert read(model, cache, mask, *rest).equal(wanted)


# Snapshots.


def test_a_snapshot_of_an_empty_cache_and_beams_in_between() -> None:
    model, mask = made("mixed_heads"), torch.ones_like(IDS)
    cache = DynamicCache(config=model.config)
    empty = Snapshot(cache)
    wanted = read(model, cache, mask, slice(0, 10))
    full = Snapshot(cache)
    cache.batch_repeat_interleave(3)
    cache.reorder_cache(torch.tensor([5, 0, 1, 2]))
    cache.crop(0)
    full.rewind()
    assert cache.layers[0].parts["linear"].batch_size == 2
    after = read(model, cache, mask, slice(10, 14))
    full.rewind()
    assert read(model, cache, mask, slice(10, 14)).equal(after)
    empty.rewind()
    assert cache.get_seq_length() == 0
    assert read(model, cache, mask, slice(0, 10)).equal(wanted)


@pytest.mark.parametrize("name", ["mixed_heads", "sliding"])
def test_a_static_cache_is_rewound_in_its_place(name: str) -> None:
    model, mask = made(name), torch.ones_like(IDS)
    cache = StaticCache(config=model.config, max_cache_len=32)
    read(model, cache, mask, slice(0, 10))
    snapshot = Snapshot(cache)

    def addresses() -> list[int]:
        return [tensor.data_ptr() for layer in cache.layers for tensor in held(layer)]

    def held(layer: Any) -> list[torch.Tensor]:
        parts = getattr(layer, "parts", {}).values()
        if parts:
            return [tensor for part in parts for tensor in held(part)]
        return list(layer.state.values()) if hasattr(layer, "state") else [layer.keys, layer.values]

    before = addresses()
    wanted = read(model, cache, mask, slice(10, 11), slice(11, 12))
    snapshot.rewind()
    assert int(cache.get_seq_length()) == 10
    assert read(model, cache, mask, slice(10, 11), slice(11, 12)).equal(wanted)
    assert addresses() == before


def test_a_snapshot_copies_states_only() -> None:
    model = made("gated_deltanet")
    cache = DynamicCache(config=model.config)
    read(model, cache, torch.ones_like(IDS), slice(0, 10))
    snapshot, keys, state = Snapshot(cache), cache.layers[1].keys, cache.layers[0].state["state"]
    snapshot.rewind()
    assert cache.layers[1].keys is keys
    assert cache.layers[0].state["state"].data_ptr() != state.data_ptr()


# Files.


@pytest.mark.parametrize(("bits", "length"), [(8, 32), (8, 97), (4, 5), (4, 95), (4, 96)])
@torch.no_grad()
def test_packed_caches(bits: int, length: int, tmp_path: Path) -> None:
    model = set_cache_bits(tiny_mixture("llama", mixed_mixture_table()), bits)
    ids = torch.randint(3, 97, (2, length), generator=torch.Generator().manual_seed(0))
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache, use_cache=True)
    save_session(tmp_path / "s", model, cache, ids, torch.ones_like(ids))
    snapshot, session = Snapshot(cache), load_session(tmp_path / "s", model)
    assert cache_bytes(session.cache) == cache_bytes(cache)
    wanted = model(IDS, past_key_values=cache, use_cache=True).logits
    assert model(IDS, past_key_values=session.cache, use_cache=True).logits.equal(wanted)
    snapshot.rewind()
    assert model(IDS, past_key_values=cache, use_cache=True).logits.equal(wanted)
    with pytest.raises(UserError, match=f"keys and values in {bits} bits, the model has 16; use --cache-bits {bits}"):
        load_session(tmp_path / "s", set_cache_bits(model, 16))


@torch.no_grad()
@pytest.mark.parametrize("length", [5, 103])
def test_packed_numbers_in_the_order_of_earlier_files(length: int, tmp_path: Path) -> None:
    """Scales of values came token by token; the codes have another order too, which their shapes need not show."""
    model = set_cache_bits(tiny_mixture("llama", mixed_mixture_table()), 4)
    ids = torch.randint(3, 97, (2, length), generator=torch.Generator().manual_seed(0))
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache, use_cache=True)
    state = cache.layers[2].state
    state["value_scales"] = state["value_scales"].mT.contiguous()
    save_session(tmp_path / "s", model, cache, ids, torch.ones_like(ids))
    with pytest.raises(UserError, match=r"layers\.2\.value_scales is"):
        load_session(tmp_path / "s", model)


@torch.no_grad()
def test_a_packed_window_of_one_token(tmp_path: Path) -> None:
    """It keeps no groups, and a session of many tokens has none either."""
    model = set_cache_bits(tiny_student("llama", mixer="window", window=1, sinks=2), 4)
    ids = torch.randint(3, 97, (1, 40), generator=torch.Generator().manual_seed(0))
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache, use_cache=True)
    save_session(tmp_path / "s", model, cache, ids)
    wanted = model(IDS[:1], past_key_values=cache, use_cache=True).logits
    loaded = load_session(tmp_path / "s", model).cache
    assert model(IDS[:1], past_key_values=loaded, use_cache=True).logits.equal(wanted)


@torch.no_grad()
@pytest.mark.parametrize("name", ["teacher", "mixed_heads"])
def test_a_cache_made_without_a_config_comes_back(name: str, tmp_path: Path) -> None:
    """Its layers hold all tokens, also behind the sliding window of the model."""
    model = tiny_mixture("mistral", mixed_mixture_table()) if name == "mixed_heads" else tiny_teacher("mistral")
    cache = DynamicCache()
    model(IDS[:, :12], past_key_values=cache, use_cache=True)
    save_session(tmp_path / "s", model, cache, IDS[:, :12], torch.ones_like(IDS[:, :12]))
    session = load_session(tmp_path / "s", model)
    found = model(IDS[:, 12:], past_key_values=session.cache, use_cache=True).logits
    wanted = model(IDS[:, 12:], past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(found, wanted)


@torch.no_grad()
def test_a_softmax_model_of_another_family(tmp_path: Path) -> None:
    """Its sessions come back; its cache is not quantised."""
    shape = {"vocab_size": 97, "n_embd": 16, "n_head": 2, "n_layer": 2}
    model = GPT2LMHeadModel(GPT2Config(**shape)).eval()  # type: ignore[arg-type]
    cache = DynamicCache(config=model.config)
    model(IDS[:1, :9], past_key_values=cache)
    save_session(tmp_path / "session", model, cache, IDS[:1, :9])
    loaded = load_session(tmp_path / "session", model)
    rest = IDS[:1, 9:12]
    assert torch.equal(model(rest, past_key_values=loaded.cache).logits, model(rest, past_key_values=cache).logits)
    with pytest.raises(UserError, match=r"^cache bits: GPT2LMHeadModel has no `model.layers`"):
        set_cache_bits(model, 4)


def test_a_pure_session_has_the_same_size_but_for_its_tokens(tmp_path: Path) -> None:
    model, sizes = tiny_student("llama"), []
    for repeats in (1, 20):
        cache, ids = DynamicCache(config=model.config), IDS.repeat(1, repeats)
        with torch.no_grad():
            model(ids, past_key_values=cache, use_cache=True)
        save_session(tmp_path / "s", model, cache, ids, torch.ones_like(ids))
        sizes.append((tmp_path / "s").stat().st_size)
    assert 0 <= sizes[1] - sizes[0] - 5 * IDS.numel() * 19 < 64
    assert not list(tmp_path.glob("*.tmp"))


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """Windows with counts, and mini-batches with one."""
    table = mixed_table("window", "linear", linear_mixer="ttt", linear=ttt_settings())
    return tiny_mixture("llama", table)


def ttt_settings() -> dict[str, Any]:
    settings: dict[str, Any] = tiny_student("llama", mixer="ttt").config.deltanet["kinds"]["linear"]
    return {key: value for key, value in settings.items() if key != "mixer"} | {"mini_batch": 4}


@pytest.fixture(scope="module")
def saved(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("session") / "session"
    cache = DynamicCache(config=model.config)
    read(model, cache, torch.ones_like(IDS), slice(0, 10))
    save_session(path, model, cache, IDS[:, :11], torch.ones_like(IDS[:, :11]))
    return path


def test_a_file_cut_anywhere_is_refused(saved: Path, model: PreTrainedModel, tmp_path: Path) -> None:
    data = saved.read_bytes()
    for end in (0, 5, 8, 100, len(data) // 2, len(data) - 1):
        (tmp_path / "s").write_bytes(data[:end])
        with pytest.raises(UserError, match=r"cannot be read as a session \(.*start a new session in another file"):
            load_session(tmp_path / "s", model)


def test_what_is_no_session_is_refused(model: PreTrainedModel, tmp_path: Path) -> None:
    (tmp_path / "pickle").write_bytes(pickle.dumps({"layers": []}))
    save_file({"x": torch.zeros(2)}, tmp_path / "tensors")
    (tmp_path / "folder").mkdir()
    for name, said in (
        ("pickle", "cannot be read"),
        ("tensors", "format None, expected"),
        ("folder", "cannot be read"),
    ):
        with pytest.raises(UserError, match=said):
            load_session(tmp_path / name, model)
    with pytest.raises(UserError, match="cannot be read"):
        load_session(tmp_path / "absent", model)


Change = Callable[[dict[str, torch.Tensor], dict[str, Any]], object]
COUNTS = "layers.1.linear.batch_tokens"
CHANGES: dict[str, tuple[Change, str]] = {
    "no metadata": (lambda t, m: m.clear(), "format None"),
    "version": (lambda t, m: m.update(format="deltanet-hf session 9"), "format 'deltanet-hf session 9', expected"),
    "json": (lambda t, m: m.update(cache="{"), "metadata is damaged"),
    "list": (lambda t, m: m.update(model="[]"), "metadata is damaged"),
    "deep": (lambda t, m: m.update(cache="[" * 100_000), "metadata is damaged"),
    "tokens": (lambda t, m: m.update(cache='{"tokens": -3, "cache_bits": 16}'), "metadata is damaged"),
    "more tokens": (lambda t, m: m.update(cache='{"tokens": 99, "cache_bits": 16}'), "do not fit 99 tokens"),
    "fewer tokens": (lambda t, m: m.update(cache='{"tokens": 2, "cache_bits": 16}'), "counts that are not from 0 to 2"),
    "bits": (lambda t, m: m.update(cache='{"tokens": 10, "cache_bits": 5}'), "metadata is damaged"),
    "no ids": (lambda t, m: t.pop("input_ids"), "has no input_ids"),
    "ids": (lambda t, m: t["input_ids"].fill_(97), "of a vocabulary of 97"),
    "negative ids": (lambda t, m: t["input_ids"].fill_(-1), "of a vocabulary of 97"),
    "mask": (lambda t, m: t["attention_mask"].fill_(2), "do not fit"),
    "batch": (lambda t, m: t.update(input_ids=t["input_ids"][:1].clone()), "do not fit"),
    "missing": (lambda t, m: t.pop("layers.2.window.keys"), "the tensor layers.2.window.keys is missing"),
    "unknown": (lambda t, m: t.update(extra=torch.zeros(1)), "the tensor extra is unknown"),
    "shape": (
        lambda t, m: t.update({COUNTS: torch.zeros(3, dtype=torch.int32)}),
        r"batch_tokens is \[3\].*expected \[2\]",
    ),
    "dtype": (lambda t, m: t.update({COUNTS: torch.zeros(2)}), "torch.float32, expected .* torch.int32"),
    "count": (lambda t, m: t[COUNTS].fill_(4), f"{COUNTS} has counts that are not from 0 to 3"),
    "negative count": (lambda t, m: t["layers.0.window.count"].fill_(-1), "window.count has counts"),
    "large count": (lambda t, m: t["layers.0.window.numbers"].fill_(11), "counts that are not from 0 to 10"),
}


def test_a_changed_file_is_refused(saved: Path, model: PreTrainedModel, tmp_path: Path) -> None:
    def load(change: Change) -> None:
        with safe_open(saved, framework="pt") as file:
            metadata: dict[str, Any] = dict(file.metadata())
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        change(tensors, metadata)
        save_file(tensors, tmp_path / "s", metadata)
        load_session(tmp_path / "s", model)

    assert_refused(load, [({"change": change}, UserError, said) for change, said in CHANGES.values()])


def test_a_flipped_bit_is_found_wherever_it_is(saved: Path, model: PreTrainedModel, tmp_path: Path) -> None:
    data = saved.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")  # of the tensors
    places = [*range(0, begin, 41), *range(begin, len(data), 499), len(data) - 1]
    for place in places:
        changed = bytearray(data)
        changed[place] ^= 1 << place % 8
        (tmp_path / "s").write_bytes(changed)
        with pytest.raises(UserError) as refused:
            load_session(tmp_path / "s", model)
        assert "\n" not in str(refused.value)


def test_the_checksum_is_of_facts_names_and_bytes(saved: Path) -> None:
    """As sessions have it that were saved before: another sum makes them unreadable."""
    with safe_open(saved, framework="pt") as file:
        metadata, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    held = b"".join(
        name.encode() + tensors[name].flatten().view(torch.uint8).numpy().tobytes() for name in sorted(tensors)
    )
    assert metadata["checksum"] == hashlib.sha256(metadata["cache"].encode() + held).hexdigest()


def test_another_model_is_refused(saved: Path, model: PreTrainedModel) -> None:
    weight = model.model.layers[3].mlp.down_proj.weight
    with torch.no_grad():
        before = weight[7, 5].clone()
        weight[7, 5] += 1e-4
        try:
            with pytest.raises(UserError, match="belongs to another model, the weights differ"):
                load_session(saved, model)
        finally:
            weight[7, 5] = before
    with pytest.raises(UserError, match=r"the configurations differ; give the model that saved it"):
        load_session(saved, tiny_teacher("llama"))
    load_session(saved, model)
    with pytest.raises(UserError, match="was saved with 'float32' weights, the model has float64; load it with them"):
        load_session(saved, copy.deepcopy(model).double())
    other = model_identity(tiny_student("llama").bfloat16())
    assert other["dtype"] == "bfloat16"
    assert other["weights"] != model_identity(tiny_student("llama"))["weights"]


def test_models_with_other_key_orders_are_others() -> None:
    model = tiny_student("llama", mixer="window", window=9)
    plain = model_identity(model)
    add_key_order(model)
    own = model_identity(model)
    order = model.model.layers[1].self_attn.key_order
    order[0, :, 6:8] = order[0, :, 6:8].flip(1)
    assert len({identity["weights"] for identity in (plain, own, model_identity(model))}) == 3


def test_a_session_goes_on_with_its_own_tokens_only(model: PreTrainedModel, tmp_path: Path) -> None:
    cache = DynamicCache(config=model.config)
    read(model, cache, torch.ones_like(IDS), slice(0, 10))
    save_session(tmp_path / "s", model, cache, IDS, torch.ones_like(IDS))
    with pytest.raises(ValueError, match="the first 10 tokens of the prompt are not those"):
        model.generate(IDS.flip(1), past_key_values=load_session(tmp_path / "s", model).cache, max_new_tokens=2)
    more = model.generate(IDS, past_key_values=load_session(tmp_path / "s", model).cache, max_new_tokens=2)
    assert torch.equal(more, model.generate(IDS, max_new_tokens=2))


def test_a_compiled_model_is_the_same_model(model: PreTrainedModel, tmp_path: Path) -> None:
    cache = DynamicCache(config=model.config)
    read(model, cache, torch.ones_like(IDS), slice(0, 10))
    save_session(tmp_path / "s", torch.compile(model), cache, IDS, torch.ones_like(IDS))
    assert load_session(tmp_path / "s", model).input_ids.tolist() == IDS.tolist()


def test_a_session_belongs_to_the_adapters_at_work(tmp_path: Path) -> None:
    base, config = tiny_student("llama", layers=HYBRID), LoraConfig(r=2, init_lora_weights=False)
    model = get_peft_model(base, config)
    model.add_adapter("other", config)
    mask, path = torch.ones_like(IDS), tmp_path / "s"
    cache = DynamicCache(config=model.config)
    read(model, cache, mask, slice(0, 10))
    save_session(path, model, cache, IDS[:, :11], mask[:, :11])
    wanted = read(model, cache, mask, slice(10, 14))
    for same in (model, base):
        assert read(same, load_session(path, same).cache, mask, slice(10, 14)).equal(wanted)
    refused = {"path": path, "model": model}, UserError, "belongs to another model, the weights differ"
    model.set_adapter("other")
    assert_refused(load_session, [refused])
    model.set_adapter("default")
    with model.disable_adapter():
        assert_refused(load_session, [refused])
    factors = base.model.layers[1].self_attn.q_proj.scaling
    factors["default"] *= 2
    assert_refused(load_session, [refused])
    factors["default"] /= 2
    load_session(path, model)


def test_the_identity_survives_saving_and_loading(model: PreTrainedModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    assert model_identity(AutoModelForCausalLM.from_pretrained(tmp_path)) == model_identity(model)


def test_what_cannot_be_saved_is_refused(model: PreTrainedModel, tmp_path: Path) -> None:
    cache = DynamicCache(config=model.config)
    with pytest.raises(UserError, match="a cache of 0 tokens"):
        save_session(tmp_path / "s", model, cache, IDS, masked("left"))
    read(model, cache, masked("left"), slice(0, 10))
    with pytest.raises(UserError, match=r"^session: 2 sequences without an attention_mask.*of ones if there is none$"):
        save_session(tmp_path / "s", model, cache, IDS)
    for ids, mask in ((IDS[:, :9], masked("left")[:, :9]), (IDS, IDS[:, :3])):
        with pytest.raises(UserError, match="give all tokens that the cache has read"):
            save_session(tmp_path / "s", model, cache, ids, mask)
    with pytest.raises(UserError, match="session: cache: holds 2 sequences and the inputs have 1"):
        save_session(tmp_path / "s", model, cache, IDS[:1])
    result: Any = model.generate(IDS[:1], max_new_tokens=3, return_dict_in_generate=True)
    with pytest.raises(UserError, match="tokens of the prompt are not those that this cache was returned with"):
        save_session(tmp_path / "s", model, result.past_key_values, result.sequences.flip(1))
    static = StaticCache(config=model.config, max_cache_len=32)
    read(model, static, torch.ones_like(IDS), slice(0, 10))
    with pytest.raises(UserError, match="layer 0 of the cache is a StaticMixerCacheLayer, which cannot be saved"):
        save_session(tmp_path / "s", model, static, IDS, masked("left"))
    assert not list(tmp_path.iterdir())


def test_a_cache_of_other_bits_is_refused_and_so_are_other_windows(tmp_path: Path) -> None:
    """Packed windows of 20 and of 24 tokens have the same shapes."""
    first, second = (
        restrict_to_window(set_cache_bits(tiny_teacher("llama", head_dim=32), 4), window, 4) for window in (20, 24)
    )
    cache = DynamicCache(config=first.config)
    with torch.no_grad():
        first(IDS[:1], past_key_values=cache)
    save_session(tmp_path / "s", first, cache, IDS[:1])
    with pytest.raises(UserError, match="belongs to another model"):
        load_session(tmp_path / "s", second)
    assert load_session(tmp_path / "s", first).input_ids.tolist() == IDS[:1].tolist()
    with pytest.raises(UserError, match="session: cache: was filled with keys and values in 4 bits"):
        save_session(tmp_path / "s", set_cache_bits(first, 8), cache, IDS[:1])


@pytest.mark.slow
def test_a_session_goes_on_in_another_process(tmp_path: Path) -> None:
    for name in ("mixed_heads", "gated_deltanet+window", "ttt", "path"):
        model = made(name)
        model.save_pretrained(tmp_path / "model")
        options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
        first = model.generate(IDS[:1], max_new_tokens=5, **options)
        save_session(tmp_path / "s", model, first.past_key_values, first.sequences)
        script = (
            "import json, sys, deltanet_hf\n"
            "from transformers import AutoModelForCausalLM\n"
            "from deltanet_hf.sessions import load_session\n"
            "model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()\n"
            "session = load_session(sys.argv[2], model)\n"
            "print(json.dumps(model.generate(session.input_ids, attention_mask=session.attention_mask,\n"
            "    past_key_values=session.cache, max_new_tokens=6, do_sample=False, eos_token_id=None).tolist()))\n"
        )
        paths = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        command = [sys.executable, "-c", script, str(tmp_path / "model"), str(tmp_path / "s")]
        run = subprocess.run(command, capture_output=True, text=True, check=True, env=paths)
        whole = model.generate(IDS[:1], max_new_tokens=11, **options).sequences
        assert json.loads(run.stdout.splitlines()[-1]) == whole.tolist()


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("name", [*rows(), "sliding", "gated_deltanet+window"])
def test_on_a_gpu_sessions_go_on_bit_by_bit_and_move_to_a_cpu(name: str, tmp_path: Path) -> None:
    model, ids = made(name).cuda(), IDS.cuda()
    cache = DynamicCache(config=model.config)
    model(ids[:, :10], past_key_values=cache, use_cache=True)
    save_session(tmp_path / "s", model, cache, IDS[:, :10], torch.ones_like(IDS[:, :10]))
    snapshot, session = Snapshot(cache), load_session(tmp_path / "s", model)

    def go_on(held: Cache) -> torch.Tensor:
        return torch.cat([model(part, past_key_values=held, use_cache=True).logits for part in ids[:, 10:].split(1, 1)])

    wanted = go_on(cache)
    assert go_on(session.cache).equal(wanted)
    snapshot.rewind()
    assert go_on(cache).equal(wanted)
    model.cpu()
    assert load_session(tmp_path / "s", model).cache.get_seq_length() == 10
