"""What a recipe may say: every key with its meaning, unit and default. Unknown keys are errors."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class Strict(BaseModel):
    """Base of every section: no unknown keys, no changes after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Source(Strict):
    """One corpus of the mixture."""

    path: str | None = Field(
        None, description="local file: .txt, .jsonl (also .gz, .xz), .parquet, or .npy (.npy.xz) with token ids"
    )
    hub: str | None = Field(None, description="dataset id on the Hub, instead of path")
    name: str | None = Field(None, description="configuration of the Hub dataset")
    split: str = Field("train", description="split of the Hub dataset")
    streaming: bool = Field(True, description="Hub only: read documents as they arrive, no full download")
    text_key: str = Field("text", description="field that holds the text (jsonl, parquet, Hub)")
    messages_key: str | None = Field(
        None, description="field with chat messages; the chat template renders them, replies are the completions"
    )
    weight: float = Field(1.0, gt=0, description="share of the rows drawn from this source (relative)")
    max_tokens: int | None = Field(None, gt=0, description="tokens to keep at most; required when streaming")
    skip_tokens: int = Field(0, ge=0, description="tokens at the start of the source that are never used")

    @model_validator(mode="after")
    def _one_origin(self) -> Source:
        if (self.path is None) == (self.hub is None):
            raise ValueError("give exactly one of path (a local file) and hub (a dataset id)")
        if self.hub is not None and self.streaming and self.max_tokens is None:
            raise ValueError("a streamed source needs max_tokens, or it never ends")
        return self


class Data(Strict):
    """Where the tokens come from and how rows are cut from them."""

    sources: tuple[Source, ...] = Field((), description="the mixture; empty: the text shipped with the project")
    shuffle: bool = Field(True, description="permute the documents of each source (by seed and epoch)")
    separator: int | None = Field(
        None, ge=0, description="token id that ends a document; default: the tokenizer's end of text"
    )
    isolate_documents: bool = Field(
        True, description="documents packed into one row do not see each other (positions and state restart)"
    )
    holdout_tokens: int = Field(
        32768, ge=0, description="tokens kept from training for evaluation, from the end of the sources"
    )
    repeat: bool = Field(False, description="start the sources again when they are used up, instead of refusing")
    cache: str | None = Field(None, description="folder of the tokenised corpora; default: OUTPUT/tokens")
    decontaminate: tuple[str, ...] = Field(
        (),
        description="evaluation files (every text in a .jsonl or .parquet, else all of it) or folders of such; "
        "documents sharing 13 tokens in a row are dropped",
    )


class Optimizer(Strict):
    """Optimiser and schedule of one stage. Rates are per step, for AdamW."""

    name: Literal["adamw", "muon"] = Field(
        "adamw", description="adamw, or muon for the matrices of the layers and adamw for everything else"
    )
    mixer_lr: float = Field(1e-3, ge=0, description="peak rate of the mixers that are trained in full")
    rest_lr: float = Field(1e-4, ge=0, description="peak rate of everything else that is trained (LoRA too)")
    gate_lr_scale: float = Field(
        1.0, gt=0, description="factor on mixer_lr for decay, beta and gate biases (vectors of the mixers)"
    )
    muon_lr_scale: float = Field(1.0, gt=0, description="factor on both rates for the matrices Muon updates")
    schedule: Literal["cosine", "linear", "constant"] = Field("cosine", description="decay after the warm-up")
    final_ratio: float = Field(0.1, ge=0, le=1, description="rate at the end / peak rate")
    warmup: float = Field(0.02, ge=0, lt=1, description="share of the steps with a linearly rising rate")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW's moment decays")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay of matrices")
    clip: float = Field(1.0, gt=0, description="largest gradient norm")


class Lora(Strict):
    """Low-rank adapters (PEFT) on the linear layers outside the new mixers; merged on save."""

    rank: int = Field(64, gt=0, description="rank r")
    alpha: int = Field(64, gt=0, description="scale = alpha / rank")
    targets: tuple[Literal["mlp", "attention"], ...] = Field(
        ("mlp", "attention"),
        description="linears of the MLPs; projections of the layers that stay softmax (of all, in an imported model)",
    )


