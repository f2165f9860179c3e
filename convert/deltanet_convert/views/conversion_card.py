"""Writes the model card of a converted model."""

import json
from pathlib import Path
from typing import Any

from deltanet_hf.mixers import MIXERS
from deltanet_hf.models.far_positions import FarPositions
from deltanet_hf.version import install_command

from .card_header import Metric, card_header, licence_note, licence_of
from .plan_view import count, index_ranges, shown_windows, size

LOAD = f"""\
Load it after `{install_command()}`. The only code in this folder, `deltanet_shim.py`, imports that package."""
# KL on held-out text in nats. In rows of 1,024 tokens SmolLM2-135M's untrained windows of 3 to 9 MB are below 0.03
# (docs/results.md); with states and seven whole layers it begins at 0.8, and its first answer is an end of text.
CLOSE, FAR = 0.05, 0.3


def model_card(report: dict[str, Any], teacher: Path, plot: str) -> str:
    """Returns README.md: the model's layers, its measurements, its cache sizes and how to load it.

    Args:
        report: contents of `conversion.json`.
        teacher: the teacher's folder, whose model card and licence files name its terms.
        plot: file name of the per-layer plot.
    """
    source, options, check, plan = report["teacher"], report["options"], report["held_out"], report["plan"]
    converted, total = plan["converted_layers"], len(plan["layers"])
    kept = [layer["index"] for layer in plan["layers"] if layer["index"] not in converted]
    changed = [layer for layer in plan["layers"] if layer["index"] in converted]
    title = _title(options, changed)
    layers = f"{len(converted)} of {total} attention layers of `{source['name']}` ({source['model_type']})"
    header = card_header(
        f"{source['name']} with {title}",
        _tags(options["mixer"], changed),
        licence=licence_of(teacher),
        base_model=source["name"] if "/" in source["name"] else None,
        measured_on=f"{check['tokens']:,} held-out tokens, at conversion",
        metrics=[
            Metric("perplexity", "perplexity", check["perplexity"]),
            Metric("perplexity", "perplexity of the teacher", check["teacher_perplexity"]),
            Metric("kl_divergence", "KL divergence from the teacher, nats per token", check["kl"]),
        ],
    )
    caches = "\n".join(
        f"| {row['context']:,} | {size(row['teacher'])} | {size(row['converted'])} |" for row in plan["cache_bytes"]
    )
    return (
        header
        + f"""

# {source["name"]} with {title}

{_what_changed(layers, options, changed, kept)}.
{count(plan["parameters"])} parameters.{_positions_note(plan["positions"])}
{_norms_note(report["inserted_norms"])}
{_state_of_training(report, changed)}

{LOAD}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("PATH")
```

## Measured at conversion

{check["tokens"]:,} held-out tokens of {report["text"]["source"]}, in sequences of
{report["text"]["sequence_length"]}:

| | teacher | converted |
|---|---|---|
| perplexity | {check["teacher_perplexity"]:.2f} | {check["perplexity"]:.2f} |
| KL to the teacher, nats per token | 0 | {check["kl"]:.3f} |

{_errors_of_layers(report["layers"], plot)}Cache of one sequence{_bits_note(plan["cache_bits"])}:

| tokens | teacher | converted |
|---|---|---|
{caches}

All figures, options and versions: `conversion.json`.

## Licence

{licence_note(source["name"], teacher)}
"""
    )


def _has_new_weights(converted: list[dict[str, Any]]) -> bool:
    """Whether the converted layers have weights that the teacher does not have, by their plans."""
    return any(layer["created"] for layer in converted)


def verdict(kl: float, remedy: str = "train it before use") -> str:
    """How near a model of this KL to its teacher is, without a full stop, and the remedy for one that is far."""
    if kl < CLOSE:
        return "Close to its teacher on text like this"
    return "Apart from its teacher" if kl < FAR else f"Far from its teacher: {remedy}"


def keeps_tokens(converted: list[dict[str, Any]]) -> bool:
    """Whether converted layers are softmax attention with something added, by their plans.

    Mixed heads keep tokens too, but in some heads only.
    """
    return all(layer["kept_kv_bytes_per_token"] >= layer["kv_bytes_per_token"] for layer in converted)


def _errors_of_layers(layers: list[dict[str, Any]], plot: str) -> str:
    if not layers:
        return ""
    relative, cosine = (_mean([layer[name] for layer in layers]) for name in ("relative_mse", "cosine"))
    return f"""\
Output of the converted layers against the teacher's attention, on the teacher's inputs: relative MSE
{relative:.3f} and cosine {cosine:.3f}, mean over layers.

![per-layer error]({plot})

"""


def _tags(mixer: str, converted: list[dict[str, Any]]) -> list[str]:
    if not converted:
        return []
    if not _has_new_weights(converted):
        return ["sliding-window-attention"]
    return [mixer.replace("_", "-")] + ["linear-attention"] * (not keeps_tokens(converted))


