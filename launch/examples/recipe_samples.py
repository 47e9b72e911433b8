"""The recipe's training data as a torch data set, in the order that the recipe fixes."""

from torch import Tensor, from_numpy
from torch.utils.data import Dataset

from toolkit.data.build import build_data
from toolkit.errors import DataError
from toolkit.intake.checks import steps_with
from toolkit.models.huggingface import build_config
from toolkit.recipe.schema import Recipe


class RecipeSamples(Dataset[dict[str, Tensor]]):
    """Every sample of the run, one after the other: do not shuffle them.

    Samples [k · global batch, (k + 1) · global batch) are those of step k of `dmt launch`. An
    item has int64 tensors [sequence length]: `input_ids`, and the token that follows each of
    them as `shift_labels` (transformers' name) and `labels`, -100 where no loss is taken.
    """

    def __init__(self, recipe: Recipe) -> None:
        """Tokenise the data, or find it in the cache; one process does.

        Raises DataError as `build_data` does, for pairs, and for isolated documents: only the
        mask and kernel of our own forward pass isolate them.
        """
        if recipe.data.isolates or recipe.data.kind == "preference":
            raise DataError(
                "the recipe isolates the documents or conversations of a row, or has pairs: "
                "a forward pass outside `dmt launch` may silently mix them",
                fix="set data.isolate_documents to false and data.packing to none, use data of "
                "`kind: chat`, or train with `dmt launch`",
            )
        data = build_data(recipe.data, recipe.training, build_config(recipe.model).vocab_size)
        self.steps = steps_with(recipe, data.samples_per_epoch)
        """Optimizer steps of the run."""
        self.order, self.rows = data.order, data.train.rows
        self.length = recipe.training.batches.samples(self.steps)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        if not 0 <= place < self.length:
            raise IndexError(place)
        (row,) = self.rows(int(self.order.indices(place, 1)[0]))
        tokens, following = from_numpy(row.input_ids), from_numpy(row.labels)
        return {"input_ids": tokens, "labels": following, "shift_labels": following}
