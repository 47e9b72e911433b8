"""The recipe: what the user wants, every setting validated once, frozen afterwards.

Each section is one small class; the docstring under a field is its documentation
(`docs/recipe.md` is generated from it). Types and ranges live here, rules that join
two settings in `intake/checks.py`, file reading in `intake/load.py`, error texts in
`recipe/mistakes.py`.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)

from toolkit.layout import (
    AttentionKernel,
    CompiledParts,
    Exchange,
    ExpertProducts,
    Fp8Scaling,
    FusedKernels,
    LossKernel,
)
from toolkit.objectives import OBJECTIVES, Objective
from toolkit.optimizers.base import OPTIMIZERS, OptimizerKind
from toolkit.recipe.batch_sizes import BatchSizes
from toolkit.recipe.section import (
    Auto,
    Count,
    Degree,
    Fraction,
    Name,
    NonEmpty,
    NonNegativeFloat,
    OneOf,
    Positive,
    PositiveFloat,
    Section,
    Wording,
)
from toolkit.registry import ENGINES
from toolkit.removed import without_unset

EngineChoice: TypeAlias = Annotated[str, OneOf("auto", *ENGINES.names)]
ObjectiveName: TypeAlias = Annotated[str, OneOf(*OBJECTIVES.names)]
OptimizerName: TypeAlias = Annotated[str, OneOf(*OPTIMIZERS.names)]


def _whole_float(value: object) -> object:
    """Let a count be written as `2.0e12`: a float that is a whole number is one."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _exact_int(value: object) -> object:
    """Keep `true` and `2.0` from passing as the literals 1 and 2."""
    if isinstance(value, bool | float):
        raise ValueError("not an integer")
    return value


TokenCount: TypeAlias = Annotated[
    int,
    BeforeValidator(_whole_float),
    Field(ge=1, le=10**18),
    Wording("a whole number ≥ 1 (2.0e12 is fine)"),
]
SequenceLength: TypeAlias = Annotated[int, Field(ge=2, le=2**24)]
HostPort: TypeAlias = Annotated[
    str,
    Field(pattern=r"^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?):[0-9]{1,5}$"),
    Wording("HOST:PORT, e.g. node-1:29400"),
]
ProjectName: TypeAlias = Annotated[
    str,
    Field(pattern=r"^[^/\\#?%:\x00-\x1f\x7f-\x9f]{1,128}$"),
    Wording("1 to 128 characters, without `/\\#?%:` and control characters"),
]
"""A project's name as every tracker takes it: W&B's server refuses the most characters."""
TrackerName: TypeAlias = Literal["wandb", "tensorboard", "mlflow", "trackio"]
SlurmOption: TypeAlias = Annotated[
    str,
    Field(pattern=r"^--[a-z][a-z-]*(=[A-Za-z0-9_.,:@+%/*\[\]&|()-]+)?$", max_length=400),
    Wording("--name or --name=value, without spaces and quotes"),
]
KubernetesName: TypeAlias = Annotated[
    str,
    Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$"),
    Wording("lowercase letters, digits, `-` and `.`, as in Kubernetes names"),
]
AdapterTargets: TypeAlias = (
    Literal["all-linear", "attention", "mlp", "experts"]
    | Annotated[tuple[NonEmpty, ...], Field(min_length=1, strict=False)]
)
ColumnName: TypeAlias = Literal[
    "messages", "conversations", "tools", "system", "history", "chat_template_kwargs",
    "prompt", "completion", "instruction", "input", "output", "chosen", "rejected",
]  # fmt: skip
ColumnNames: TypeAlias = Annotated[
    dict[ColumnName, NonEmpty],
    Wording(f"a map from {', '.join(get_args(ColumnName))} to a column's name"),
]
ZeroStage: TypeAlias = Annotated[Literal[0, 1, 2, 3], BeforeValidator(_exact_int)]


class BalanceSection(Section):
    """Load balancing of experts (docs/optimizers.md). It also adds the experts' load to the
    metrics."""

    kind: Literal["none", "sequence_loss", "bias"] = "none"
    """`sequence_loss`: a loss per layer and sequence, as in DeepSeek-V3. `bias`: a bias per
    expert that is updated after each step, for model types that have one."""
    coefficient: NonNegativeFloat = 0.0
    """Weight of the loss. Above 0 with `sequence_loss`; possible with `bias`."""
    bias_update: NonNegativeFloat = 0.0
    """With `bias`: step size of the bias, above 0."""
    z_loss: NonNegativeFloat = 0.0
    """Weight of the router's z-loss (ST-MoE), with any kind."""


