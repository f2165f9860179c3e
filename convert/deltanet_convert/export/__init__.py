"""Native models as Qwen3.5 text models, for the runtimes that know that architecture; and back.

Why it is exact. The target's linear layer is the native profile's, its kept layer is Qwen3's with a gate of
sigmoid(0) = 1/2 and a doubled output projection, and its norms hold w - 1: where that would lose bits, a power of two
moves from the norm's weight into the matrices that read it (`norms.py`). `rewrite.py` has every tensor both ways.

Idle layers of zeros stand where a runtime needs an attention layer or even distances between them (`slots.py`).

Importing (`import_native.py`) undoes an export bit for bit, by the record `export.json`. Any other Qwen3.5 text
checkpoint, alone or beside a vision tower, keeps its gated attention: its class is Qwen3_5ForCausalLM with this
project's layer in `linear_attn` (`deltanet_hf/qwen3_5.py`), so the import only renames tensors.
"""
