"""Loads models and tokenizers with transformers; what is wrong with their files becomes one line.

transformers and the libraries under it raise errors of many types for damaged files, and go on with random weights
where tensors are missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from deltanet_hf.errors import QualityError, UserError, one_line
from deltanet_hf.mixers import FLOAT32_NAMES
from deltanet_hf.models.families import caps_scores

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def chosen_device(option: str | None) -> torch.device:
    """The device of `--device`; without it, a GPU if there is one. UserError if there is no such device."""
    if option is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(option)
        torch.empty(1, device=device).cpu()  # the device "meta" holds no values
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"--device: '{option}' cannot be used here; give cpu, cuda or cuda:1") from error
    return device


def load_config(name: str, folder: Path) -> PreTrainedConfig:
    """The config of the model in `folder`; `name` is what the user calls it. UserError if it is damaged."""
    with _one_line_errors(name, "config.json", "correct the key, or copy the file again"):
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def with_usual_outputs(config: Any) -> Any:
    """The config, without what it adds to each output of its model or takes from it: callers say so in their calls."""
    config.output_attentions, config.return_dict = False, True
    for name in [name for name in vars(config) if name.startswith("output_")]:  # mixtures of experts have router_logits
        setattr(config, name, False)
    return config


def load_model(name: str, folder: Path, dtype: torch.dtype | str, **options: Any) -> PreTrainedModel:
    """The causal language model in `folder`, in eval mode; `name` is what the user calls it.

    Args:
        dtype: of the weights; "auto" for those of the folder.
        options: further arguments of `from_pretrained`. Eager attention takes the place of SDPA in a model that caps
            scores, because SDPA has no cap.

    Raises:
        UserError: transformers cannot load it, or weights are missing.
    """
    with _one_line_errors(name, "the model", "give the folder that `deltanet-hf convert` wrote, or copy it again"):
        config, implementation = options.pop("config", None), options.get("attn_implementation", "sdpa")
        if config is None:  # which some of the options change
            config, options = AutoConfig.from_pretrained(
                folder, trust_remote_code=False, return_unused_kwargs=True, **options
            )
        config = with_usual_outputs(config)
        if caps_scores(config) and implementation == "sdpa":
            options["attn_implementation"] = "eager"
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    model, found = loaded
    if missing := sorted(found["missing_keys"]):
        raise UserError(
            f"{name}: its files lack {len(missing)} tensors of the model, such as '{missing[0]}'; copy the folder "
            "again, or convert again"
        )
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.rpartition(".")[2] in FLOAT32_NAMES:
            # These are float32 in every checkpoint. Loaded in float32, they alone would still be parts of the mapped
            # files, all of whose pages would stay in memory beside the converted copies of the other weights.
            parameter.data = parameter.data.clone()
    return model.eval()  # type: ignore[no-any-return]


def load_tokenizer(name: str, folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in `folder`, without running code of the folder; `name` is what the user calls it.

    Raises:
        UserError: there is none, or it is damaged.
    """
    remedy = "copy tokenizer.json and tokenizer_config.json of the teacher there"
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        tokenizer("a")
    except ImportError:
        raise
    except Exception as error:  # of any type, by transformers and the tokenizers library
        if not any((folder / file).is_file() for file in TOKENIZER_FILES):
            raise UserError(f"{name}: holds no tokenizer; {remedy}") from error
        raise UserError(f"{name}: its tokenizer cannot be loaded ({one_line(error, 300)}); {remedy}") from error
    return tokenizer


@contextmanager
def _one_line_errors(name: str, what: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except (UserError, QualityError, ImportError):
        raise
    except Exception as error:
        raise UserError(f"{name}: {what} cannot be loaded ({one_line(error, 300)}); {remedy}") from error