class StageBase(Strict):
    """Keys that all stages share."""

    name: str | None = Field(None, description="label in logs and folders; default: the kind")
    tokens: int = Field(..., gt=0, description="training tokens of the stage (rounded down to whole steps)")
    sequence_length: int = Field(512, gt=1, description="tokens in a row")
    batch_tokens: int = Field(8192, gt=0, description="tokens in one optimiser step, over all processes")
    micro_batch_rows: int | None = Field(
        None, gt=0, description="rows that one process holds at once; default: its whole share of the step"
    )
    optimizer: Optimizer = Field(default_factory=Optimizer)

    @model_validator(mode="after")
    def _whole_rows(self) -> StageBase:
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


class Align(StageBase):
    """Match each converted layer's attention output to the teacher's, teacher-forced; mixers only."""

    kind: Literal["align"] = "align"
    mode: Literal["joint", "layerwise"] = Field(
        "joint", description="all layers in one pass, or one layer after the other from cached activations"
    )
    cached_tokens: int | None = Field(
        None, gt=1, description="layerwise: distinct tokens whose activations are kept; default: tokens"
    )

    @model_validator(mode="after")
    def _cache_only_layerwise(self) -> Align:
        if self.cached_tokens is not None:
            if self.mode != "layerwise":
                raise ValueError("cached_tokens needs mode: layerwise")
            if self.cached_tokens % self.sequence_length:
                raise ValueError("cached_tokens must be a multiple of sequence_length")
            if self.cached_tokens < self.batch_tokens:
                raise ValueError("cached_tokens must hold at least one step (batch_tokens)")
        return self


class DistilBase(StageBase):
    """KL to the teacher's next-token distribution, with terms on the labels and on the hidden states."""

    train: Literal["lora", "full", "frozen"] = Field(
        "lora",
        description="what else is trained beside the mixers: adapters (an imported model's mixers are trained by these "
        "too), every layer weight, or nothing",
    )
    train_embeddings: bool = Field(False, description="with train: full, also the embeddings and the head")
    lora: Lora = Field(default_factory=Lora)
    kl_weight: float = Field(1.0, ge=0, description="weight of the KL term (nats per token)")
    ce_weight: float = Field(0.1, ge=0, description="weight of the cross-entropy on the text (nats per token)")
    hidden_weight: float = Field(
        0.0, ge=0, description="weight of the relative squared error of the residual stream, mean over layers"
    )
    temperature: float = Field(1.0, gt=0, description="softens both distributions; gradients scaled by its square")
    direction: Literal["forward", "reverse"] = Field(
        "forward", description="forward: KL(teacher || student); reverse: KL(student || teacher)"
    )
    top_k: int | None = Field(
        None, gt=0, description="use the teacher's k best log-probabilities, cached on disk; default: all, live"
    )
    loss_chunk: int = Field(
        4096, gt=0, description="tokens whose logits exist at once; the peak is chunk x vocabulary in fp32"
    )

    @model_validator(mode="after")
    def _consistent(self) -> DistilBase:
        if self.kl_weight == 0 and self.ce_weight == 0:
            raise ValueError("kl_weight and ce_weight are both 0: nothing to train on")
        if self.top_k is not None and self.direction == "reverse":
            raise ValueError("reverse KL needs the whole distribution of the teacher: leave out top_k")
        if self.top_k is not None and self.hidden_weight > 0:
            raise ValueError("hidden_weight needs the teacher beside the student: leave out top_k")
        if self.top_k is not None and self.temperature != 1.0:
            raise ValueError("cached log-probabilities are at temperature 1: leave out temperature or top_k")
        if self.train_embeddings and self.train != "full":
            raise ValueError("train_embeddings needs train: full")
        return self


class Distil(DistilBase):
    """The main stage."""

    kind: Literal["distil"] = "distil"


class Long(DistilBase):
    """The same loss on long rows, at a low rate."""

    kind: Literal["long"] = "long"
    sequence_length: int = Field(16384, gt=1, description="tokens in a row")
    batch_tokens: int = Field(65536, gt=0, description="tokens in one optimiser step, over all processes")
    optimizer: Optimizer = Field(default_factory=lambda: Optimizer(mixer_lr=3e-5, rest_lr=1e-5))


class Repair(DistilBase):
    """The same loss on the completions of chat examples only (sources with messages_key)."""

    kind: Literal["repair"] = "repair"
    optimizer: Optimizer = Field(default_factory=lambda: Optimizer(mixer_lr=5e-5, rest_lr=2e-5))
    data: Data | None = Field(None, description="the chat data of this stage; default: the recipe's data")