class ModelSection(Section):
    """Which model, and where its weights come from."""

    hub: NonEmpty | None = None
    """Hugging Face hub id or local folder. Needed for `init: pretrained`."""
    revision: NonEmpty | None = None
    """Hub revision (branch, tag or commit) of `hub`."""
    init: Literal["random", "pretrained", "checkpoint"] = "random"
    """`random`: drawn from the seed, the same under every layout. `pretrained`: read from
    `hub`. `checkpoint`: the weights of another run, read from `checkpoint`."""
    checkpoint: NonEmpty | None = None
    """For `init: checkpoint`: a checkpoint's folder, or a run directory (its newest finished
    checkpoint). Optimizer, schedule and data start from scratch."""
    config: dict[str, Any] | None = None
    """Hugging Face config keys (`model_type`, `hidden_size`, …): the recipe can then be planned
    offline. Compared with the hub's config when weights are loaded."""
    freeze: Annotated[tuple[NonEmpty, ...], Field(strict=False)] = ()
    """Parameters that do not train, by patterns of their names in a Hugging Face checkpoint,
    e.g. `[model.embed_tokens.*]`."""
    balance: BalanceSection | None = None
    """Expert load balancing; null: none, and no metrics of it."""

    @property
    def stated_vocabulary(self) -> int | None:
        """The model's tokens, as far as this section alone says."""
        return (self.config or {}).get("vocab_size")


class SourceSection(Section):
    """The settings that all sources share: their part in a list of sources."""

    label: NonEmpty | None = None
    """In a list of sources: the name of this one. Default: the last part of its path."""
    weight: NonNegativeFloat | None = None
    """In a list for training: share of the samples, relative to the other weights."""
    epochs: PositiveFloat | None = None
    """In a list for training, instead of `weight`: passes over this source (with
    `training.epochs: 1`)."""

    @property
    def places(self) -> tuple[str, ...]:
        """All paths, globs and names that it is read from."""
        raise NotImplementedError

    @property
    def place(self) -> str:
        """The first of them."""
        return self.places[0]

    @property
    def title(self) -> str:
        """The name of the source."""
        return self.label or PurePath(self.place).name


class TextSource(SourceSection):
    """Plain text files: one document per file."""

    kind: Literal["text"]
    files: Annotated[tuple[NonEmpty, ...], Field(min_length=1, strict=False)]
    """Files and globs (`**` allowed), relative to the recipe's file. `{stdlib}` is the standard
    library's folder of the running Python."""

    @property
    def places(self) -> tuple[str, ...]:
        """See `SourceSection.places`."""
        return self.files


class RowsSource(SourceSection):
    """The settings that all sources made of rows share."""

    kind: str
    path: NonEmpty
    """Hub id (`allenai/c4`), or a local file or glob of .json, .jsonl, .parquet, .arrow or
    .txt, relative to the recipe's file."""
    name: NonEmpty | None = None
    """Dataset configuration name, e.g. `en`."""
    revision: NonEmpty | None = None
    """Hub revision of the dataset. Default: the newest commit when the run begins."""
    split: NonEmpty = "train"
    """Split to read; slices such as `train[:1%]` are allowed."""
    malformed: Literal["error", "drop"] = "error"
    """For chats and preferences: a malformed row is an error that names file and row, or is
    dropped and counted."""

    @property
    def places(self) -> tuple[str, ...]:
        """See `SourceSection.places`."""
        return (self.path,)


class HfSource(RowsSource):
    """A Hugging Face dataset: a hub id, or local json, jsonl, parquet, arrow or text files."""

    kind: Literal["hf"]
    text_field: NonEmpty = "text"
    """Column that contains a document's text."""


class ChatRowsSource(RowsSource):
    """The settings that conversations and preferences share."""

    columns: ColumnNames = {}  # noqa: RUF012 - pydantic copies it
    """Names of columns that differ in the data, e.g. `{messages: dialog}` (docs/data.md)."""

    def column(self, name: ColumnName) -> str:
        """The name in the data of the column `name` of the format."""
        return self.columns.get(name, name)


