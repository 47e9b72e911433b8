"""The data section of a recipe, built, and a tokenizer."""

from collections.abc import Iterable
from contextlib import chdir
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from toolkit.data.build import TrainingData, build_data
from toolkit.data.tokenizers import END_OF_TEXT
from toolkit.recipe.schema import DataSection, TrainingSection


def built(
    base: Path,
    section: dict[str, Any],
    length: int,
    batch: int = 1,
    seed: int = 1,
    vocab_size: int | None = 257,
) -> TrainingData:
    """Samples of `length` tokens in batches of so many; relative paths start at `base`."""
    training = TrainingSection(sequence_length=length, global_batch_size=batch, seed=seed)
    with chdir(base):
        return build_data(DataSection.model_validate(section), training, vocab_size)


def train_bpe(
    documents: Iterable[str], vocab_size: int, folder: Path
) -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on `documents`, saved to `folder`."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[END_OF_TEXT],
        show_progress=False,
    )
    backend.train_from_iterator(documents, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )
    tokenizer.save_pretrained(folder)
    return tokenizer
