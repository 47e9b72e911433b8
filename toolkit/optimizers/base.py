"""An optimizer's description: everything about it but its arithmetic, in one object without
torch.

The update rule and the plain reference of a rehearsal are named as `module:attribute` and
imported where they run. Another package adds an optimizer by an entry point in the group
`dmt.optimizers`. `tests/toy/toy_optimizer.py` is a complete one.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from toolkit.registry import Registry

Shape = tuple[int, ...]

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's first and second moment: fp32, in the form of their tensor."""


EXCHANGED_AT_ONCE = 1 << 28
"""Elements of its shards, of whole tensors and of copies for their holders that a rank
exchanges at once; those of a single tensor may be more."""


class Quantity(NamedTuple):
    """How a state of a checkpoint tensor is stored."""

    dtype: str = "float32"
    shape: Callable[[Shape], Shape] = lambda shape: shape
    """The shape of the state, from that of the tensor."""

    def nbytes(self, shape: Shape) -> int:
        """Bytes of the state of a tensor of this shape."""
        return prod(self.shape(shape)) * (1 if self.dtype == "uint8" else 4)


@dataclass(frozen=True, eq=False)
class WholeTensors:
    """Updates of whole checkpoint tensors, each computed by one rank, its owner
    (`engines/owners.py`). Shapes are [rows, columns] or [elements]."""

    rule: str
    """The class of its `UpdateRule`."""
    takes: Callable[[str, int], bool] = lambda _tensor, _dimensions: True
    """Whether it updates a tensor of this name. The engine's AdamW updates all others."""
    moments: tuple[str, ...] = ()
    """The moments of `MOMENTS` that every holder of a tensor keeps for its elements."""
    quantities: Mapping[str, Quantity] = field(default_factory=dict)
    """Further states that it stores, by their names in checkpoints."""
    owned: Callable[[Shape], tuple[str, ...]] = lambda _shape: ()
    """The states that the owner of a tensor keeps: `quantities`, or whole `MOMENTS`."""
    sent: str = "float32"
    """The dtype in which gradients are sent to the owner, and updates back."""
    by_replicas: bool = True
    """Whether ranks that all hold a whole tensor each update it. That costs less than sending
    it."""

    @property
    def sent_bytes(self) -> int:
        """Bytes per element sent."""
        return 4 if self.sent == "float32" else 2

    def states(self, shape: Shape) -> dict[str, Quantity]:
        """The states of the owner of a tensor of this shape, by name."""
        return {name: self.quantities.get(name, Quantity()) for name in self.owned(shape)}

    def owner_bytes(self, shape: Shape) -> int:
        """Bytes of the owner's states."""
        return sum(state.nbytes(shape) for state in self.states(shape).values())


class Trained(NamedTuple):
    """A parameter of the plain reference of a rehearsal."""

    name: str
    """The first of its tensors in the checkpoint."""
    group: dict[str, Any]
    """`params`, `lr` and `weight_decay`, as torch's optimizers take them: the parameter, or its
    checkpoint tensors, where `whole` and transformers stacks them."""
    vector: bool
    embedding: bool


@dataclass(frozen=True, eq=False)
class OptimizerKind:
    """An optimizer that `optimizer.name` chooses."""

    title: str
    """The name that users know."""
    reference: str
    """The function (settings, list of `Trained`) → list of torch's optimizers, for one process
    and by other means than the `rule`."""
    whole: WholeTensors | None = None
    """None if the optimizer is every engine's own AdamW."""
    unused: tuple[str, ...] = ()
    """Settings of `optimizer` that this one does not read."""
    aliases: tuple[str, ...] = ()
    """Other tools' names of it, in lowercase letters. Errors suggest it instead."""
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    """The name in other tools' configurations (`deepspeed.json`,
    `TrainingArguments`). One that is missing cannot state it."""
    packages: tuple[str, ...] = ()
    """Distributions that it needs."""
    no_adapter: str = ""
    """Why it does not train adapters. Empty if it does."""
    largest_rate: float = 3e-4
    """`dmt rehearse` lowers the rate to this, because larger steps amplify rounding. In ten
    steps of AdamW, 3e-3 turned 1e-7 into 3e-5. So did 1e-3 with experts, whose routing
    jumps."""
    approximated: tuple[str, str] | None = None
    """Entry of a plan's ledger (what, why): which numbers are rounded."""
    amplified: tuple[str, str] | None = None
    """One that shows only where layouts' gradients differ in the last digit."""
    gives_up: str = ""
    """What a run loses by changing from AdamW to this optimizer in order to fit."""


ADAMW = OptimizerKind(
    title="AdamW",
    reference="toolkit.rehearse.reference:adamw",
    aliases=("adam", "adamw_torch", "adamw_torch_fused", "adamw_hf", "fusedadam"),
    elsewhere={"deepspeed.json": "AdamW", "TrainingArguments": "adamw_torch"},
)
"""`optimizer.name: adamw`: every engine has its own (`engines/adamw.py`)."""

OPTIMIZERS: Registry[OptimizerKind] = Registry(
    "dmt.optimizers",
    {
        "adamw": "toolkit.optimizers.base:ADAMW",
        "adamw_8bit": "toolkit.extras.optimizers.adamw_8bit:ADAMW_8BIT",
        "muon": "toolkit.optimizers.muon:MUON",
    },
)
"""Every optimizer by its name. Other packages add theirs as entry points."""

LAYER = re.compile(r"(?:^|\.)(\d+)\.")
"""Names of what is in a decoder layer have its number, and only those."""
_EMBEDDING = re.compile(r"(^|[._])(\w*emb(ed(?!_out)\w*)?|wte|wpe|w)\b")
_MATRIX = re.compile(r"(?:.*\.)?\d+\.(?:.*\.weight|.*_proj)")
"""What is called `…_proj` itself is one expert's slice of a stack."""


def is_embedding(tensor: str) -> bool:
    """Whether this checkpoint tensor is an embedding, of tokens or positions."""
    return LAYER.search(tensor) is None and _EMBEDDING.search(tensor) is not None


def is_layer_matrix(tensor: str, dimensions: int) -> bool:
    """Whether this checkpoint tensor is the weight of a linear layer inside a decoder layer.

    These are Muon's (https://kellerjordan.github.io/posts/muon, arXiv:2502.16982, section 2):
    all projections, experts and routers. Embeddings, head, norms and biases are AdamW's. So are
    norms with a weight [heads, elements], and convolutions that are stored as matrices.
    """
    if dimensions != 2 or _MATRIX.fullmatch(tensor) is None:
        return False
    module = tensor.rsplit(".", 2)[-2]
    return "norm" not in module and "conv" not in module