class ChatSource(ChatRowsSource):
    """Conversations, one a row: a hub id, or local json, jsonl or parquet files."""

    kind: Literal["chat"]
    format: Literal["auto", "messages", "prompt_completion", "alpaca", "sharegpt"] = "auto"
    """Format of the data (docs/data.md). `auto`: detected from the names of the columns."""
    loss_on: Literal["assistant", "last_assistant", "all", "completion"] = "assistant"
    """Trained tokens: every assistant turn, only the last one, all tokens, or what follows the
    prompt."""
    too_long: Literal["truncate", "drop", "split"] = "truncate"
    """A conversation longer than `training.sequence_length`: keep its beginning, drop it, or
    split it into samples."""
    rewritten_history: Literal["error", "split"] = "error"
    """Conversations whose earlier turns the template renders differently once others follow
    (models that drop their thinking): refuse, or make one sample per assistant turn."""


class PreferenceSource(ChatRowsSource):
    """Preferences, one a row: a prompt with a chosen and a rejected answer."""

    kind: Literal["preference"]
    too_long: Literal["truncate", "drop"] = "truncate"
    """A pair longer than `training.sequence_length`: keep its beginning, or drop it."""


class MegatronSource(SourceSection):
    """Tokenised data in Megatron's indexed format (`PREFIX.bin` and `PREFIX.idx`)."""

    kind: Literal["megatron"]
    prefix: NonEmpty
    """Path of the pair of files, without `.bin`/`.idx`, relative to the recipe's file."""

    @property
    def places(self) -> tuple[str, ...]:
        """See `SourceSection.places`."""
        return (self.prefix,)


DocumentSource: TypeAlias = TextSource | HfSource | MegatronSource
"""Text, of which all is trained."""
Source: TypeAlias = Annotated[
    DocumentSource | ChatSource | PreferenceSource, Field(discriminator="kind")
]


ONE_SOURCE, SOURCE_LIST = "(source)", "(sources)"
"""pydantic's names of the two forms of `data.train`; error texts do not show them."""

Sources: TypeAlias = Annotated[
    Annotated[Source, Tag(ONE_SOURCE)]
    | Annotated[tuple[Source, ...], Field(min_length=1, strict=False), Tag(SOURCE_LIST)],
    Discriminator(lambda value: SOURCE_LIST if isinstance(value, list | tuple) else ONE_SOURCE),
]


class StageSection(Section):
    """A step from which the weights of a list of sources change."""

    from_step: Positive
    """The stage begins after this number of steps."""
    weights: dict[NonEmpty, NonNegativeFloat]
    """Weight of every source, by its label."""


class DataSection(Section):
    """The data to train on."""

    train: Sources
    """Training data: a source, or a list of sources, each with a `weight` or `epochs`
    (docs/data.md)."""
    stages: Annotated[tuple[StageSection, ...], Field(strict=False)] = ()
    """Steps from which the weights of a list of sources change."""
    validation: Sources | None = None
    """Validation data: a source, or a list of sources, whose losses are reported one by one."""
    validation_fraction: Fraction = 0.0
    """Share of the training data held out for validation, chosen by the seed."""
    tokenizer: NonEmpty = "bytes"
    """Hub id, local folder (relative to the recipe's file), or `bytes`: the shipped
    byte-level tokenizer (256 bytes and one end-of-text token)."""
    tokenizer_revision: NonEmpty | None = None
    """Hub revision of the tokenizer."""
    special_tokens: Literal["text", "parse"] = "text"
    """Encode a special token that a document spells out, e.g. `<|endoftext|>`, as ordinary
    characters, or as the token (`parse`). In chats, `text` makes such a row malformed."""
    isolate_documents: bool = False
    """A token attends only to its own document, and positions restart with each document."""
    chat_template: Annotated[str, Field(min_length=1, max_length=2**17)] | None = None
    """For chats and preferences: a file with a Jinja template (relative to the recipe's file),
    the template itself, or `chatml`. Default: the tokenizer's own."""
    packing: Literal["none", "greedy", "best_fit"] = "none"
    """Chats: `none`, one conversation a row; `greedy`, as many whole ones as fit. Documents:
    `none`, concatenated and cut; `best_fit`, as many whole ones as fit."""

    @property
    def sources(self) -> tuple[Source, ...]:
        """The sources of `train`, one or several."""
        return self.train if isinstance(self.train, tuple) else (self.train,)

    @property
    def kind(self) -> str:
        """The form of what is trained on, that of the first source."""
        return self.sources[0].kind

    @property
    def named_sources(self) -> tuple[tuple[str, Source], ...]:
        """Every source with its dotted key: `data.train`, or `data.train[0]` of a list."""
        return tuple(
            (f"data.{side}[{number}]" if isinstance(stated, tuple) else f"data.{side}", source)
            for side, stated, sources in (
                ("train", self.train, self.sources),
                ("validation", self.validation, self.validation_sources),
            )
            for number, source in enumerate(sources)
        )

    @property
    def validation_sources(self) -> tuple[Source, ...]:
        """The sources of `validation`."""
        if self.validation is None:
            return ()
        return self.validation if isinstance(self.validation, tuple) else (self.validation,)

    @property
    def isolates(self) -> bool:
        """Do the documents of a row not attend to each other?"""
        return self.isolate_documents or self.packing == "greedy"


