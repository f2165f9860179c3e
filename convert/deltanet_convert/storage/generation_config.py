"""A model folder's generation config."""

from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from deltanet_hf.errors import UserError, one_line
from deltanet_hf.safe_write import writing

from .scratch import IF_FULL, scratch_folder


def generation_config(folder: Path, config: Any) -> GenerationConfig:
    """The generation config of a model folder; without the file, the one that follows from the model's config.

    Raises:
        UserError: transformers cannot read the file, or would not write it again.
    """
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
