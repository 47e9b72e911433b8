"""The progress of a run: everything that is needed to resume it."""

from dataclasses import dataclass, field

from toolkit.checkpoint.manifest import Manifest
from toolkit.checkpoint.validation import ValidationHistory
from toolkit.engines.base import StepResult
from toolkit.train.loss_guard import HISTORY_STEPS


@dataclass
class Progress:
    """The progress of a run."""

    step: int = 0
    """Optimizer steps done."""
    consumed_samples: int = 0
    """Sequences consumed since step 0."""
    recent_losses: tuple[float, ...] = ()
    """Losses of the last steps that were not skipped, for spike detection."""
    consumed_tokens: int | None = 0
    """Unmasked tokens of `consumed_samples`. None if an older checkpoint did not count them."""
    validation: ValidationHistory = field(default_factory=ValidationHistory)
    """State of the validations done, as far as steps to come depend on them."""

    def continue_at(self, saved: Manifest) -> None:
        """Take the progress of a checkpoint."""
        self.step, self.consumed_samples = saved.step, saved.consumed_samples
        self.recent_losses, self.consumed_tokens = saved.recent_losses, saved.consumed_tokens
        self.validation = saved.validation

    def advance(self, result: StepResult, samples: int, tokens: int) -> None:
        """Advance by one step, skipped or not."""
        self.step += 1
        self.consumed_samples += samples
        if self.consumed_tokens is not None:
            self.consumed_tokens += tokens
        if result.skipped is None:
            self.recent_losses = (*self.recent_losses, result.loss)[-HISTORY_STEPS:]