class BatchRampSection(Section):
    """A global batch that grows, from the first step on, to `training.global_batch_size`."""

    start: Positive
    """Samples of the first steps."""
    increment: Positive
    """Samples added each time, fewer the last time."""
    steps: Positive
    """Steps until the batch is whole, divided evenly among the sizes before."""


class TrainingSection(Section):
    """Length, batch size and precision. Exactly one of steps, tokens and epochs is required."""

    objective: ObjectiveName = "pretrain"
    """The loss. `pretrain`: mean cross entropy over the unmasked tokens of the global
    batch; `sft`: the same, of conversations; `dpo`, `orpo`: on pairs of answers
    (docs/fine-tuning.md)."""
    steps: Positive | None = None
    """Optimizer steps."""
    tokens: TokenCount | None = None
    """Training tokens; rounded up to whole steps."""
    epochs: PositiveFloat | None = None
    """Passes over the training data; rounded up to whole steps."""
    sequence_length: SequenceLength
    """Tokens per sequence."""
    global_batch_size: Positive
    """Samples per optimizer step over all ranks; never changed by a layout. With `dpo` and
    `orpo`, a sample is a pair of sequences."""
    batch_ramp: BatchRampSection | None = None
    """Smaller global batches at the start of the run (docs/optimizers.md); null: none."""
    micro_batch_size: Positive | Auto = "auto"
    """Samples per rank and forward pass; gradient accumulation is derived from it."""
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Compute precision; master weights and optimizer states are always fp32. For fp8, use bf16
    and `kernels.fp8`."""
    seed: Count = 1234
    """Determines initial weights and data order, independently of the layout."""
    deterministic: bool = False
    """Runs in the same layout, with the same packages and GPUs, are bitwise equal. Slower
    (docs/engines.md)."""

    @property
    def rows_per_sample(self) -> int:
        """Sequences of a sample: 2 where it is a pair."""
        return OBJECTIVES[self.objective].rows_per_sample

    @property
    def batches(self) -> BatchSizes:
        """Global batch sizes of the run's steps."""
        ramp, whole = self.batch_ramp, self.global_batch_size
        tokens = self.rows_per_sample * self.sequence_length
        if ramp is None:
            return BatchSizes.of([whole], tokens)
        sizes = [*range(ramp.start, whole, ramp.increment), whole]
        return BatchSizes.of(sizes, tokens, ramp.steps)

    def total_steps(self, samples_per_epoch: int | None = None) -> int | None:
        """Optimizer steps of the run; None where it is given in epochs, of an unknown number
        of samples."""
        if self.steps is not None:
            return self.steps
        if self.tokens is not None:
            return self.batches.steps_of_tokens(self.tokens)
        if self.epochs is None or samples_per_epoch is None:
            return None
        return self.batches.steps_of_samples(self.epochs * samples_per_epoch)

    @property
    def batch_unit(self) -> int:
        """Samples of which every global batch of the run is a multiple."""
        ramp = self.batch_ramp
        sizes = () if ramp is None else (ramp.start, ramp.increment)
        return math.gcd(self.global_batch_size, *sizes)


LENGTH_SETTINGS = ("training.steps", "training.tokens", "training.epochs")
"""How long a run is: one of them is stated."""


class DpoSection(Section):
    """Settings of `training.objective: dpo`; docs/fine-tuning.md has the formulas."""

    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """Loss of a pair."""
    beta: PositiveFloat = 0.1
    """How strongly the policy is kept close to the reference (τ in the paper of `ipo`)."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """`sigmoid` only: the assumed share of pairs whose answers are swapped."""
    sft_weight: NonNegativeFloat = 0.0
    """Weight of an added cross entropy per token of the chosen answer."""


class OrpoSection(Section):
    """Settings of `training.objective: orpo`; docs/fine-tuning.md has the formulas."""

    beta: PositiveFloat = 0.1
    """Weight of the odds ratio against the cross entropy; λ in its paper."""


class AdapterSection(Section):
    """LoRA: only adapters train, equal to PEFT's in every layout (docs/fine-tuning.md).
    A starts uniform within ±1/√(its columns), B at 0."""

    rank: Annotated[int, Field(ge=1, le=65536)]
    """LoRA rank r."""
    alpha: PositiveFloat
    """scaling = alpha / rank. For rsLoRA's scaling, multiply its alpha by √rank."""
    targets: AdapterTargets = "all-linear"
    """Projections with an adapter; or a list of these words and of names, e.g.
    `[attention, experts]` or `[q_proj, v_proj]`."""
    dropout: Fraction = 0.0
    """Probability with which an input of an adapter is 0 in training."""


