"""The holder: serves the replicas of a run, each in a thread of its own.

Its state is written to RUN/holder/step-N.safetensors when the replicas save, and at its end.
"""

import socket
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from safetensors import SafetensorError

from toolkit.errors import PlanError
from toolkit.extras.outer import OuterSection
from toolkit.extras.outer.optimizer import OuterOptimizer, shapes_of
from toolkit.extras.outer.rounds import Member, Refused, Rounds
from toolkit.extras.outer.states import State, save
from toolkit.extras.outer.wire import Connection, address
from toolkit.launchers.process import POLL_S, Deadline
from toolkit.recipe.schema import Recipe
from toolkit.run.directory import RunDirectory
from toolkit.run.events import EventLog
from toolkit.text.terminal import tell

_QUIET_S = 60.0
"""After which it says for whom it waits."""


def listening(place: str) -> socket.socket:
    """A socket that is bound to HOST:PORT. Raises PlanError."""
    where = address(place)
    family = socket.AF_INET6 if ":" in where[0] else socket.AF_INET
    try:
        server = socket.create_server(where, family=family)
    except OSError as error:
        raise PlanError(
            f"parallel.outer.holder: {place}: {error.strerror or error}",
            fix="state another port, and an address of this machine",
        ) from error
    server.settimeout(POLL_S)
    return server


class Holder:
    """Serves the replicas of one run."""

    def __init__(
        self,
        recipe: Recipe,
        run: RunDirectory,
        server: socket.socket,
        state: State | None,
        expected: Iterable[int],
    ) -> None:
        """With a state to continue from, or none; the first round waits for `expected`, and
        for who took part before."""
        self._server = server
        settings: OuterSection = recipe.parallel.outer  # type: ignore[attr-defined]
        self.settings, self._recipe, self._folder = settings, recipe, run.path / "holder"
        optimizer = OuterOptimizer(settings)
        members = range(settings.replicas) if state is None else state.members
        if state is not None:
            state.load(optimizer)
        self.rounds = Rounds(
            settings,
            optimizer,
            step=state.step if state else 0,
            expected={*members, *expected},
            counted=dict(state.counted) if state else {},
            on_round=self._on_round,
        )
        self.has_round = False
        """Whether something was applied since the start."""
        self._events = EventLog(run.events)
        self._connections: list[Connection] = []
        """All since the start, for their bytes."""
        # None: with `delayed`, the fastest replica saves before the slowest has a round.
        self._saved = None if state is None else state.step
        self._began = time.monotonic()
        self._closed = False

    def _on_round(self, replicas: list[int], tokens: float) -> None:
        step, last = self.rounds.step, self._recipe.total_steps()
        self.has_round = True
        every = self._recipe.checkpoint.every_steps
        if step != self._saved and (step == last or (every and step % every == 0)):
            self._save({*replicas, *self.rounds.live})
        seconds, self._began = time.monotonic() - self._began, time.monotonic()
        self._report(replicas=replicas, tokens=int(tokens), seconds=round(seconds, 3))

    def _save(self, members: Iterable[int]) -> None:
        try:
            keep = self._recipe.checkpoint.keep + 1
            save(self._folder, self.rounds, sorted(members), keep)
            self._saved = self.rounds.step
        except (OSError, SafetensorError) as error:
            tell(f"warning: the holder cannot save step {self.rounds.step}: {error}")

    def _report(self, **fields: Any) -> None:
        sent = sum(one.sent for one in self._connections)
        received = sum(one.received for one in self._connections)
        step = self.rounds.step
        self._events.write("outer", step=step, sent=sent, received=received, **fields)

    def serve(self) -> None:
        """Begin to serve whoever connects."""
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        quiet = Deadline()
        while not self._closed:
            with suppress(OSError):
                stream, _ = self._server.accept()
                threading.Thread(target=self.talk, args=(stream,), daemon=True).start()
            quiet.start(_QUIET_S)
            if quiet.passed and self.rounds.expected:
                quiet = Deadline()
                tell(f"holder: waiting for replicas {sorted(self.rounds.expected)}")

    def talk(self, stream: socket.socket) -> None:
        """Serve one replica, until its connection ends."""
        connection, member = Connection(stream), None
        self._connections.append(connection)
        try:
            hello = connection.receive()
            replica = int(hello["replica"])
            shapes = {str(name): tuple(shape) for name, shape in hello["shapes"].items()}
            self._check(replica, hello)
            if hello["gives"]:
                self.rounds.begin(connection.weights(shapes))
            step, begun = int(hello["step"]), int(hello["begun"])
            member, answer = self.rounds.join(replica, step, begun, shapes)
            self._events.write("outer", joined=replica, from_step=step, **answer)
            connection.send(answer, self.rounds.take())
            while True:
                self._exchange(connection, member)
        except Refused as error:
            with suppress(OSError):
                connection.send({"error": str(error), "again": error.again}, {})
        except Exception as error:  # noqa: BLE001 - anyone may connect; the others go on
            if not isinstance(error, OSError):
                who = "a stranger" if member is None else f"replica {member.replica}"
                tell(f"holder: {who} is turned away: {error!r}")
        finally:
            if member is not None:
                self.rounds.leave(member)
            connection.close()

    def _check(self, replica: int, hello: dict[str, Any]) -> None:
        if hello["run"] != self._recipe.name:
            raise Refused(f"this is the holder of run {self._recipe.name}")
        if not 0 <= replica < self.settings.replicas:
            raise Refused(f"there are {self.settings.replicas} replicas, this is {replica}")
        for key, value in self.settings.shared(self._recipe.training).items():
            if (other := hello["settings"][key]) != value:
                raise Refused(f"its {key} is {other}, that of others {value}")

    def _exchange(self, connection: Connection, member: Member) -> None:
        """One round of a replica."""
        stated = connection.receive()
        shapes = shapes_of(self.rounds.optimizer.weights)
        change = connection.weights(shapes, self.settings.compress)
        step, tokens = int(stated["step"]), float(stated["tokens"])
        done = self.rounds.hand_in(member, step, tokens, change, connection.lost)
        connection.send({"done": done}, self.rounds.take() if done else {})

    def stop(self) -> None:
        """Complete no further round, and save."""
        with self.rounds.changed:
            again = self.rounds.stopping
            members = self.rounds.stop()
            if self.rounds.optimizer.weights and members and not again:
                self._save(members)

    def close(self) -> None:
        """Stop, and write down the bytes of all answers."""
        self.stop()
        self._closed = True
        self._report()
