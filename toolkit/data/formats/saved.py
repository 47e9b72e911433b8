"""Folders that `save_to_disk` of `datasets` wrote: which of their files hold a split."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from toolkit.data.formats.base import Format
from toolkit.data.formats.files import ListedFile, ListedFolder
from toolkit.data.remote.store import shown
from toolkit.errors import DataError
from toolkit.recipe.schema import RowsSource

_STATE, _SPLITS = "state.json", "dataset_dict.json"
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


class SavedFolder(Format):
    """Arrow files that a folder's `state.json` names."""

    index = (_STATE, _SPLITS)
    has_splits = True

    def files(self, source: RowsSource, folder: ListedFolder) -> list[ListedFile]:
        _, names = saved_files(source, folder)
        for name in names:
            if name not in folder.files:
                found = f"`{shown(source.path)}` lacks {name}, which `save_to_disk` wrote"
                raise DataError(found, fix="copy or save the folder again")
        return [folder.files[name] for name in names]


def saved_files(source: RowsSource, folder: ListedFolder) -> tuple[str, list[str]]:
    """The folder of the split in one that `save_to_disk` wrote, and the files that hold it.

    Raises DataError where the folder states anything else, such as a file outside.
    """
    split = ""
    try:
        if text := folder.read(_SPLITS):
            names = _Splits.model_validate_json(text).splits
            split = of_split(source, {name: name for name in names})
        saved = _State.model_validate_json(folder.read(f"{split}/{_STATE}".lstrip("/")))
    except ValidationError as error:
        first = error.errors()[0]
        raise DataError(
            f"`{shown(source.path)}` is not what `save_to_disk` writes "
            f"({'.'.join(map(str, first['loc'])) or _STATE}: {first['msg']})",
            fix="copy or save the folder again",
        ) from error
    if not split:
        of_split(source, {saved.split or "train": split})
    return split, [f"{split}/{file.filename}".lstrip("/") for file in saved.files]


def of_split(source: RowsSource, splits: Mapping[str, Any]) -> Any:
    """What `splits` has for the source's. Raises DataError where that is not one of them."""
    if source.split not in splits:
        raise DataError(
            f"`split: {source.split}` is given, but `{source.path}` was saved with "
            f"{', '.join(map(str, splits)) or 'none'}",
            fix="name a whole split of it; slices are for files and hub ids",
        )
    return splits[source.split]


SAVED_FOLDER = SavedFolder()