class ParameterGroup(Section):
    """Parameters with their own learning rate and weight decay. A parameter belongs to the
    first group that matches it; the others keep the optimizer's values."""

    parameters: Annotated[tuple[NonEmpty, ...], Field(min_length=1, strict=False)]
    """Patterns of names, as in `model.freeze`. A tied head belongs to the embedding. With
    `adapter`, the adapters' own tensors, e.g. `["*.lora_B.weight"]`."""
    lr_mult: PositiveFloat = 1.0
    """Multiplies the learning rate of every step."""
    wd_mult: NonNegativeFloat = 1.0
    """Multiplies `weight_decay`, which stays 0 for norms and biases."""


class OptimizerSection(Section):
    """Weight decay skips norms and biases on every engine."""

    name: OptimizerName = "adamw"
    """`adamw_8bit` is bitsandbytes' AdamW with 8-bit moments, except for embeddings. `muon`
    orthogonalises the updates of the weight matrices inside the decoder layers; embeddings,
    head, norms and biases are updated by AdamW with the same learning rate."""
    learning_rate: PositiveFloat
    """Peak learning rate."""
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = (0.9, 0.95)
    """Decay rates of the first and second moment."""
    eps: PositiveFloat = 1.0e-8
    """Added to the denominator."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay."""
    clip_grad_norm: PositiveFloat | None = 1.0
    """Largest global gradient norm; null for no clipping. The norm before clipping is
    reported."""
    groups: Annotated[tuple[ParameterGroup, ...], Field(strict=False)] = ()
    """Parameters with their own learning rate or weight decay."""

    @property
    def kind(self) -> OptimizerKind:
        """The optimizer."""
        return OPTIMIZERS[self.name]


class PlateauSection(Section):
    """When and how much `name: plateau` reduces the learning rate: torch's
    ReduceLROnPlateau on the validation loss."""

    factor: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """New learning rate as a share of the old one."""
    patience: Count = 10
    """Validations in a row without improvement before the rate is reduced."""


class ScheduleSection(Section):
    """Learning rate over the run: linear warm-up, then the named shape."""

    name: Literal["cosine", "linear", "constant", "wsd", "plateau"] = "cosine"
    """`wsd`: stable, then a decay over the last `decay_steps`. `plateau`: reduced when the
    validation loss stops improving (docs/optimizers.md)."""
    plateau: PlateauSection | None = None
    """With `name: plateau` only; null for the defaults."""
    warmup_steps: Count = 0
    """Steps of warm-up: the first runs at peak / warmup_steps, the last at the peak rate."""
    warmup_ratio: Fraction | None = None
    """Instead of `warmup_steps`: the share of the run's steps, rounded up."""
    decay_steps: Positive | None = None
    """`wsd` only: steps of the final decay. Others decay until the last step."""
    decay: Literal["linear", "cosine", "1-sqrt"] = "linear"
    """`wsd` only: the shape of the final decay."""
    min_learning_rate: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay. `plateau`: the lowest rate."""

    def warmup(self, total_steps: int) -> int:
        """Steps of warm-up in a run of `total_steps`."""
        if self.warmup_ratio is None:
            return self.warmup_steps
        return math.ceil(self.warmup_ratio * total_steps)


class EvaluationSection(Section):
    """Validation loss during training and at the end."""

    every_steps: Positive | None = None
    """Steps between evaluations; null for none before the end."""
    batches: Positive = 20
    """Global batches per evaluation (fewer when the validation data is smaller)."""
    patience: Positive | None = None
    """Validations in a row without a lower loss after which the run ends, as a finished one;
    null: it goes on."""


class ZeroSection(Section):
    """ZeRO: what data-parallel ranks shard instead of replicating."""

    stage: ZeroStage | Auto = "auto"
    """Shard optimizer states (1), also gradients (2), also parameters (3). Engine megatron has
    0 and 1, ddp 0, fsdp 1 to 3."""
    offload_optimizer: Literal["none", "cpu", "nvme"] | Auto = "auto"
    """Where optimizer states are kept. `auto`: on the device or, if nothing fits there, on the
    CPU (on NVMe if `nvme_path` names a folder)."""
    offload_parameters: Literal["none", "cpu", "nvme"] | Auto = "auto"
    """Where parameters are kept while not in use (stage 3). Engine fsdp offloads both or
    none."""
    nvme_path: NonEmpty | None = None
    """Folder on a fast local disk, for `nvme`."""
    config: NonEmpty | None = None
    """Engine deepspeed: a preset of `ds_configs/` by name, or your own JSON file, relative to
    the recipe's file. Default: the preset that fits stage and offload."""


