"""The sections of a recipe beside its stages: data, optimiser, adapters, engine, log."""

from __future__ import annotations

import os
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Strict(BaseModel):
    """Base class of every section: refuses unknown keys and infinite numbers; cannot be changed after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


RecallFormat = Literal["lines", "list", "json", "table", "tags", "repeat"]


class Recall(Strict):
    """Synthetic rows that train recall: facts spread in the text of the other sources, with questions at the end."""

    formats: tuple[RecallFormat, ...] = Field(
        get_args(RecallFormat),
        min_length=1,
        description="Notations of the facts, one of them per row. repeat: passages of the text, to be repeated; leave "
        "it out where repetition is to be measured.",
    )
    facts: int = Field(12, gt=0, le=100, description="Largest number of facts per 1,024 tokens of a row.")


class EvaluationArray(Strict):
    """Windows of a source's text that are kept for evaluation, as token ids. Their groups are never trained on."""

    array: str = Field(
        ..., pattern=r"\.npy$", description="File to write: .npy, [windows x window] token ids one after another."
    )
    window: int = Field(..., gt=0, description="Tokens per window. No window holds text of two groups.")
    groups: Annotated[int, Field(gt=0)] | tuple[str, ...] = Field(
        ...,
        description="Names of groups: all their whole windows are written. Or a number of documents, taken in the "
        "order of a hash of their group: the first window of each, if it is that long and shares no 13 tokens in a "
        "row with `data.decontaminate`.",
    )


class Source(Strict):
    """One data source of the mixture."""

    path: str | None = Field(
        None,
        description="Local file: .txt, .md, .jsonl, .npy with token ids (each also as .gz or .xz), or .parquet. Or a "
        "folder of such texts.",
    )
    hub: str | None = Field(None, description="Data set id on the Hub, instead of path.")
    recall: Recall | None = Field(
        None,
        description="Synthetic rows that train recall, instead of path, see below; `{}` takes the defaults. Their "
        "weight is meant to be 3 to 5% of all.",
    )
    name: str | None = Field(None, description="Configuration of the Hub data set.")
    split: str = Field("train", description="Split of the Hub data set.")
    streaming: bool = Field(
        True, description="Hub only: read documents as they arrive instead of downloading all first."
    )
    text_key: str = Field("text", description="Key or column that holds the text (jsonl, parquet, Hub).")
    messages_key: str | None = Field(
        None,
        description="Key or column that holds chat messages, instead of text_key. The chat template renders them, "
        "and stages of kind distil and long learn the replies alone.",
    )
    group_key: str | None = Field(
        None,
        description="Key or column that names what a document is part of (a title, a book, a package). Default: each "
        "document is a group of its own.",
    )
    join_groups: bool = Field(
        False,
        description="Documents of one group that follow each other are pieces of one text: join them, up to 16,384 "
        "tokens or the longest row, so that long rows hold connected text.",
    )
    evaluation: tuple[EvaluationArray, ...] = Field(
        (),
        description="Text that is kept for evaluation instead of training, see below; each array takes other groups.",
    )
    weight: float = Field(1.0, gt=0, description="Relative share of the rows that are drawn from this source.")
    max_tokens: int | None = Field(None, gt=0, description="Largest number of tokens to keep; required when streaming.")

    @model_validator(mode="after")
    def _one_origin(self) -> Source:
        if sum(origin is not None for origin in (self.path, self.hub, self.recall)) != 1:
            raise ValueError("give exactly one of path (a local file), hub (a data set id) and recall (synthetic rows)")
        if self.hub is not None and self.streaming and self.max_tokens is None:
            raise ValueError("a streamed source needs max_tokens, or it never ends")
        by_name = any(not isinstance(array.groups, int) for array in self.evaluation)
        if self.group_key is None and (self.join_groups or by_name):
            raise ValueError("join_groups and named groups need group_key")
        if self.join_groups and self.messages_key is not None:
            raise ValueError("join_groups joins texts, and messages_key names chats")
        return self


