"""The training documents as text, for training a tokenizer on them."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.data.files import cache_folder
from toolkit.data.sources import Documents, open_source
from toolkit.data.split import held_out_documents
from toolkit.errors import DataError
from toolkit.recipe.schema import DataSection, HfSource, MegatronSource, TextSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_MEASURED_DOCUMENTS = 200
_MEASURED_CHARACTERS = 2**17


@dataclass(frozen=True)
class TrainingCorpus:
    """The texts of the recipe's training documents, without those held out for validation."""

    parts: tuple[tuple[Documents, frozenset[int]], ...]
    """Documents of each source, and the numbers, among those with text, that are left out."""

    def __iter__(self) -> Iterator[str]:
        for documents, held_out in self.parts:
            for number, text in enumerate(filter(None, documents)):
                if number not in held_out:
                    yield text


def open_training_corpus(data: DataSection, *, seed: int, base: Path) -> TrainingCorpus:
    """The training documents of a recipe. Relative paths start at `base`.

    Raises DataError when there are none: data that is tokenised already, or chats.
    """
    parts = []
    for source in data.sources:
        if not isinstance(source, TextSource | HfSource):
            what = "tokenised already"
            if not isinstance(source, MegatronSource):
                what = "chats, not documents"
            raise DataError(
                f"`data.train` is {what} (`kind: {source.kind}`): there is no text to train "
                "a tokenizer on",
                fix="use a recipe whose `data.train` is of `kind: text` or `kind: hf`",
            )
        documents = open_source(source, base=base, cache=cache_folder(data.cache, base))
        held_out: frozenset[int] = frozenset()
        if data.validation is None and data.validation_fraction > 0:
            n_documents = sum(1 for _ in filter(None, documents))
            numbers = held_out_documents(n_documents, data.validation_fraction, seed)
            held_out = frozenset(numbers.tolist())
        parts.append((documents, held_out))
    return TrainingCorpus(tuple(parts))


def bytes_per_token(tokenizer: "PreTrainedTokenizerFast", corpus: TrainingCorpus) -> float:
    """UTF-8 bytes per token, over the beginning of `corpus`."""
    texts = [text[:_MEASURED_CHARACTERS] for text in islice(corpus, _MEASURED_DOCUMENTS)]
    n_tokens = sum(len(tokens) for tokens in tokenizer(texts)["input_ids"])
    return sum(len(text.encode()) for text in texts) / n_tokens
