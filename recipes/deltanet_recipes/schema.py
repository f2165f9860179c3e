"""The keys of a recipe with their meanings, units and defaults. Unknown keys are errors."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from deltanet_recipes.schema_sections import Data, Engine, Log, Optimizer, Strict

LONGEST_NAME = 100  # bytes of a stage's name; files add to it


class StageBase(Strict):
    """The keys that all stages share."""

    name: str | None = Field(None, description="Name in logs and folders. Default: the kind.")
    tokens: int = Field(
        ..., gt=0, description="Training tokens of the stage, rounded down to a multiple of batch_tokens."
    )
    sequence_length: int = Field(512, gt=1, description="Tokens per row.")
    batch_tokens: int = Field(8192, gt=0, description="Tokens per optimiser step, over all processes.")
    micro_batch_rows: int | None = Field(
        None, gt=0, description="Rows that one process works on at once. Default: all its rows of a step."
    )
    optimizer: Optimizer = Field(default_factory=Optimizer)

    @field_validator("name")
    @classmethod
    def _part_of_file_names(cls, name: str | None) -> str | None:
        if name and ("/" in name or not name.isprintable() or len(name.encode()) > LONGEST_NAME):
            raise ValueError(f"is part of file names: leave out '/' and line breaks, {LONGEST_NAME} bytes at most")
        return name

    @model_validator(mode="after")
    def _rows_fit_the_step(self) -> StageBase:
        if self.batch_tokens % self.sequence_length:
            raise ValueError(
                f"batch_tokens ({self.batch_tokens}) must be a multiple of sequence_length ({self.sequence_length})"
            )
        if self.tokens < self.batch_tokens:
            raise ValueError(f"tokens ({self.tokens}) is less than one step of batch_tokens ({self.batch_tokens})")
        if self.micro_batch_rows and self.rows_per_step % self.micro_batch_rows:
            raise ValueError(f"micro_batch_rows must divide the {self.rows_per_step} rows of a step")
        return self

    @property
    def rows_per_step(self) -> int:
        return self.batch_tokens // self.sequence_length

    @property
    def steps(self) -> int:
        return self.tokens // self.batch_tokens

    @property
    def layerwise(self) -> bool:
        """Whether the stage trains one layer after the other."""
        return False


class Align(StageBase):
    """Trains the mixers alone: each converted layer learns the attention output of the teacher's layer on its input."""

    kind: Literal["align"] = "align"
    mode: Literal["joint", "layerwise"] = Field(
        "joint",
        description="joint: all layers in one pass. layerwise: one layer after the other, from cached activations, "
        "with one layer of the teacher on the GPU.",
    )
    cached_tokens: int | None = Field(
        None,
        gt=1,
        description="layerwise: number of distinct tokens whose activations are cached, rounded down to a multiple of "
        "batch_tokens. Default: tokens.",
    )

    @model_validator(mode="after")
    def _cache_only_layerwise(self) -> Align:
        if self.cached_tokens is not None:
            if not self.layerwise:
                raise ValueError("cached_tokens needs mode: layerwise")
            if self.cached_tokens < self.batch_tokens:
                raise ValueError("cached_tokens must hold at least one step (batch_tokens)")
        return self

    @property
    def layerwise(self) -> bool:
        return self.mode == "layerwise"


