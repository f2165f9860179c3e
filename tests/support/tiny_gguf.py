"""A tiny Llama as a GGUF file."""

from __future__ import annotations

from pathlib import Path

import gguf
import torch
from transformers.convert_slow_tokenizer import bytes_to_unicode

HIDDEN, INNER, HEADS, KV, LAYERS, HEAD = 32, 48, 4, 2, 2, 8
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *bytes_to_unicode().values(), "12", "123"]


def begun(
    path: Path, architecture: str, layers: int, hidden: int, inner: int, heads: tuple[int, int], context: int
) -> gguf.GGUFWriter:
    """A file with a model's sizes and a byte-level tokenizer that merges 1, 2 and 3."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(layers)
    writer.add_context_length(context)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads[0])
    writer.add_head_count_kv(heads[1])
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["1 2", "12 3"])  # transformers 5.17 takes a list of one merge for text
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    return writer


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorders the rows of q and k as GGUF stores them: the two rows of a rotary pair are adjacent."""
    return weight.view(heads, 2, HEAD // 2, HIDDEN).transpose(1, 2).reshape(weight.shape)


def write_gguf(path: Path, *, add_bos: bool = False) -> dict[str, torch.Tensor]:
    """Writes a tiny Llama with a byte-level tokenizer that merges 1, 2 and 3; returns some weights by HF name.

    Args:
        add_bos: texts begin with the token 1.
    """
    torch.manual_seed(0)
    writer = begun(path, "llama", LAYERS, HIDDEN, INNER, (HEADS, KV), context=128)
    writer.add_rope_dimension_count(HEAD)
    writer.add_tokenizer_pre("smollm")
    writer.add_add_bos_token(add_bos)
    kept: dict[str, torch.Tensor] = {}

    def add(name: str, *shape: int, heads: int = 0, hf_name: str = "") -> None:
        value = torch.randn(*shape) * 0.2 if len(shape) > 1 else torch.ones(*shape)
        kept[hf_name or name] = value
        writer.add_tensor(name, (permuted(value, heads) if heads else value).contiguous().numpy())

    add("token_embd.weight", len(TOKENS), HIDDEN)
    add("output_norm.weight", HIDDEN)
    add("output.weight", len(TOKENS), HIDDEN)
    for i in range(LAYERS):
        layer = f"model.layers.{i}.self_attn."
        add(f"blk.{i}.attn_norm.weight", HIDDEN)
        add(f"blk.{i}.ffn_norm.weight", HIDDEN)
        add(f"blk.{i}.attn_q.weight", HEADS * HEAD, HIDDEN, heads=HEADS, hf_name=layer + "q_proj.weight")
        add(f"blk.{i}.attn_k.weight", KV * HEAD, HIDDEN, heads=KV, hf_name=layer + "k_proj.weight")
        add(f"blk.{i}.attn_v.weight", KV * HEAD, HIDDEN)
        add(f"blk.{i}.attn_output.weight", HIDDEN, HEADS * HEAD)
        add(f"blk.{i}.ffn_gate.weight", INNER, HIDDEN)
        add(f"blk.{i}.ffn_up.weight", INNER, HIDDEN)
        add(f"blk.{i}.ffn_down.weight", HIDDEN, INNER)
    finish(writer)
    return kept