class OuterSection(Section):
    """Replicas that train on their own between exchanges of weights (DiLoCo). They meet at
    `torchft_lighthouse`, whose address is the environment's TORCHFT_LIGHTHOUSE. A launch starts
    the replica whose number, from 0, is REPLICA_GROUP_ID there."""

    replicas: Annotated[int, Field(ge=2, le=1024)]
    """Number of replicas, each a run of its own with the machines of `cluster`. Each trains
    other samples, in batches of `training.global_batch_size`."""
    every_steps: Positive = 100
    """Inner steps between two exchanges. `checkpoint.every_steps` must be a multiple."""
    learning_rate: PositiveFloat = 0.7
    """Outer learning rate of SGD with Nesterov's momentum; 1, without momentum: the mean of the
    weights."""
    momentum: Fraction = 0.9
    """Outer momentum."""
    overlap: Literal["none", "delayed"] = "none"
    """`delayed`: changes of weights are sent while the next round trains, and applied at its
    end."""


class ParallelSection(Section):
    """How to parallelise the training, independently of any backend's configuration format."""

    engine: EngineChoice = "auto"
    """The engine that owns gradients, optimizer and sharding. `auto` does not choose `fsdp`
    (torch's FSDP2): the planner cannot predict whether it or DeepSpeed is faster."""
    model: Literal["auto", "hf", "megatron"] = "auto"
    """Model implementation: transformers or megatron-core."""
    tensor: Degree | Auto = "auto"
    """Tensor-parallel degree, of megatron-core's models."""
    pipeline: Degree | Auto = "auto"
    """Pipeline-parallel degree."""
    virtual_pipeline: Degree | Auto = "auto"
    """Model chunks per pipeline stage (interleaved schedule)."""
    stages: Annotated[tuple[Positive, ...], Field(strict=False)] = ()
    """Layers of each pipeline stage, e.g. [20, 12]; with virtual stages, of each chunk. Empty:
    evenly."""
    context: Degree | Auto = 1
    """Context-parallel degree: ranks over which the positions of every row are spread, for long
    sequences (docs/engines.md). Twice the degree divides every sequence length."""
    expert: Degree | Auto = 1
    """Expert-parallel degree of mixture-of-experts layers, of megatron-core's models."""
    sequence: bool | Auto = "auto"
    """Sequence parallel: norms and dropouts sharded inside the tensor group."""
    zero: ZeroSection = ZeroSection()
    """ZeRO and offload."""
    replicate: Degree | Auto = "auto"
    """With engine `fsdp`: replicas of the sharded model (hybrid sharding)."""
    balance: Literal["none", "auto"] = "none"
    """`auto`: samples move from slower to faster ranks at checkpoints; the loss does not change
    (docs/staying-alive.md)."""
    recompute: Literal["none", "selective", "full"] | Degree | Auto = "auto"
    """Activation recompute (checkpointing): none, attention only, or whole layers; a number:
    that many whole layers, of each pipeline chunk."""
    outer: OuterSection | None = None
    """Replicas over slow links (docs/launchers.md#replicas-over-slow-links)."""