def _title(options: dict[str, Any], converted: list[dict[str, Any]]) -> str:
    if not converted:
        return "keys of 5, 4 and 3 bits"
    if not _has_new_weights(converted):
        return "windows"
    kinds = [options["deltanet"]["kinds"][layer["kind"]] for layer in converted if layer["created"]]
    rules = dict.fromkeys(MIXERS[kind.get("linear_mixer", kind["mixer"])].title for kind in kinds)
    windows = [window for kind in kinds if (window := kind.get("linear", kind).get("window"))]
    return f"{' and '.join(rules)} layers" + (f" and windows of {shown_windows(windows)} tokens" if windows else "")


def _what_changed(layers: str, options: dict[str, Any], converted: list[dict[str, Any]], kept: list[int]) -> str:
    """A sentence about the converted layers, which begins with `layers`; for windows, what their heads see."""
    if not converted:
        return f"{layers} are replaced;\nkey channels have 5, 4 or 3 bits by what they weigh"
    kinds = [options["deltanet"]["kinds"][layer["kind"]] for layer in converted]
    whole = sum(kind.get("heads", ()).count("softmax") for kind in kinds)
    but = f", but for {whole} key/value heads, which see all" if whole else ""
    if _has_new_weights(converted):
        stays = f"layers {index_ranges(kept)} keep softmax attention" if kept else "no layer keeps softmax attention"
        return f"{layers} are replaced by\n{_title(options, converted)}{_settings(options)}{but}; {stays}"
    lengths, sinks = shown_windows([kind["window"] for kind in kinds]), kinds[0]["sinks"]
    first = f" and the first {sinks}" if sinks else ""
    stays = f"; layers {index_ranges(kept)} see all" if kept else ""
    return f"{layers} see\nthe last {lengths} tokens{first}{but}{stays}"


def _settings(options: dict[str, Any]) -> str:
    """The profile and the settings that differ from it."""
    changes = [_setting(*item) for item in options["set"].items()]
    changes += [] if options["training"] else ["`--no-training`"]
    return f" in the `{options['profile']}` profile" + (f" ({', '.join(changes)})" if changes else "")


def _setting(key: str, value: Any) -> str:
    return f"`{key}: {json.dumps(value)}`"


def _state_of_training(report: dict[str, Any], converted: list[dict[str, Any]]) -> str:
    """Where the weights of the converted layers come from, and whether to train the model before use."""
    if (positions := report["plan"]["positions"]) is not None and positions["kind"] == "nope":
        return """\
Full-attention heads have lost the teacher's positions, so the model has to be trained before use (`deltanet-hf
distill`)."""
    if not _has_new_weights(converted):
        narrowed = """ The converted layers see only a part of the context, so
the model can be used as it is where that part is enough. Training adapts it further (`deltanet-hf distill`)."""
        return f"All weights are the teacher's; nothing was fitted or trained.{narrowed if converted else ''}"
    if keeps_tokens(converted):
        return """\
All weights of the teacher's attention are in the new layers. What they add to it starts at or close to zero: the model
begins as its teacher, and training decides what it uses (`deltanet-hf distill`). A loss that only compares it with this
teacher has nothing to teach; give it another share, such as `ce_weight`."""
    if any("fit_mse" in layer for layer in report["layers"]):
        start = """\
The new layers were fitted to the teacher's attention on calibration text, and have not been trained."""
    else:
        start = """\
The new layers have the teacher's projections; their other weights start as in a model trained from scratch."""
    if report["options"]["training"]:
        return f"{start}\n{verdict(report['held_out']['kl'])}. `deltanet-hf distill` brings it nearer."
    return f"""\
{start}
Its settings are those that are better without training; the measurements below show how far it is from its teacher.
For a model that will be distilled, convert again without `--no-training`."""


def _norms_note(layers: list[dict[str, Any]]) -> str:
    if not layers:
        return ""
    found = _mean([layer["attention_kl"] for layer in layers])
    return f"""
Their attention has an RMSNorm on q and k that the teacher does not have, so that the model can be exported as Qwen3.5.
The norms were fitted to change the attention little (KL divergence {found:.4f} nats on average); distillation trains
them.
"""


def _positions_note(positions: dict[str, Any] | None) -> str:
    if positions is None:
        return ""
    far = FarPositions.from_dict(positions)
    return f""" It reads {far.context:,} tokens, the teacher {far.teacher:,}:
full-attention heads have {far.title}, windows and states the teacher's positions, and sinks are seen from a bounded
one."""


def _bits_note(bits: int) -> str:
    if bits == 16:
        return ""
    return f""". The converted model keeps keys and values in {bits} bits, as in the measurements above
(`deltanet_hf.set_cache_bits(model, 16)` sets 16)"""


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
