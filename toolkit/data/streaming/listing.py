"""Lists the files of a streamed source, in order, without reading text.

A folder of MDS shards or of `save_to_disk` names its files. The files of a split of a hub id,
or of a folder of data files, are determined by `datasets`.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from toolkit.data.files import find_files, matching_paths
from toolkit.data.mds import MDS_INDEX, is_mds_index, shards_of
from toolkit.data.remote.store import list_files as stored_files
from toolkit.data.remote.store import listed_url, shown
from toolkit.data.saved import SAVED, saved_files
from toolkit.data.sources import builder_of, data_files_of, local_files
from toolkit.data.streaming.chunks import ListedFile
from toolkit.errors import DataError
from toolkit.recipe.places import is_remote
from toolkit.recipe.schema import HfSource, TextSource


def list_files(source: TextSource | HfSource, base: Path) -> tuple[ListedFile, ...]:
    """The files of a source, in order; relative paths start at `base`.

    Raises DataError when there are none, or they cannot be read in parts.
    """
    if isinstance(source, TextSource):
        return tuple(_texts(source, base))
    local = base / Path(source.path).expanduser()
    if is_remote(source.path):
        named = [*map(ListedFile.stored, stored_files(source.path))]
    elif not local.is_dir():
        named = [*map(ListedFile.of, local_files(source, base) or ())]
    else:
        named = []
    folder = {} if named else _folder(source.path, local)
    if any(name in folder for name in SAVED):
        _check_whole(source, "name")
        return tuple(_saved(source, folder))
    if is_mds_index(_content(folder, MDS_INDEX)) or any(".mds" in name for name in folder):
        _check_whole(source, "name", "split")
        return tuple(_shards(source, folder))
    if named:
        _check_whole(source, "name", "split")
    elif is_remote(source.path):
        fix = "correct the path; name the files of a folder by a glob, e.g. `FOLDER/*.parquet`"
        raise DataError(f"no file matches {shown(source.path)}", fix=fix)
    else:
        named = [*_at(data_files_of(source, local if local.is_dir() else None))]
    _check_alike(source, named)
    return tuple(named)


def needs_datasets(source: HfSource, base: Path) -> bool:
    """Whether the source's files are determined by `datasets`, which may use the hub."""
    folder = base / Path(source.path).expanduser()
    if folder.is_dir():
        return not any((folder / name).is_file() for name in (*SAVED, MDS_INDEX))
    return local_files(source, base) is None


def _texts(source: TextSource, base: Path) -> Iterable[ListedFile]:
    left_out = {
        one.url for url in filter(is_remote, source.exclude) for one in stored_files(url)
    }
    here = [one for one in source.exclude if not is_remote(one)]
    found: dict[ListedFile, None] = {}
    for pattern in source.files:
        if not is_remote(pattern):
            found.update(dict.fromkeys(map(ListedFile.of, find_files([pattern], base, here))))
            continue
        stored = [one for one in stored_files(pattern) if one.url not in left_out]
        if not stored:
            raise DataError(f"no file matches {shown(pattern)}", fix="correct the path")
        found.update(dict.fromkeys(map(ListedFile.stored, stored)))
    return found


def _folder(path: str, local: Path) -> dict[str, ListedFile]:
    """All files of a folder, by their place in it; none where there is no such folder."""
    if is_remote(path):
        root = listed_url(path).rstrip("/")
        files = stored_files(f"{root}/**/*")
        return {file.url.removeprefix(f"{root}/"): ListedFile.stored(file) for file in files}
    paths = [one for one in matching_paths("**/*", local) if one.is_file()]
    return {str(one.relative_to(local)): ListedFile.of(one) for one in paths}


def _content(folder: Mapping[str, ListedFile], name: str) -> bytes:
    if name not in folder:
        return b""
    with folder[name].open() as stream:
        return stream.read()


def _shards(source: HfSource, folder: Mapping[str, ListedFile]) -> Iterator[ListedFile]:
    """MDS shards in the order of their index."""
    sizes = {name: file.size for name, file in folder.items()}
    found = shards_of(shown(source.path), _content(folder, MDS_INDEX), sizes.get)
    for name, shard in found:
        yield replace(folder[name], shard=shard)


def _saved(source: HfSource, folder: Mapping[str, ListedFile]) -> Iterator[ListedFile]:
    """The Arrow files of a split that `save_to_disk` wrote."""
    for name in saved_files(source, partial(_content, folder))[1]:
        if name not in folder:
            found = f"`{shown(source.path)}` lacks {name}, which `save_to_disk` wrote"
            raise DataError(found, fix="copy or save the folder again")
        yield folder[name]


def _at(places: Iterable[str]) -> Iterator[ListedFile]:
    """The files at paths or URLs; of a repository of the hub, it is asked once."""
    repositories: dict[str, dict[str, ListedFile]] = {}
    for place in places:
        if not is_remote(place):
            yield ListedFile.of(Path(place))
            continue
        repository, _, rest = place.partition("@")
        root = f"{repository}@{rest.partition('/')[0]}"
        if root not in repositories:
            files = map(ListedFile.stored, stored_files(f"{root}/**/*"))
            repositories[root] = {str(file.remote.url): file for file in files if file.remote}
        yield repositories[root][place]


def _check_whole(source: HfSource, *settings: str) -> None:
    """Raise DataError for a setting that chooses among rows which are all read."""
    for name in settings:
        if (found := getattr(source, name)) != ("train" if name == "split" else None):
            raise DataError(
                f"`data.streaming`: `{name}: {found}` with files (`{shown(source.path)}`)",
                fix=f"remove `{name}`: all rows of the files are read",
            )


def _check_alike(source: HfSource, files: Iterable[ListedFile]) -> None:
    paths = [file.path for file in files]
    builders = {builder_of(path) for path in paths}
    if len(builders) != 1 or None in builders:
        found = f"`{shown(source.path)}` names files of different or unknown kinds"
        raise DataError(
            found + (f", e.g. {paths[0].name}" if paths else ""),
            fix="name files of one kind: .json or .jsonl, .parquet, .arrow, .txt",
        )
