"""The recipe's training data as a torch data set, in the order that the recipe fixes."""

import torch
from torch import Tensor
from torch.utils.data import Dataset

from toolkit.data.build import recipe_data
from toolkit.errors import DataError
from toolkit.intake.checks import steps_with
from toolkit.models.huggingface import build_config
from toolkit.recipe.schema import Recipe


class TrainingSamples(Dataset[dict[str, Tensor]]):
    """Every sample of the run, one after the other: do not shuffle them.

    Samples [k · global batch, (k + 1) · global batch) are those of `dmt launch`'s step k,
    whatever the number of processes. An item has int64 tensors [sequence length]:
    `input_ids`, and the token that follows each of them as `shift_labels`, -100 where no
    loss is taken. That is transformers' name for labels that a model must not shift once
    more; `labels` is the same tensor, because its models and Trainer look for both names.
    """

    def __init__(self, recipe: Recipe) -> None:
        """Tokenise the data of `recipe`, or find it in the cache; one process does.

        Raises DataError as `build_data` does; where the recipe isolates the documents of a row,
        which depends on the mask, the cache and the kernel of a forward pass that is not ours;
        and for preferences.
        """
        if recipe.data.isolates:
            raise DataError(
                "the recipe isolates the documents or conversations of a row, which a forward "
                "pass outside `dmt launch` may silently undo",
                fix="set data.isolate_documents to false and data.packing to none, or train "
                "with `dmt launch`",
            )
        if recipe.data.kind == "preference":
            raise DataError(
                "pairs of preferences need DMT's own training loop",
                fix="use data of `kind: chat`, or `dmt launch`",
            )
        data = recipe_data(recipe, build_config(recipe.model).vocab_size)
        self._packed = data.train
        self._order = data.order
        self.steps = steps_with(recipe, data.samples_per_epoch, data.ends_after)
        """Optimizer steps of the run."""
        self._length = recipe.training.batches.samples(self.steps)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        if not 0 <= place < self._length:
            raise IndexError(place)
        (index,) = self._order.indices(place, 1)
        (row,) = self._packed.rows(int(index))
        tokens, following = map(torch.from_numpy, (row.input_ids, row.labels))
        return {"input_ids": tokens, "labels": following, "shift_labels": following}