class Data(Strict):
    """The data sources and how rows are cut from them."""

    sources: tuple[Source, ...] = Field(
        (), description="The mixture. Empty: the text that is installed with the package."
    )
    shuffle: bool = Field(True, description="Permute the documents of each source, by seed and epoch.")
    separator: int | None = Field(
        None, ge=0, description="Token id that ends a document. Default: the tokenizer's end-of-text token."
    )
    isolate_documents: bool = Field(
        True, description="Documents packed into one row do not see each other: positions and states restart."
    )
    holdout_tokens: int = Field(
        32768,
        ge=0,
        description="Number of tokens at the end of the sources that are held out of training for evaluation.",
    )
    repeat: bool = Field(
        False, description="Start the sources again when they are used up, instead of refusing the run."
    )
    cache: str | None = Field(None, description="Folder for the tokenised sources. Default: OUTPUT/tokens.")
    decontaminate: tuple[str, ...] = Field(
        (),
        description="Evaluation files or folders of them. Documents that share 13 tokens in a row with any text in "
        "these files, or with an array under `sources.evaluation`, are dropped.",
    )

    @model_validator(mode="after")
    def _arrays_are_files_of_their_own(self) -> Data:
        named = [os.path.abspath(source.path) for source in self.sources if source.path is not None]
        for array in (array.array for source in self.sources for array in source.evaluation):
            if os.path.abspath(array) in named:
                raise ValueError(f"sources.evaluation: {array} is a source, or another array; choose another name")
            named.append(os.path.abspath(array))
        return self

    @model_validator(mode="after")
    def _recall_has_a_text(self) -> Data:
        if self.sources and all(source.recall is not None for source in self.sources):
            raise ValueError("recall rows take their text from the other sources: add one with path or hub")
        return self


class Optimizer(Strict):
    """Optimiser and schedule of one stage. Rates are those of AdamW."""

    name: Literal["adamw", "muon"] = Field(
        "adamw", description="adamw, or muon for the matrices of the layers and adamw for everything else."
    )
    mixer_lr: float = Field(
        1e-3, ge=0, description="Peak rate of the mixers (the new layers), all of whose weights are trained."
    )
    rest_lr: float = Field(
        1e-4, ge=0, description="Peak rate of everything else that is trained, LoRA adapters included."
    )
    projection_lr: float | None = Field(
        None,
        ge=0,
        description="Peak rate of the mixers' q, k, v and output projections, which began as the teacher's, trained in "
        "full. Default: they are trained as the rest is, by adapters (train: lora), and not in align.",
    )
    share_lr: float | None = Field(
        None,
        ge=0,
        description="Peak rate of the weights that divide a layer's output between its window and its state; they are "
        "always updated by AdamW. Default: mixer_lr.",
    )
    schedule: Literal["cosine", "linear", "constant"] = Field(
        "cosine", description="Decay of the rates after the warm-up."
    )
    final_ratio: float = Field(0.1, ge=0, le=1, description="Rate at the end, divided by the peak rate.")
    warmup: float = Field(0.02, ge=0, lt=1, description="Share of the steps during which the rates rise linearly.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay of matrices.")
    clip: float = Field(
        1.0, gt=0, allow_inf_nan=True, description="Largest gradient norm; larger gradients are scaled down to it."
    )


class Engine(Strict):
    """Device, precision and memory settings. They change the results only by rounding."""

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: the GPU if there is one.")
    precision: Literal["auto", "bf16", "fp32"] = Field(
        "auto",
        description="Precision of the arithmetic; trained weights are always fp32. auto: bf16 on a GPU, fp32 on a CPU.",
    )
    compile: bool | None = Field(None, description="Use torch.compile for the decoder layers. Default: on GPUs.")
    cuda_graphs: bool | None = Field(
        None, description="Replay each micro-batch as one CUDA graph. Default: on GPUs with compile and sharding none."
    )
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass, which saves memory and costs time."
    )
    sharding: Literal["none", "fsdp2"] = Field(
        "none",
        description="With several processes: none replicates the model, fsdp2 shards weights and optimiser state.",
    )


class Log(Strict):
    """How often a run logs, evaluates and saves."""

    every: int = Field(10, gt=0, description="Steps between log lines.")
    evaluate_every: int = Field(200, gt=0, description="Steps between evaluations on the held-out rows.")
    checkpoint_every: int = Field(200, gt=0, description="Steps between checkpoints.")
    keep: int = Field(2, gt=0, description="Number of checkpoints that are kept.")
    stop_when_worse: bool = Field(
        True,
        description="Stop when an evaluation finds the held-out loss more than a tenth above the first of the stage.",
    )
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = Field(
        (), description="Services that the log is sent to as well: tensorboard, wandb."
    )