class ClusterSection(Section):
    """The machines that the run is planned for."""

    nodes: Degree = 1
    """Machines."""
    gpus_per_node: Degree = 1
    """Processes per machine, one per GPU (or per CPU process with `gpu: cpu`)."""
    gpu: NonEmpty = "cpu"
    """Accelerator name in the hardware catalogue, e.g. `h100-80gb`, or `cpu`. A cluster file
    describes one of your own (docs/cluster.md)."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.gpus_per_node


class CheckpointSection(Section):
    """Saving and resuming."""

    every_steps: Positive | None = None
    """Steps between checkpoints; null: only at the last step and on a signal."""
    keep: Positive = 3
    """Number of checkpoints to keep, the newest ones."""
    keep_best: Positive | None = None
    """Checkpoints with the lowest validation loss to keep, too; `export/` is then of the best
    one."""
    asynchronous: bool = True
    """Training continues while a checkpoint is written, from a copy in host memory."""
    export: bool = True
    """Write a Hugging Face folder to `export/` at the end; with adapters, a PEFT folder."""


class GuardSection(Section):
    """Protection of the weights against bad batches and faulty machines."""

    spike_factor: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """Skip a step whose loss exceeds this many times the median of the last 50 steps. A step
    without a finite loss and gradient, or a token to train on, is always skipped."""
    replica_check_every_steps: Positive | None = None
    """Steps between comparisons of replicated weights; a difference stops the run and names the
    rank."""


class LoggingSection(Section):
    """Logs and trackers that a run writes."""

    every_steps: Positive = 10
    """Steps between lines of `metrics.jsonl`. The first and the last step have one, too."""
    trackers: Annotated[tuple[TrackerName, ...], Field(strict=False)] = ()
    """Where the metrics are posted, too, e.g. `[wandb, tensorboard]` (docs/reports.md). W&B is
    offline unless the environment sets WANDB_MODE."""
    project: ProjectName = "dmt"
    """Project at W&B and trackio, experiment at MLflow."""


class ElasticSection(Section):
    """How many machines a run may have while it runs."""

    min_nodes: Degree
    """Without as many, the run waits, and fails after ten minutes."""
    max_nodes: Degree
    """Machines beyond it wait until one is lost."""


class SlurmSection(Section):
    """The batch job that `launcher: slurm` submits. Its environment is that of `dmt launch`, so
    load modules before."""

    options: Annotated[tuple[SlurmOption, ...], Field(strict=False)] = ()
    """Options of sbatch, e.g. `[--partition=gpu, --time=24:00:00, --cpus-per-task=96,
    --exclusive, --mem=0]`. A task is all ranks of a machine. What you do not state has the
    cluster's default, often one core and little memory. DMT's own are --requeue and
    --signal=B:USR1@300, seconds before the time limit to save in. Yours replace them."""


class KubernetesSection(Section):
    """The job that `launcher: kubernetes` creates."""

    image: NonEmpty | None = None
    """Container image with DMT installed; needed for this launcher."""
    volume_claim: KubernetesName | None = None
    """A PersistentVolumeClaim that all machines can write to; needed for this launcher. It
    holds the run directory and relative paths of `data`, mounted at `/dmt`."""
    pod: dict[str, Any] | None = None
    """Other fields of each pod's spec, as Kubernetes spells them (docs/launchers.md). Maps are
    merged; lists are appended; the first of `containers` is merged with the one that trains."""


class LaunchSection(Section):
    """How `dmt launch` starts the workers."""

    launcher: Literal["local", "slurm", "kubernetes", "ray"] = "local"
    """`local`: DMT starts one process per rank on this machine; on several machines, run it on
    each. `slurm` and `kubernetes` hand a job to a scheduler and return. `ray` uses the cluster
    at the environment's RAY_ADDRESS (`auto`: the one of this machine), or starts Ray here."""
    max_restarts: Count = 0
    """How many times in a row a failed run is restarted from its last checkpoint. A newer
    checkpoint resets the count, except of machines lost under Ray; a user's mistake is never
    retried."""
    hang_timeout_s: PositiveFloat = 1800.0
    """Seconds that one step, save or validation may take, the first step three times as long.
    Then each rank logs its stacks, and the run fails (and is restarted). Before the first step,
    the limit is two hours without progress."""
    rendezvous: HostPort | None = None
    """`launcher: local` on several machines: `HOST:PORT` of one of them, with a name that
    all can resolve. Run `dmt launch` on each machine."""
    elastic: ElasticSection | None = None
    """`launcher: local`, `slurm` or `ray`: the run continues on the remaining machines when
    one is lost, and takes in others, e.g. `{min_nodes: 1, max_nodes: 4}`. It is planned again
    for each number, with the same global batch; `cluster.nodes` is the first number
    (docs/staying-alive.md)."""
    slurm: SlurmSection = SlurmSection()
    """For `launcher: slurm`."""
    kubernetes: KubernetesSection = KubernetesSection()
    """For `launcher: kubernetes`."""

    def most_nodes(self, nodes: int) -> int:
        """The most machines that ranks may be on, of a run that is planned for `nodes`."""
        return nodes if self.elastic is None else self.elastic.max_nodes


OBJECTIVE_SECTIONS = "dpo", "orpo"
"""Sections of objectives that have settings, under the objective's name."""


