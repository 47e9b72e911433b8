"""The holder's process, which `dmt launch` starts with its folder.

FOLDER/settings.json says what it serves. Its state is written to FOLDER/step-N.safetensors at
the replicas' checkpoint boundaries and, after SIGTERM, when all replicas have left.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from toolkit.errors import EXIT_DONE, EXIT_USER_ERROR
from toolkit.extras.outer import OuterSection
from toolkit.extras.outer.optimizer import OuterOptimizer, Weights
from toolkit.extras.outer.rounds import Member, Refused, Rounds
from toolkit.extras.outer.wire import Connection, address, from_json
from toolkit.launchers.process import POLL_S, StopSignals
from toolkit.run import jsonl
from toolkit.run.events import EventLog
from toolkit.text.terminal import tell

SETTINGS = "settings.json"
_GROUPS = ("weights", "momentum", "arrived")
_QUIET_S = 60.0
"""After which it says for whom it waits."""


@dataclass(frozen=True)
class Served:
    """What a holder is started with."""

    run: str
    """The recipe's name: replicas of another run are turned away."""
    settings: dict[str, Any]
    """The section `parallel.outer`."""
    address: str
    """HOST:PORT to bind to."""
    events: str
    """File for its events."""
    save_every: int
    """Steps between two states on disk."""
    last: int
    """The run's last step."""
    keep: int
    """States that are kept."""
    expected: list[int]
    """Replicas that the first round waits for."""
    step: int | None = None
    """The state to continue from; None: none."""

    @classmethod
    def read(cls, folder: Path) -> "Served":
        """What `write` has written."""
        return cls(**json.loads((folder / SETTINGS).read_text(encoding="utf-8")))

    def write(self, folder: Path) -> None:
        """For a holder in this folder."""
        folder.mkdir(parents=True, exist_ok=True)
        jsonl.write_atomically(folder / SETTINGS, jsonl.document(asdict(self)))


