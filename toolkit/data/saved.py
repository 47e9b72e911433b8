"""Folders that `save_to_disk` of `datasets` wrote: which of their files hold a split."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from toolkit.data.remote.store import shown
from toolkit.errors import DataError
from toolkit.recipe.schema import RowsSource

SAVED = ("state.json", "dataset_dict.json")
"""What `save_to_disk` of `datasets` writes into a folder of one split, or of several."""
_FileName = Annotated[str, Field(pattern=r"^[^./][^/]*$")]
"""In a folder, never outside."""


class _File(BaseModel):
    filename: _FileName


class _State(BaseModel):
    files: Annotated[list[_File], Field(alias="_data_files")]
    split: Annotated[str | None, Field(alias="_split")] = None


class _Splits(BaseModel):
    splits: list[_FileName]


def saved_files(
    source: RowsSource, content_of: Callable[[str], bytes]
) -> tuple[str, list[str]]:
    """The folder of the split in one that `save_to_disk` wrote, and the files there that hold
    it. `content_of` a file by its place in the folder, empty if there is none.

    Raises DataError where the folder states anything else, such as a file outside.
    """
    state, splits = SAVED
    part = ""
    try:
        if text := content_of(splits):
            names = _Splits.model_validate_json(text).splits
            part = of_split(source, {name: name for name in names})
        saved = _State.model_validate_json(content_of(f"{part}/{state}".lstrip("/")))
    except ValidationError as error:
        first = error.errors()[0]
        raise DataError(
            f"`{shown(source.path)}` is not what `save_to_disk` writes "
            f"({'.'.join(map(str, first['loc'])) or state}: {first['msg']})",
            fix="copy or save the folder again",
        ) from error
    if not part:
        of_split(source, {saved.split or "train": part})
    return part, [f"{part}/{file.filename}".lstrip("/") for file in saved.files]


def of_split(source: RowsSource, splits: Mapping[str, Any]) -> Any:
    """What `splits` has for the source's. Raises DataError where that is not one of them."""
    if source.split not in splits:
        raise DataError(
            f"`split: {source.split}` is given, but `{source.path}` was saved with "
            f"{', '.join(map(str, splits)) or 'none'}",
            fix="name a whole split of it; slices are for files and hub ids that are not "
            "streamed",
        )
    return splits[source.split]
