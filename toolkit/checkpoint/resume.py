"""Finds the checkpoint to continue from: the newest one whose files match their hashes."""

import os
import socket
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from toolkit.checkpoint.checkpoints import locate
from toolkit.checkpoint.manifest import Manifest, problem_with
from toolkit.checkpoint.store import CheckpointStore, name_problem, quarantine
from toolkit.errors import CheckpointError


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint that can be continued."""

    folder: Path
    manifest: Manifest
    skipped: tuple[str, ...]
    """Newer checkpoints that are damaged: which, and why."""


def find_newest(
    store: CheckpointStore,
    *,
    expected: bool,
    verifying: Callable[[int], Callable[[int], None]] = lambda _: lambda _: None,
) -> ResumePoint | None:
    """The newest checkpoint that verifies, the same on every rank. Collective.

    `verifying` gets the number of bytes of a checkpoint that this rank verifies. The function
    that it returns gets the progress.

    None if there is none and none is `expected`. Raises CheckpointError if one is expected, or
    if there are some and all are damaged: a run must not silently start from scratch.
    """
    skipped: dict[Path, str] = {}

    stored: list[Path] = _from_rank_0(lambda: [*store.finished()[::-1]])
    expected = _from_rank_0(lambda: expected or store.expects_one())
    for folder in stored:
        manifest, problems = _verified(folder, verifying)
        if manifest is not None and (problem := name_problem(folder, manifest)):
            problems = [problem]
        if manifest is not None and not problems:
            for damaged in skipped if dist.get_rank() == 0 else ():
                with suppress(OSError):  # a disk that cannot be written: skipped each time
                    quarantine(damaged, "damaged")
            return ResumePoint(folder, manifest, tuple(skipped.values()))
        skipped[folder] = f"{folder.name}: {problems[0]}"
    if not expected:
        return None
    why = "; ".join(skipped.values()) or "no finished checkpoint is there"
    raise CheckpointError(
        f"{store.folder} should hold a checkpoint to continue from, but {why}",
        fix="restore the files, or start again in another directory (--run-dir OTHER)",
    )


def require_whole_together(
    path: Path, verifying: Callable[[int], Callable[[int], None]] = lambda _: lambda _: None
) -> Path:
    """The folder of the checkpoint at `path`, a run or a checkpoint (see `locate`). Collective.
    `verifying`: see `find_newest`. Raises CheckpointError, on every rank, for a damaged one."""
    folder: Path
    folder, problem = _from_rank_0(lambda: _or_problem(lambda: locate(path).folder, path))
    problems = [problem] if problem else _verified(folder, verifying)[1]
    if problems:
        fix = "`dmt checkpoint verify` names all that is damaged; restore it, or name another"
        raise CheckpointError(f"{folder} cannot be read: {problems[0]}", fix=fix)
    return folder


def _or_problem(ask: Callable[[], Any], otherwise: Any = None) -> tuple[Any, str]:
    try:
        return ask(), ""
    except CheckpointError as error:
        return otherwise, error.message


def _verified(
    folder: Path, verifying: Callable[[int], Callable[[int], None]]
) -> tuple[Manifest | None, list[str]]:
    """A checkpoint's manifest and what is wrong with it. Every rank hashes its share."""
    manifest, problem = _from_rank_0(lambda: _or_problem(lambda: Manifest.read(folder)))
    if manifest is None:
        return None, [problem]
    files = list(manifest.files.items())[dist.get_rank() :: dist.get_world_size()]
    tick = verifying(sum(record.size for _, record in files))
    found = (problem_with(folder, name, record, tick) for name, record in files)
    mine = [reason for reason in found if reason]
    everyones: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyones, mine)
    return manifest, [reason for one in everyones for reason in one]


def check_shared_disk(folder: Path) -> None:
    """Refuse a folder that not all ranks share. Collective. Raises CheckpointError."""
    mark: Path = _from_rank_0(lambda: _make_mark(folder))
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, None if mark.exists() else socket.gethostname())
    if dist.get_rank() == 0:
        mark.unlink(missing_ok=True)
    for rank, host in enumerate(seen):
        if host is not None:
            raise CheckpointError(
                f"rank {rank} on {host} does not see {folder} of rank 0, and every rank writes "
                "its part of a checkpoint there",
                fix="--run-dir on a disk that all machines share",
            )


def _make_mark(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=".shared-", dir=folder)
    os.close(descriptor)
    return Path(name)


def _from_rank_0(ask: Callable[[], Any]) -> Any:
    """Rank 0's answer, on every rank."""
    box: list[Any] = [ask() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    return box[0]
