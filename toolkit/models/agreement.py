"""Compares the logits of two models that should be equal up to rounding."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.errors import RunFailed

if TYPE_CHECKING:
    from torch import Tensor

TOKENS = (2, 32)
"""Sequences and their length."""
TOLERANCE = 1e-4
"""Largest accepted difference, relative to the largest logit where that is above 1."""


def same_tokens(vocabulary: int, length: int) -> "Tensor":
    """The tokens that both models read: int64 [sequences, length]."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocabulary, (TOKENS[0], length), generator=generator)


def huggingface_logits(folder: Path, tokens: "Tensor") -> "Tensor":
    """Logits of transformers' model: fp32 [sequences, length, vocabulary]."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
    )
    # The grouped matrix products that are the default need 16-byte strides on CPUs.
    model.config._experts_implementation = "eager"
    with torch.no_grad():
        logits: Tensor = model.eval()(input_ids=tokens, use_cache=False).logits
    return logits


@dataclass(frozen=True)
class Agreement:
    """What was found; `--json` prints these fields."""

    max_abs_difference: float
    largest_logit: float
    bound: float

    @classmethod
    def of(
        cls, expected: "Tensor", found: "Tensor", tolerance: float = TOLERANCE
    ) -> "Agreement":
        """From logits of the same shape."""
        largest = expected.abs().max().item()
        difference = (found - expected).abs().max().item()
        return cls(difference, largest, tolerance * max(1.0, largest))

    def check(self, written: Path, source: Path) -> None:
        """Raise RunFailed if `written` computes something different from `source`."""
        if not self.max_abs_difference <= self.bound:
            raise RunFailed(
                f"{written} is written, but its logits differ from those of {source} by "
                f"{self.max_abs_difference:.2e}; at most {self.bound:.2e} is rounding",
                fix="do not use it, and report the model's config.json",
            )

    def __str__(self) -> str:
        found = f"largest difference {self.max_abs_difference:.1e} (bound {self.bound:.1e})"
        return f"logits agree: {found}"
