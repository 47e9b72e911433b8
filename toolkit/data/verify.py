"""Whether what lies in the data cache is what was written there."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from toolkit.data.files import damage_hash
from toolkit.data.formats.indexed import bin_path, is_undamaged
from toolkit.data.progress import Track
from toolkit.data.remote.blocks import is_whole
from toolkit.data.remote.copies import hash_path


@dataclass(frozen=True)
class VerifiedCache:
    """What a look at every entry of a data cache found."""

    checked: int
    """Entries with a hash that was compared."""
    unknown: tuple[str, ...]
    """Entries without one: an earlier release wrote them."""
    damaged: tuple[str, ...]
    """The files to delete, so that they are made again; of a pair, both."""


def verify_cache(cache: Path, track: Track) -> VerifiedCache:
    """Read and hash every entry of the cache: tokens, copies and blocks of remote files."""
    entries = [*_entries(cache)]
    found: dict[bool | None, list[str]] = {True: [], False: [], None: []}
    for files, check in track(entries, "verifying", len(entries)):
        try:
            whole = check()
        except FileNotFoundError:  # removed meanwhile, or half of a pair
            if not files[0].exists():
                continue
            whole = False
        except OSError:
            whole = False
        found[whole] += [str(file) for file in files] if whole is not True else [str(files[0])]
    return VerifiedCache(len(found[True]), tuple(found[None]), tuple(found[False]))


def _entries(cache: Path) -> Iterator[tuple[tuple[Path, ...], Callable[[], bool | None]]]:
    """The files of every entry, and what tells whether it is undamaged."""
    for index in sorted(cache.glob("tokens/**/*.idx")):
        prefix = index.with_suffix("")
        yield (index, bin_path(prefix)), partial(is_undamaged, prefix)
    for hashed in sorted(cache.glob("remote/files/*/*.xxh128")):
        copy = hashed.with_suffix("")
        if copy.exists():
            yield (copy,), partial(_is_copy_whole, copy)
    for block in sorted(cache.glob("remote/blocks/*/*")):
        if block.suffix != ".tmp":
            yield (block,), partial(_is_block_whole, block)


def _is_block_whole(block: Path) -> bool:
    return is_whole(block.read_bytes())


def _is_copy_whole(copy: Path) -> bool:
    with copy.open("rb") as stream:
        hashed = hashlib.file_digest(stream, damage_hash)
    return hashed.hexdigest() == hash_path(copy).read_text()
