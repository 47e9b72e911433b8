"""The plan of a recipe: how it runs, and why. `plan/planner.py` decides it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from toolkit.layout import AttentionKernel, EngineName, Layout, ModelName
from toolkit.models.model import Attention
from toolkit.recipe.batch_sizes import BatchSizes


@dataclass(frozen=True)
class Remedy:
    """A change with which something fits."""

    gives_up: str
    """What the run loses by the change."""
    options: str
    """Options of `dmt plan` and `dmt launch`."""
    memory_gib: float
    """Memory of the fullest GPU, with the best layout that fits then."""
    host_gib: float
    """Host memory of a node."""
    step_s: float
    layout: str
    """The best layout that fits then."""


@dataclass(frozen=True)
class Plan:
    """How a recipe runs, and why."""

    engine: EngineName
    model: ModelName
    layout: Layout
    parameters: int
    """Parameters of the model."""
    flops_per_token: float
    """Training FLOPs per token, attention counted as masked. The numerator of MFU."""
    peak_flops_per_gpu: float | None
    """Peak of one device in the recipe's precision. None where it is unknown."""
    model_states_gib: float
    """Parameters, gradients and optimizer states on the fullest device, in GiB."""
    reasons: tuple[str, ...]
    """One line per decision."""
    memory_gib: float | None = None
    """Predicted peak of the fullest device. None in plans of releases before this one."""
    fits: bool = True
    """Whether device, host and disks hold it."""
    step_time_s: float | None = None
    """Predicted seconds of one optimizer step."""
    tokens_per_s_per_gpu: float | None = None
    mfu: float | None = None
    """Predicted model FLOPs utilization, attention counted as masked. None on a CPU."""
    trainable_parameters: int | None = None
    """Parameters that train. None in plans of releases before this one, where all do."""
    attention: Attention | None = None
    """What computes attention in every engine and model implementation. None in plans of
    releases before this one."""
    attention_kernel: AttentionKernel = "sdpa"
    """Which of torch's kernels for `sdpa` is tried first."""
    loss_scale: float | None = None
    """Initial loss scale of fp16, for the mean loss over a rank's tokens of a step. Otherwise
    None."""
    remedies: tuple[Remedy, ...] = ()
    """If nothing fits: the changes with which something does."""

    def run_s(self, batches: BatchSizes, steps: int) -> float | None:
        """Predicted seconds of the first `steps` steps, of which smaller ones count as their
        share of the largest. None where the plan predicts none."""
        if self.step_time_s is None:
            return None
        return self.step_time_s * batches.samples(steps) / self.layout.global_batch

    @property
    def frozen_parameters(self) -> int:
        """Parameters that do not train."""
        trained = self.trainable_parameters
        return 0 if trained is None else self.parameters - trained

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `plan.json`."""
        return asdict(self) | {"layout": self.layout.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Plan":
        """The plan that `to_dict` wrote."""
        known = cls.__dataclass_fields__
        fields = {key: value for key, value in data.items() if key in known}
        return cls(
            **{
                **fields,
                "layout": Layout.from_dict(fields["layout"]),
                "reasons": tuple(fields["reasons"]),
                "remedies": tuple(Remedy(**one) for one in fields.get("remedies", ())),
            }
        )