class KernelsSection(Section):
    """Implementations of parts of the model; results do not depend on them, up to rounding."""

    loss: LossKernel | Auto = "auto"
    """Logits and cross entropy for all tokens of a micro batch at once, for a part at a time
    (`chunked`: less memory), or by Liger's kernel. `auto`: whole if that fits."""
    attention: AttentionKernel | Auto = "auto"
    """torch's kernel that is tried first. `eager`: matrix products and a softmax. `varlen`:
    isolated documents without a mask. `auto`: eager for sinks and soft-capped scores, varlen
    for isolated documents, cuDNN's on Hopper."""
    compile: CompiledParts | Auto = "auto"
    """torch.compile of each decoder layer of transformers' models. `auto`: on GPUs, for
    families that the tests compile (docs/engines.md)."""
    fused: FusedKernels | Auto = "auto"
    """Fused kernels: megatron-core's SwiGLU in its dense models, or Liger's RMSNorm, SwiGLU and
    rotary positions in transformers' models on GPUs. `auto`: megatron-core's on GPUs."""
    experts: ExpertProducts | Auto = "auto"
    """Compute the experts of a rank in turn, or in one product per linear layer. `auto`:
    grouped on transformers' models, and where megatron-core's are small on Hopper and
    Blackwell."""
    context: Exchange | Auto = "auto"
    """With `parallel.context`, how its ranks exchange keys and values: `all_gather`, each rank
    gathers those of all positions; `ulysses`, all-to-all, each rank attends with a part of the
    heads."""
    fp8: Fp8Scaling | None = None
    """Matrix products of the decoder layers in 8-bit floats, on transformers' dense models
    (docs/optimizers.md). `rowwise`: one power-of-two scale for each row of an operand;
    `tensorwise`: one per operand, which depends on micro batch and layout; null: none."""


class Recipe(Section):
    """One training run, from model to logging."""

    name: Name
    """Names the run directory (`runs/<name>`) and the W&B run."""
    model: ModelSection
    adapter: AdapterSection | None = None
    data: DataSection
    training: TrainingSection
    dpo: DpoSection | None = None
    """With `training.objective: dpo` only."""
    orpo: OrpoSection | None = None
    """With `training.objective: orpo` only."""
    optimizer: OptimizerSection
    schedule: ScheduleSection = ScheduleSection()
    evaluation: EvaluationSection = EvaluationSection()
    parallel: ParallelSection = ParallelSection()
    kernels: KernelsSection = KernelsSection()
    cluster: ClusterSection = ClusterSection()
    checkpoint: CheckpointSection = CheckpointSection()
    guard: GuardSection = GuardSection()
    logging: LoggingSection = LoggingSection()
    launch: LaunchSection = LaunchSection()

    @model_validator(mode="wrap")
    @classmethod
    def _without_removed(cls, stated: Any, validate: Callable[[Any], "Recipe"]) -> "Recipe":
        """Recipes of old runs state every setting; null is what no setting is."""
        try:
            return validate(stated)
        except ValidationError:
            return validate(without_unset(stated))

    @property
    def follows_validation(self) -> dict[str, str]:
        """The settings that let a run depend on its validation losses, by dotted key; empty
        without any."""
        stopping, best = self.evaluation.patience, self.checkpoint.keep_best
        found = {"schedule.name": "plateau"} if self.schedule.name == "plateau" else {}
        if stopping is not None:
            found["evaluation.patience"] = str(stopping)
        return found | ({"checkpoint.keep_best": str(best)} if best is not None else {})

    def total_steps(self) -> int | None:
        """Optimizer steps of the run; None where it is given in epochs."""
        return self.training.total_steps()

    @property
    def notes(self) -> Iterator[str]:
        """Remarks on settings that are legal and may not be meant."""
        steps, warmup = self.total_steps(), self.schedule.warmup_steps
        if steps is not None and warmup > steps:
            yield f"schedule.warmup_steps: the run's {steps} steps end in a warm-up of {warmup}"
        if self.adapter is not None and self.model.init == "random":
            yield "adapter: the weights that it adapts are drawn at random and stay so"
        rate, kind = self.optimizer.learning_rate, self.optimizer.kind
        if rate > max(1.0, kind.largest_rate):
            yield f"optimizer.learning_rate: {rate:g} is far above what {kind.title} uses"

    def objective(self) -> Objective:
        """The objective, with the settings of its section."""
        name = self.training.objective
        section = getattr(self, name) if name in OBJECTIVE_SECTIONS else None
        return OBJECTIVES[name](**(section.model_dump() if section else {}))
