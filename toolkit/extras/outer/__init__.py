"""The outer loop of DiLoCo (arXiv:2311.08105): replicas of a run train on their own and
exchange weights every few steps.

A replica is a run with its own ranks and run directory. A *holder*, in the role of a parameter
server, has the weights and the outer momentum: it is the `dmt launch` that starts replica 0. Of
each replica, rank 0 alone is connected to it. No engine, launcher or checkpoint knows of it.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from toolkit.features.base import Feature
from toolkit.recipe.section import (
    Count,
    Fraction,
    NonEmpty,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
)


class LinkSection(Section):
    """The link between sites, for the planner's prediction."""

    gigabits_per_s: PositiveFloat = 1.0
    """Bandwidth of a site, in each direction."""
    latency_ms: NonNegativeFloat = 30.0
    """Time of one message on its way."""


class OuterSection(Section):
    """Replicas that train on their own between exchanges of weights (DiLoCo)."""

    replicas: Annotated[int, Field(ge=2, le=1024)]
    """Number of replicas, each with the machines of `cluster`. Every one trains its own part,
    of equal size, of each global batch."""
    batch: Literal["all", "each"] = "all"
    """Whose samples `training.global_batch_size`, `training.tokens` and `evaluation.batches`
    count: those of `all` replicas, or of `each`, as in recipes of their run directories."""
    every_steps: Positive = 100
    """Inner steps between two exchanges. `checkpoint.every_steps` must be a multiple."""
    optimizer: Literal["nesterov", "sgd", "average"] = "nesterov"
    """What applies the outer gradient, the weights before a round minus the mean of those after
    it: SGD with Nesterov's momentum (DiLoCo's), with heavy-ball momentum, or just the mean."""
    learning_rate: PositiveFloat | None = None
    """Outer learning rate, not with `average`; null: 0.7."""
    momentum: Fraction | None = None
    """Outer momentum, not with `average`; null: 0.9."""
    overlap: Literal["none", "delayed"] = "none"
    """`none`: a round ends when all replicas have handed in theirs. `delayed`: asynchronous
    updates: they are sent while the next round trains, and applied as they arrive."""
    staleness: Positive | None = None
    """With `delayed` only: how many rounds a replica may have handed in more than the slowest;
    null: 2."""
    compress: Literal["none", "int8"] = "none"
    """`int8`: changes of weights are sent to the holder in 8 bits, with a scale per 1024."""
    replica: Count | None = None
    """Which replica this is, from 0; null: `dmt launch` starts all of them on this machine."""
    holder: NonEmpty | None = None
    """HOST:PORT of the holder, which `dmt launch` of replica 0 starts and binds to it. null: a
    free port of this machine's loopback device."""
    link: LinkSection = LinkSection()

    @property
    def factors(self) -> tuple[float, float]:
        """Outer learning rate and momentum."""
        if self.optimizer == "average":
            return 1.0, 0.0
        rate = 0.7 if self.learning_rate is None else self.learning_rate
        return rate, 0.9 if self.momentum is None else self.momentum

    def shared(self, training: Section) -> dict[str, Any]:
        """What is the same for all replicas of a run, which have this `training`."""
        own = self.model_dump(exclude={"replica", "holder", "link"})
        found = {f"parallel.outer.{name}": value for name, value in own.items()}
        # Of another seed, the first weights and the order of samples would be others.
        alike = ("global_batch_size", "seed")
        return {**found, **{f"training.{name}": getattr(training, name) for name in alike}}

    @property
    def steps_ahead(self) -> int:
        """`staleness` in inner steps."""
        return (self.staleness or 2) * self.every_steps


_RULES = "toolkit.extras.outer.rules"

FEATURE = Feature(
    name="outer",
    section=OuterSection,
    under="parallel",
    check=f"{_RULES}:problems",
    reads=(
        "training",
        "checkpoint",
        "data",
        "schedule.name",
        "evaluation.early_stopping",
        "evaluation.batches",
        "parallel.zero",
    ),
    resolve=f"{_RULES}:of_replica",
    ledger=f"{_RULES}:ledger",
    reasons=f"{_RULES}:reasons",
    rehearse=f"{_RULES}:rehearsed",
    order="toolkit.extras.outer.engine:order",
    attach="toolkit.extras.outer.engine:attach",
    launch="toolkit.extras.outer.launch:instead",
    excludes=frozenset({"scripts", "trials"}),
)