@dataclass(frozen=True)
class State:
    """A state on disk, without its tensors."""

    path: Path
    step: int
    """Inner steps before its round."""
    members: list[int]
    """Replicas of the round before it."""
    waiting: dict[int, int]
    """See `Rounds.waiting`."""
    notes: dict[int, list[float]]
    """See `Rounds.notes`."""
    arrivals: int
    counted: dict[int, int] = field(default_factory=dict)
    """See `Rounds.counted`."""

    @classmethod
    def read(cls, path: Path) -> "State":
        """Raises OSError, ValueError or SafetensorError for a file that is none."""
        with safe_open(path, "np") as file:
            stated = json.loads((file.metadata() or {})["outer"])
        for key in ("waiting", "notes", "counted"):  # JSON has no numbers for keys
            by_replica = stated.get(key, {}).items()
            stated[key] = {int(replica): value for replica, value in by_replica}
        return cls(path, **stated)

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
    """Write a state in one step, and remove the oldest ones."""
    stated = {
        "step": rounds.step,
        "members": list(members),
        "waiting": rounds.waiting,
        "notes": rounds.notes,
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


class Holder:
    """Serves the replicas of one run."""

    def __init__(self, folder: Path, served: Served) -> None:
        self.folder, self.served = folder, served
        self.settings = OuterSection.model_validate(served.settings)
        optimizer = OuterOptimizer(self.settings)
        found = {state.step: state for state in states(folder)}
        state = None if served.step is None else found[served.step]
        if state is not None:
            state.load(optimizer)
        self.rounds = Rounds(
            self.settings,
            optimizer,
            step=state.step if state else 0,
            expected=set(served.expected),
            waiting=dict(state.waiting) if state else {},
            notes=dict(state.notes) if state else {},
            counted=dict(state.counted) if state else {},
            on_round=self._on_round,
        )
        self.events = EventLog(Path(served.events))
        self.saved: int | None = None if state is None else state.step
        self._open: list[Connection] = []
        self._gone = [0, 0]
        """Bytes sent to and received from replicas that have left."""
        self._counting = threading.Lock()
        self._began = time.monotonic()

    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received since the start."""
        with self._counting:
            sent, received = self._gone
            return (
                sent + sum(one.sent for one in self._open),
                received + sum(one.received for one in self._open),
            )

    def _on_round(self, replicas: list[int], tokens: float) -> None:
        step, last = self.rounds.step, self.served.last
        if step != self.saved and (step % self.served.save_every == 0 or step == last):
            members = sorted({*replicas, *self.rounds.live})
            save(self.folder, self.rounds, members, self.served.keep)
            self.saved = step
        sent, received = self.traffic()
        seconds, self._began = time.monotonic() - self._began, time.monotonic()
        self.events.write(
            "outer",
            step=step,
            replicas=replicas,
            tokens=int(tokens),
            sent=sent,
            received=received,
            seconds=round(seconds, 3),
        )

    def serve(self, stream: socket.socket) -> None:
        """One rank, until its connection ends."""
        connection, replica, member = Connection(stream), -1, None
        self._open.append(connection)
        try:
            hello = connection.receive()
            if hello["run"] != self.served.run:
                raise Refused(f"this is the holder of run {self.served.run}")
            replica = int(hello["replica"])
            if hello["do"] == "gone":
                self.rounds.leave(replica)
                return
            if hello["do"] == "stop":
                self.rounds.send_away(replica, int(hello["step"]))
                return
            if hello["do"] == "join":
                member = self._join(connection, hello)
                hello = connection.receive()
            with self.rounds.changed:
                member = self.rounds.member(replica, member)
            self._exchange(connection, replica, member, hello)
        except Refused as error:
            with suppress(OSError):
                connection.send({"error": str(error), "again": error.again})
        except (OSError, ValueError, TypeError, KeyError, IndexError) as error:
            if not isinstance(error, OSError):
                tell(f"holder: replica {replica} sent something else: {error!r}")
        finally:
            if member is not None:
                self.rounds.leave(replica, member)
            with self._counting:
                self._gone[0] += connection.sent
                self._gone[1] += connection.received
                self._open.remove(connection)
            connection.close()

    def _join(self, connection: Connection, hello: dict[str, Any]) -> Member:
        replica, step = int(hello["replica"]), int(hello["step"])
        if not 0 <= replica < self.settings.replicas:
            raise Refused(f"there are {self.settings.replicas} replicas, this is {replica}")
        for key, value in self.settings.shared.items():
            if (other := hello["settings"][key]) != value:
                raise Refused(f"its parallel.outer.{key} is {other}, that of others {value}")
        answer = self.rounds.join(replica, int(hello["world"]), step, hello["shapes"])
        with self.rounds.changed:
            member = self.rounds.member(replica)
        told = {key: answer[key] for key in ("step", "takes", "lost")}
        self.events.write("outer", joined=replica, from_step=step, **told)
        connection.send(answer)
        return member

    def _exchange(
        self, connection: Connection, replica: int, member: Member, hello: dict[str, Any]
    ) -> None:
        """Serve the requests of a rank, whose rectangles are stated once."""
        shapes = {name: one.shape for name, one in self.rounds.optimizer.weights.items()}
        sends, takes = (from_json(hello[key], shapes) for key in ("sends", "takes"))
        connection.send({})
        while True:
            asked = connection.receive()
            if asked["do"] == "give":
                values = connection.arrays(sends)
                self.rounds.give(zip(sends, values, strict=True))
            elif asked["do"] == "take":
                connection.send({}, self.rounds.take(takes, member))
            elif asked["do"] == "note":
                self.rounds.notes[replica] = [int(asked["step"]), float(asked["tokens"])]
            else:
                values = connection.arrays(sends, self.settings.compress)
                tokens, step = float(asked["tokens"]), int(asked["step"])
                done = self.rounds.hand_in(
                    replica, step, tokens, zip(sends, values, strict=True), member
                )
                held = self.rounds.take(takes, member) if done else ()
                connection.send({"done": done}, held)

    def run(self) -> int:
        """Serve until SIGTERM, and then until the last replica has left."""
        with (
            StopSignals() as signals,
            socket.create_server(address(self.served.address)) as own,
        ):
            own.settimeout(POLL_S)
            heard, members = time.monotonic(), list[int]()
            while not signals.stop_requested or self.rounds.live:
                if signals.stop_requested and not self.rounds.stopping:
                    members = self.rounds.stop()
                with suppress(TimeoutError):
                    stream, _ = own.accept()
                    stream.settimeout(None)
                    threading.Thread(target=self.serve, args=(stream,), daemon=True).start()
                if self.rounds.expected and time.monotonic() > heard + _QUIET_S:
                    heard = time.monotonic()
                    tell(f"holder: waiting for replicas {sorted(self.rounds.expected)}")
        members = members or self.rounds.stop()  # all have been sent away
        if self.rounds.optimizer.weights and members:
            save(self.folder, self.rounds, members, self.served.keep)
        sent, received = self.traffic()  # those of a round are without its answers
        self.events.write("outer", step=self.rounds.step, sent=sent, received=received)
        return EXIT_DONE


def main(arguments: Iterable[str]) -> int:
    """Exit code of the process."""
    (folder,) = map(Path, arguments)
    try:
        return Holder(folder, Served.read(folder)).run()
    except OSError as error:  # the address
        tell(f"error: the holder of parallel.outer cannot start: {error}")
        return EXIT_USER_ERROR


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
