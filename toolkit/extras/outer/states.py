"""What the holder and the replicas write, and the step from which all continue.

RUN/holder/step-N.safetensors   weights, momentum, and who took part
RUN/replicas/N/outer.json       which checkpoints of a replica are inside of a round
"""

import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from toolkit.checkpoint.store import CheckpointStore, quarantine, step_of
from toolkit.errors import RunFailed
from toolkit.extras.outer.optimizer import OuterOptimizer, Weights
from toolkit.extras.outer.rounds import Rounds
from toolkit.run.directory import RunDirectory
from toolkit.system.atomic import write_atomically
from toolkit.text.terminal import tell

_GROUPS = ("weights", "momentum", "arrived")
_NOTED = "outer.json"


@dataclass(frozen=True)
class State:
    """A state of the holder on disk, without its tensors."""

    path: Path
    step: int
    """Inner steps before its round."""
    replicas: int
    """Number of replicas of the run, by which samples are divided."""
    members: list[int]
    """Replicas of the round before it."""
    arrivals: int
    counted: dict[int, int]
    """See `Rounds.counted`."""

    @classmethod
    def read(cls, path: Path) -> "State":
        """Raises OSError, ValueError or SafetensorError for a file that is none."""
        with safe_open(path, "np") as file:
            stated = json.loads((file.metadata() or {})["outer"])
        return TypeAdapter(cls).validate_python({**stated, "path": path})

    def load(self, optimizer: OuterOptimizer) -> None:
        """Read its tensors."""
        with safe_open(self.path, "np") as file:
            for key in file.keys():  # noqa: SIM118 - no mapping
                group, _, name = key.partition("/")
                getattr(optimizer, group)[name] = file.get_tensor(key).copy()
        optimizer.arrivals = self.arrivals


def states(folder: Path) -> list[State]:
    """The states of a holder's folder, newest first; damaged ones are left out."""
    found = []
    for path in folder.glob("step-*.safetensors"):
        with suppress(OSError, ValueError, TypeError, KeyError, SafetensorError):
            found.append(State.read(path))
    return sorted(found, key=lambda state: -state.step)


def save(folder: Path, rounds: Rounds, members: Sequence[int], keep: int) -> None:
    """Write a state in one step, and remove the oldest ones. Raises OSError or
    SafetensorError."""
    stated = {
        "step": rounds.step,
        "replicas": rounds.settings.replicas,
        "members": list(members),
        "arrivals": rounds.optimizer.arrivals,
        "counted": rounds.counted,
    }
    tensors: Weights = {
        f"{group}/{name}": values
        for group in _GROUPS
        for name, values in getattr(rounds.optimizer, group).items()
    }
    path = folder / f"step-{rounds.step:08d}.safetensors"
    temporary = path.with_suffix(".tmp")
    save_file(tensors, temporary, {"outer": json.dumps(stated)})
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)
    for state in states(folder)[keep:]:
        state.path.unlink(missing_ok=True)


_NOTES = TypeAdapter(dict[int, tuple[int, float]])


def notes(run: RunDirectory) -> dict[int, tuple[int, float]]:
    """By the step of a checkpoint that a replica saved inside of a round, or before its
    exchange: the step at which the round began, and the tokens since then."""
    path = run.path / _NOTED
    return _NOTES.validate_json(path.read_bytes()) if path.exists() else {}


def note(run: RunDirectory, step: int, begun: int, tokens: float) -> None:
    """Write one, before the checkpoint of its step is complete; remove that of an earlier
    checkpoint of the step if this one is between two rounds."""
    before = notes(run)
    found = {**before, step: (begun, tokens)}
    if step == begun:
        del found[step]
    if found != before:
        write_atomically(run.path / _NOTED, _NOTES.dump_json(found).decode())


def begun(run: RunDirectory) -> dict[int, int]:
    """By the step of a replica's checkpoint, the step at which its round began."""
    noted, found = notes(run), map(step_of, _store(run).finished())
    return {step: noted[step][0] if step in noted else step for step in found}


def settle(holder: Path, replicas: Iterable[RunDirectory], *, delayed: bool) -> State | None:
    """The newest state that the holder has and of whose round all these replicas have a
    checkpoint, if they took part; newer states and checkpoints are set aside. A replica that
    has never saved does not count: it takes the holder's weights. None where nothing was
    saved; raises RunFailed where no state is of all.

    With `delayed`, replicas continue with the weights of whatever state is the newest.
    """
    found, runs = states(holder), {int(run.path.name): run for run in replicas}
    began = {number: begun(run) for number, run in runs.items()}

    def is_of_all(state: State) -> bool:
        here = (began[number] for number in began.keys() & set(state.members))
        return delayed or all(state.step in one.values() for one in here if one)

    state = next(filter(is_of_all, found), None)
    if state is None and (found or any(began.values())):
        raise RunFailed(
            f"{holder.parent}: no step is in the checkpoints of all replicas and in {holder}",
            fix="start in another directory (--run-dir OTHER), with model.init: checkpoint "
            "from one replica's",
        )
    if state is not None and not delayed:
        newer = [one.path for one in found if one.step > state.step]
        newer += [
            _store(runs[number]).of_step(step)
            for number, of_replica in began.items()
            for step, at in of_replica.items()
            if at > state.step
        ]
        for path in newer:
            quarantine(path, "ahead")
            tell(f"{path} is behind the step that all have, and renamed to *.ahead")
    return state


def _store(run: RunDirectory) -> CheckpointStore:
    return CheckpointStore(run.checkpoints, keep=1)
