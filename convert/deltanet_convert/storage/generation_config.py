"""A model folder's generation config."""

from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from deltanet_hf.errors import UserError, one_line
from deltanet_hf.safe_write import writing

from .scratch import IF_FULL, scratch_folder


def generation_config(folder: Path, config: Any) -> GenerationConfig:
    """The generation config of a model folder; without the file, the one that follows from the model's config.

    It is without a kind of cache, which suits the softmax model or the machine that it was chosen for.

    Raises:
        UserError: transformers cannot read the file, or would not write it again.
    """
    found = _read(folder, config)
    found.cache_implementation = found.cache_config = found.max_cache_len = None
    return found


def _read(folder: Path, config: Any) -> GenerationConfig:
    file = folder / "generation_config.json"
    if not file.exists():
        return GenerationConfig.from_model_config(config)
    with scratch_folder() as place:
        try:
            found: GenerationConfig = GenerationConfig.from_pretrained(folder)
            with writing(place, IF_FULL):
                found.save_pretrained(place)
        except UserError:
            raise
        except Exception as error:  # of any type
            raise UserError(
                f"{file}: transformers cannot use it ({one_line(error, 300)}); correct the key, or remove the file"
            ) from error
    return found