class DistilBase(StageBase):
    """Minimises the KL to the teacher's next-token distribution, with optional terms on the text and hidden states."""

    train: Literal["lora", "full", "frozen"] = Field(
        "lora",
        description="What is trained besides the mixers. lora: adapters, also for the mixers of an imported model. "
        "full: every weight of the decoder layers. frozen: nothing. Embeddings and output matrix are not trained.",
    )
    lora_rank: int = Field(
        64,
        gt=0,
        description="Rank of the adapters (PEFT) of train: lora, which are merged on save.",
    )
    lora_targets: Literal["all", "attention"] = Field(
        "all",
        description="Where the adapters are. attention: on the projections of the layers that stay softmax or have "
        "windows alone, or of all layers of an imported model. all: on the MLPs, too.",
    )
    cache_bits: Literal[16, 8, 4] = Field(
        16,
        description="Bits in which the student sees earlier keys and values in this stage; gradients pass the rounding "
        "unchanged. For a student whose cache will be quantised.",
    )
    kl_weight: float = Field(1.0, ge=0, description="Weight of KL(teacher || student) (nats per token).")
    ce_weight: float = Field(0.0, ge=0, description="Weight of the cross-entropy on the text (nats per token).")
    far_ce_weight: float = Field(
        0.0,
        ge=0,
        description="Weight of the cross-entropy on tokens beyond the teacher's positions, which have no other term: "
        "for rows that are longer than these, and a student of `convert --context`.",
    )
    hidden_weight: float = Field(
        0.0, ge=0, description="Weight of the relative squared error of the residual stream, averaged over layers."
    )
    loss_chunk: int = Field(
        4096, gt=0, description="Tokens whose logits are in memory at once, as fp32 arrays of loss_chunk x vocabulary."
    )

    @model_validator(mode="after")
    def _consistent(self) -> DistilBase:
        if self.kl_weight == 0 and self.ce_weight == 0:
            raise ValueError("kl_weight and ce_weight are both 0: nothing to train on")
        return self


class Distil(DistilBase):
    """The main stage of distillation."""

    kind: Literal["distil"] = "distil"


class Long(DistilBase):
    """The loss of `distil` on long rows, at a low rate."""

    kind: Literal["long"] = "long"
    sequence_length: int = Field(16384, gt=1, description="Tokens per row.")
    batch_tokens: int = Field(65536, gt=0, description="Tokens per optimiser step, over all processes.")
    optimizer: Optimizer = Field(default_factory=lambda: Optimizer(mixer_lr=3e-5, rest_lr=1e-5))


Stage = Annotated[Align | Distil | Long, Field(discriminator="kind")]


class Recipe(Strict):
    """One run: a converted or imported model, its teacher, the data, and the stages in order."""

    student: str = Field(
        ...,
        description="Folder of the model to train: a converted model, or a Qwen3.5 model that `deltanet-hf import` "
        "wrote.",
    )
    teacher: str | None = Field(
        None,
        description="Folder, .gguf file or Hub id. Default: the one in conversion.json. For an imported model: its own "
        "folder, or any model with its vocabulary.",
    )
    output: str = Field(..., min_length=1, description="Folder for checkpoints, logs, plots and the final model.")
    seed: int = Field(0, ge=0, lt=2**32, description="Random seed of the data order and of new adapters.")
    data: Data = Field(default_factory=Data)
    stages: tuple[Stage, ...] = Field(..., description="The stages, which run in this order over consecutive tokens.")
    engine: Engine = Field(default_factory=Engine)
    log: Log = Field(default_factory=Log)

    @field_validator("stages")
    @classmethod
    def _stage_order(cls, stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
        if not stages:
            raise ValueError("at least one stage is required")
        labels = [stage_name(stage) for stage in stages]
        if len(set(labels)) != len(labels):
            raise ValueError(f"two stages are called the same ({', '.join(labels)}): give them a name")
        order = ["align", "distil", "long"]
        ranks = [order.index(stage.kind) for stage in stages]
        if ranks != sorted(ranks):
            raise ValueError(f"stages must come in the order {' -> '.join(order)}")
        return stages

    @model_validator(mode="after")
    def _rounded_rows_are_whole(self) -> Recipe:
        if self.data.isolate_documents and any(getattr(stage, "cache_bits", 16) < 16 for stage in self.stages):
            raise ValueError(
                "a stage with cache_bits of 8 or 4 cannot keep packed documents apart; set data.isolate_documents=false"
            )
        return self


def stage_name(stage: Stage) -> str:
    """The label of a stage in logs and folders."""
    return stage.name or stage.kind


def stage_tokens(stage: Stage) -> int:
    """The number of distinct tokens that a stage takes from the data."""
    cached = stage.cached_tokens if isinstance(stage, Align) else None
    return (stage.tokens if cached is None else cached) // stage.batch_tokens * stage.batch_tokens