Stage = Annotated[Align | Distil | Long | Repair, Field(discriminator="kind")]


class Engine(Strict):
    """How the work runs. The results do not depend on it beyond rounding."""

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: the GPU when there is one")
    precision: Literal["auto", "bf16", "fp32"] = Field(
        "auto", description="arithmetic; weights that are trained are always fp32. auto: bf16 on GPU, fp32 on CPU"
    )
    compile: bool | None = Field(None, description="torch.compile of the decoder layers; default: on GPU")
    cuda_graphs: bool | None = Field(
        None, description="replay each micro-batch as one CUDA graph; default: on GPUs with compile and sharding none"
    )
    gradient_checkpointing: bool = Field(False, description="recompute activations in the backward pass")
    sharding: Literal["none", "fsdp2"] = Field(
        "none", description="with several processes: replicate, or shard weights and optimiser (FSDP2)"
    )
    threads: int | None = Field(None, gt=0, description="CPU threads; default: torch's own choice")


class Log(Strict):
    """What is written while training."""

    every: int = Field(10, gt=0, description="steps between log lines")
    evaluate_every: int = Field(200, gt=0, description="steps between evaluations on the held-out rows")
    checkpoint_every: int = Field(200, gt=0, description="steps between checkpoints")
    keep: int = Field(2, gt=0, description="checkpoints kept")
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = Field((), description="also report to these")
    diverged_factor: float = Field(
        5.0, gt=1, description="stop when the mean loss of a log interval exceeds the best one by this factor"
    )


class Recipe(Strict):
    """A whole run: a converted (or imported) model, its teacher, data, and stages in order."""

    student: str = Field(
        ..., description="folder of the converted model, or of an imported Qwen3.5 model (deltanet-hf convert)"
    )
    teacher: str | None = Field(
        None,
        description="folder or Hub id; default: the one in conversion.json. For an imported model: its own folder, or "
        "any model with its vocabulary",
    )
    output: str = Field(..., description="folder for checkpoints, logs, plots and the final model")
    baseline: Literal["window"] | None = Field(
        None,
        description="window: for comparison, student is a softmax model (the teacher's folder, say) and is trained "
        "seeing only the last 64 tokens and the first 4; nothing is converted, so no align stages",
    )
    seed: int = Field(0, ge=0, description="order of the data and start of new weights (LoRA)")
    data: Data = Field(default_factory=Data)
    stages: tuple[Stage, ...] = Field(..., description="run in this order, over consecutive tokens")
    engine: Engine = Field(default_factory=Engine)
    log: Log = Field(default_factory=Log)

    @model_validator(mode="after")
    def _baseline_has_no_mixers(self) -> Recipe:
        if self.baseline is None:
            return self
        name = f"baseline: {self.baseline}"
        for stage in self.stages:
            if isinstance(stage, Align):
                raise ValueError(f"{name} has no converted layers to align: leave out the align stages")
            if stage.train == "frozen":
                raise ValueError(f"{name} with train: frozen trains nothing: use full or lora")
        for data in (self.data, *(stage.data for stage in self.stages if isinstance(stage, Repair))):
            if data is not None and data.isolate_documents:
                raise ValueError(
                    f"{name} gives sinks only to a row's first document: set data.isolate_documents to false"
                )
        return self

    @field_validator("stages")
    @classmethod
    def _stage_order(cls, stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
        if not stages:
            raise ValueError("at least one stage is needed")
        labels = [stage_name(stage) for stage in stages]
        if len(set(labels)) != len(labels):
            raise ValueError(f"two stages are called the same ({', '.join(labels)}): give them a name")
        order = ["align", "distil", "long", "repair"]
        ranks = [order.index(stage.kind) for stage in stages]
        if ranks != sorted(ranks):
            raise ValueError(f"stages must come in the order {' -> '.join(order)}")
        return stages


def stage_name(stage: Stage) -> str:
    """The label of a stage in logs and folders."""
    return stage.name or stage.kind


def stage_tokens(stage: Stage) -> int:
    """Distinct tokens that a stage takes from the data."""
    if isinstance(stage, Align) and stage.cached_tokens is not None:
        return stage.cached_tokens
    return stage.steps * stage.batch_tokens
