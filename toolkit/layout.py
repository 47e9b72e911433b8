"""Layout: how a global batch and a model are spread over ranks, and its arithmetic."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

EngineName = str
"""One of `ENGINES.names`."""
ModelName = Literal["hf", "megatron"]
Precision = Literal["fp32", "bf16", "fp16"]
DTYPES: Mapping[str, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""torch's name of what a precision computes in."""
Fp8Scaling = Literal["rowwise", "tensorwise"]
"""How operands of products in 8 bits are scaled: `KernelsSection.fp8`."""
CostPrecision = Literal["fp32", "bf16", "fp16", "fp8"]
"""Precisions that the cost model knows. Published runs computed in fp8."""
Stage = Literal[0, 1, 2, 3]
Placement = Literal["none", "cpu", "nvme"]
RecomputeWay = Literal["none", "selective", "full"]
Recompute = RecomputeWay | int
"""Of each layer nothing, attention, or everything; or everything of the first so many layers of
each pipeline chunk, of the model where there is no pipeline."""
LossKernel = Literal["whole", "chunked", "liger"]
AttentionKernel = Literal["sdpa", "cudnn", "flash", "varlen", "eager"]
CompiledParts = Literal["none", "layers"]
FusedKernels = Literal["none", "megatron", "liger"]
ExpertProducts = Literal["sequential", "grouped"]
Exchange = Literal["all_gather", "ulysses"]
"""How the ranks of a context group exchange keys and values (models/context/)."""

_CHUNK_LOGITS = 2**26
"""A quarter of a GiB in fp32. At its peak, a loss holds some such copies."""


class Pair(NamedTuple):
    """An engine and the model implementation that it trains."""

    engine: EngineName
    model: ModelName

    def __str__(self) -> str:
        return f"engine {self.engine} with model {self.model}"


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism and batch split. `world = dp · tp · pp · cp`."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    zero_stage: Stage = 0
    replicate: int = 1
    """Number of replicas of the sharded model (FSDP2's hybrid sharding). It divides dp · cp."""
    offload_optimizer: Placement = "none"
    offload_parameters: Placement = "none"
    recompute: Recompute = "none"
    loss: LossKernel = "whole"
    """Logits and loss of a micro batch at once, or of some of its tokens at a time."""
    compile: CompiledParts = "none"
    """What torch.compile compiles: each decoder layer, or nothing."""
    fused: FusedKernels = "none"
    """The fused kernels in use."""
    experts: ExpertProducts = "sequential"
    """Whether a rank's experts are computed in turn, or all at once."""
    exchange: Exchange = "all_gather"
    """Exchange of context parallel. Without it, none takes place."""
    micro_batch: int = 1
    gradient_accumulation: int = 1
    shares: tuple[int, ...] = ()
    """Samples of a micro batch on each data-parallel rank, where they differ. `micro_batch` is
    then the largest. Empty: `micro_batch` on every rank."""
    stages: tuple[int, ...] = ()
    """Layers of each of the pp · vpp model chunks, in model order. Empty: `stage_layers`'."""

    @property
    def compiles(self) -> str | None:
        """The setting of `kernels` that makes torch or Triton compile in a run."""
        return next((one for one in ("compile", "fused") if getattr(self, one) != "none"), None)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def global_batch(self) -> int:
        """Sequences per optimizer step over all ranks."""
        return self.gradient_accumulation * self.round_samples

    @property
    def round_samples(self) -> int:
        """Samples of one micro batch of every data-parallel rank."""
        return sum(self.shares) or self.micro_batch * self.dp

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """Samples of a micro batch of each data-parallel rank."""
        return self.shares or (self.micro_batch,) * self.dp

    @property
    def division(self) -> tuple[int, int, tuple[int, ...]]:
        """The settings that decide which layers a pipeline stage has: see `stage_layers`."""
        return self.pp, self.vpp, self.stages

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, without what is empty."""
        return {name: value for name, value in asdict(self).items() if value != ()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Layout":
        """The layout that `to_dict` wrote."""
        fields: dict[str, Any] = dict(data)
        lists = {name: tuple(one) for name, one in fields.items() if isinstance(one, list)}
        return cls(**{**fields, **lists})

    @property
    def context_groups(self) -> list[list[int]]:
        """The ranks of each context group, in the order of their positions."""
        ranks, block = range(self.world), self.tp * self.cp
        return [
            [*ranks[first + tensor : first + block : self.tp]]
            for first in ranks[::block]
            for tensor in range(self.tp)
        ]

    def data_rank(self, rank: int) -> int:
        """The data-parallel rank of `rank`, which fixes the samples that it trains on.

        Ranks are numbered as megatron-core does by default: tensor fastest, then context,
        data and pipeline, so that a tensor group lies within a node.
        """
        return rank // (self.tp * self.cp) % self.dp

    def token_rank(self, rank: int) -> int:
        """Which tokens of a global batch `rank` computes: in a context group, some of the
        positions of the same samples."""
        return rank // self.tp % (self.dp * self.cp)

    def model_rank(self, rank: int) -> int:
        """Which part of the model `rank` holds: ranks of equal number are replicas.

        Within a pipeline stage, tensor-parallel and expert-parallel ranks both count from
        its first rank, because experts themselves are not split once `ep` is above 1.
        """
        parts = math.lcm(self.tp, self.ep)
        stage, place = divmod(rank, self.tp * self.cp * self.dp)
        return stage * parts + place % parts


def recomputed_layers(recompute: Recompute, layers: int) -> int:
    """How many layers of a chunk are recomputed as a whole: the first ones."""
    if isinstance(recompute, int):
        return min(recompute, layers)
    return layers if recompute == "full" else 0


def padded_vocab(vocab: int, tp: int) -> int:
    """Rows of the embedding when `tp` ranks hold equal parts: the next multiple of `tp`."""
    return -(-vocab // tp) * tp


def loss_chunks(kernel: LossKernel, tokens: int, vocab: int, tp: int = 1) -> int:
    """In how many chunks a rank computes the loss of a micro batch of so many tokens."""
    logits = tokens * padded_vocab(vocab, tp) // tp
    return 1 if kernel == "whole" else max(2, -(-logits // _CHUNK_LOGITS))


@lru_cache(maxsize=4096)
def stage_layers(
    layers: int, pp: int, vpp: int, stages: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """Number of layers of each of the pp · vpp model chunks, in model order.

    Chunk `virtual_stage · pp + pp_rank` belongs to pipeline rank `pp_rank`. Chunks differ
    by one layer at most, and so do pipeline ranks. What does not divide goes to the chunks
    in the middle, in order; then to the first, which holds the embedding, and never to the
    last, which holds the larger output head. Needs at least one layer per chunk. `stages`: a
    layout's own division.
    """
    if stages:
        return stages
    count = pp * vpp
    assert 1 <= count <= layers, "refused at check"
    share, rest = divmod(layers, count)
    sizes = [share] * count
    for chunk in [*range(1, count - 1), 0][:rest]:
        sizes[chunk] += 1
    return tuple(sizes)
