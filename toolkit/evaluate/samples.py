"""Completions of fixed prompts: what a recipe states of them."""

from typing import Annotated

from pydantic import Field

from toolkit.evaluator import Evaluator, EvaluatorSection
from toolkit.recipe.section import NonEmpty, Positive


class SamplesSection(EvaluatorSection):
    """Prompts that the exported weights complete, by greedy decoding."""

    prompts: Annotated[tuple[NonEmpty, ...], Field(min_length=1, strict=False)]
    """Texts to complete."""
    max_tokens: Positive = 64
    """Tokens of a completion, at most."""
    chat: bool = False
    """Each prompt is a user's turn of the tokenizer's chat template, and is answered."""

    @property
    def can_lack_something(self) -> bool:
        """A chat template."""
        return self.chat


SAMPLES = Evaluator(
    "samples",
    SamplesSection,
    evaluate="toolkit.evaluate.completions:evaluate",
    prepare="toolkit.evaluate.completions:prepare",
    event="samples",
)
