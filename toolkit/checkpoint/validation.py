"""The validation losses of a run, as far as its later steps depend on them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class PlateauState:
    """State of `schedule.name: plateau` between two validations: the numbers of torch's
    ReduceLROnPlateau, under its names."""

    learning_rate: float
    peak: float
    """The `optimizer.learning_rate` that it was reduced from."""
    best: float | None = None
    """None if no validation had a finite loss."""
    num_bad_epochs: int = 0


@dataclass(frozen=True)
class ValidationHistory:
    """The last validation, the best one, and what follows from all of them."""

    step: int = 0
    """Step of the last validation. 0 before the first."""
    loss: float | None = None
    """Loss of the last validation. None if it was not finite."""
    best_step: int = 0
    best_loss: float | None = None
    """The lowest one, and the first step that had it."""
    without_improvement: int = 0
    """Validations, the last one included, since the lowest one."""
    plateau: PlateauState | None = None
    """None before the first validation that it counts."""

    def after(self, step: int, loss: float) -> "ValidationHistory":
        """The history after a validation at `step`. Its `plateau` is left to the schedule."""
        finite, best = math.isfinite(loss), self.best_loss
        lower = finite and (best is None or loss < best)
        return replace(
            self,
            step=step,
            loss=loss if finite else None,
            best_step=step if lower else self.best_step,
            best_loss=loss if lower else best,
            without_improvement=0 if lower else self.without_improvement + 1,
        )

    def loss_at(self, step: int) -> float | None:
        """The validation loss of a checkpoint of `step` with this history, if it has one."""
        return self.loss if self.step == step else None

    def ends_run(self, patience: int | None) -> bool:
        """Whether a run with this `evaluation.patience` stops here."""
        return patience is not None and self.without_improvement >= patience

    @property
    def reason(self) -> str:
        """Why a run stops early, for people."""
        best = "" if self.best_loss is None else f"; the lowest is {self.best_loss:.6g}"
        since = f" of step {self.best_step}" if best else ""
        times = self.without_improvement
        count = "the last validation" if times == 1 else f"{times} validations in a row"
        return f"no improvement in {count}{best}{since}"


def lowest(losses: Sequence[tuple[float | None, int]], count: int) -> set[int]:
    """The steps of the `count` lowest of these validation losses. The first of equal ones."""
    known = sorted((loss, step) for loss, step in losses if loss is not None)
    return {step for _, step in known[:count]}
