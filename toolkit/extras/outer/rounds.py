"""The holder's rounds: which replicas take part, what they handed in, when it is applied.

No sockets here: a thread per connection calls these methods, which wait for each other.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from toolkit.extras.outer import OuterSection
from toolkit.extras.outer.optimizer import OuterOptimizer, Weights, mean_gradient
from toolkit.extras.outer.wire import Floats, inside
from toolkit.models.families.tensors import Block

Values = Iterable[tuple[Block, Floats]]


class Refused(Exception):
    """What a rank asks for is not possible; its user is shown why."""

    again = False
    """Whether it may be possible later."""


class TakesPart(Refused):
    """Another start of the replica has not left yet."""

    again = True


class NotFinite(Refused):
    """Its weights have diverged; those of the others must not."""

    def __init__(self, tensor: str) -> None:
        super().__init__(f"its change of {tensor} has values that are not finite: it diverged")


class Lost(Refused):
    """A rank of the replica has ended, or who had to give the first weights; another start of
    the replica may take part."""

    again = True

    def __init__(self) -> None:
        super().__init__("a rank of the replica was lost, or the first weights")


@dataclass(eq=False)
class Member:
    """A replica that takes part."""

    world: int
    step: int
    """Inner steps of its rounds that are applied, or that were before it joined."""
    change: Weights = field(default_factory=dict)
    """Of its weights, in the round that its ranks are handing in."""
    ranks: int = 0
    """How many of them have."""
    tokens: float = 0.0
    ending: int = 0
    """Inner steps at the end of that round."""
    away: bool = False
    """Whether a stop of the replica has sent its ranks away from an exchange."""
    snapshot: Weights = field(default_factory=dict)
    """The weights that its ranks take; of asynchronous updates, a copy until all have."""
    taken: int = 0
    """How many of them have."""

    @property
    def complete(self) -> bool:
        """Whether all have."""
        return self.ranks == self.world

    def applied(self) -> None:
        """Begin the next round."""
        self.step, self.change, self.ranks = self.ending, {}, 0


@dataclass
class Rounds:
    """The state of the outer loop. Every method may be called from any thread."""

    settings: OuterSection
    optimizer: OuterOptimizer
    step: int = 0
    """Inner steps before the present round; with `delayed`, those of the slowest replica."""
    expected: set[int] = field(default_factory=set)
    """Replicas that are waited for until they have joined."""
    waiting: dict[int, int] = field(default_factory=dict)
    """Replicas that a stop kept from an exchange, and the step that they had come to."""
    counted: dict[int, int] = field(default_factory=dict)
    """With `delayed`: the step up to which a replica's changes are in the weights."""
    notes: dict[int, list[float]] = field(default_factory=dict)
    """Of replicas that saved inside of a round: the step, and the tokens since it began."""
    on_round: Callable[[list[int], float], None] = lambda *_: None
    """Called with the replicas and the tokens of what was applied, before they are answered."""

    def __post_init__(self) -> None:
        self.live: dict[int, Member] = {}
        self.left: dict[int, Member] = {}
        """Replicas that have ended after they had handed in the present round."""
        self.stopping = False
        self.giver: Member | None = None
        """Who still has to give the first weights."""
        self.changed = threading.Condition()

    @property
    def delayed(self) -> bool:
        """Whether updates are asynchronous."""
        return self.settings.overlap == "delayed"

    def join(
        self, replica: int, world: int, step: int, shapes: Mapping[str, Sequence[int]]
    ) -> dict[str, Any]:
        """Take a replica in that has trained `step` steps. The answer: the step at which it
        continues, whether it gives its weights or takes the holder's, whether it owes the
        round that ends with this step, and how many of its steps are lost. Raises Refused."""
        with self.changed:
            weights = self.optimizer.weights
            stated = {name: tuple(shape) for name, shape in shapes.items()}
            first = not weights
            if self.stopping or replica in self.live:
                raise TakesPart("the holder is stopping, or the replica takes part already")
            if first:
                self.step = step
                weights.update({n: np.zeros(shape, np.float32) for n, shape in stated.items()})
            elif stated != {name: values.shape for name, values in weights.items()}:
                raise Refused("it trains other tensors than the holder has")
            missed = self.waiting.get(replica) == step
            owes = missed and step > self.step
            end = self.step + self.settings.every_steps
            if not self.delayed and step >= end and not owes:
                raise Refused(
                    f"it has trained {step} steps and the holder has weights of step "
                    f"{self.step}: move the replica's checkpoints behind that step away"
                )
            at = max(step, self.step)
            behind = step < self.step or (missed and not owes)
            takes = not first and at > 0 and (self.delayed or behind)
            lost = step - self.counted.get(replica, self.step) if takes and self.delayed else 0
            if self.delayed:
                self.counted[replica] = at
            self.live[replica] = member = Member(world, self.step if owes else at)
            self.giver = member if first else self.giver
            self.left.pop(replica, None)
            self.expected.discard(replica)
            self.changed.notify_all()
            since, tokens = self.notes.get(replica, (-1, 0.0))
            tokens = tokens if since == at and not takes else 0.0
            answer = {"step": at, "gives": first, "takes": takes, "owes": owes}
            return {**answer, "tokens": tokens, "lost": max(0, lost)}

    def give(self, values: Values) -> None:
        """One rank's part of the first weights of all."""
        with self.changed:
            for block, part in values:
                self.optimizer.weights[block.tensor][inside(block)] = part
            if self.giver is not None:
                self.giver.ranks += 1
                if self.giver.complete:
                    self.giver.ranks, self.giver = 0, None
            self.changed.notify_all()

    def take(self, blocks: Iterable[Block], member: Member) -> list[Floats]:
        """A copy of the present weights, of the same instant for all ranks of a replica."""
        with self.changed:
            self.changed.wait_for(lambda: self.giver is None)
            if not member.taken:
                member.snapshot = self.optimizer.weights
                if self.delayed and member.world > 1:
                    member.snapshot = {n: v.copy() for n, v in member.snapshot.items()}
            found = [member.snapshot[one.tensor][inside(one)].copy() for one in blocks]
            member.taken += 1
            if member.taken == member.world:
                member.snapshot, member.taken = {}, 0
            return found

    def hand_in(
        self,
        replica: int,
        step: int,
        tokens: float,
        values: Values,
        member: Member | None = None,
    ) -> bool:
        """One rank's part of the change of a replica's weights in the round that ended with
        `step`. Returns when it is applied; False when the holder, or the replica, stops before.
        `member`: the start of the replica that the rank belongs to. Raises Refused.
        """
        values = list(values)
        for block, part in values:
            if not np.isfinite(part).all():
                raise NotFinite(block.tensor)
        with self.changed:
            if member is not None and member.away:
                return False
            member = self.member(replica, member)
            for block, part in values:
                if block.tensor not in member.change:
                    empty = np.zeros_like(self.optimizer.weights[block.tensor])
                    member.change[block.tensor] = empty
                member.change[block.tensor][inside(block)] = part
            member.ranks, member.tokens, member.ending = member.ranks + 1, tokens, step
            self._apply()
            while member.step < step and not (self.stopping or member.away):
                self.changed.wait()
                if not member.away:
                    self.member(replica, member)
                    self._apply()
            if member.step < step and not member.away:
                self.waiting[replica] = step
            return member.step >= step

    def leave(self, replica: int, member: Member | None = None) -> None:
        """Leave a replica out of further rounds: it has ended, or lost a rank. What it has
        handed in completely counts. `member`: unless another start of it has joined."""
        with self.changed:
            found = self.live.get(replica)
            self.expected.discard(replica)
            if found is None or member in (None, found):
                gone = self.live.pop(replica, None)
                if gone is not None and gone is self.giver:
                    # The next that joins gives them: the others have to join again, too.
                    self.giver, self.optimizer.weights = None, {}
                    self.expected |= {*self.live}
                    self.live.clear()
                elif gone is not None and gone.complete and not self.delayed:
                    self.left[replica] = gone
            self.changed.notify_all()

    def send_away(self, replica: int, step: int) -> None:
        """A replica that waits for the round that ends with `step` is asked to stop: it saves,
        and owes the exchange. What it has handed in completely counts if the others end the
        round before it comes back; it then takes their weights."""
        with self.changed:
            member = self.live.get(replica)
            if member is None or member.step >= step or member is self.giver:
                return
            member.away, self.waiting[replica] = True, step
            del self.live[replica]
            if member.complete and not self.delayed:
                self.left[replica] = member
            self._apply()
            self.changed.notify_all()

    def member(self, replica: int, same: Member | None = None) -> Member:
        """A replica that takes part, and has since then. Raises Lost."""
        found = self.live.get(replica)
        if found is None or same not in (None, found):
            raise Lost
        return found

    def stop(self) -> list[int]:
        """Complete no further round: ranks that wait for one are sent away. Returns the
        replicas that take part in it."""
        with self.changed:
            self.stopping = True
            self.changed.notify_all()
            away = {n for n, step in self.waiting.items() if step > self.step}
            return sorted({*self.live, *away})

    def _apply(self) -> None:
        """Apply what is complete and may be applied."""
        if self.stopping or self.expected:
            return
        if self.delayed:
            for replica, member in self.live.items():
                if member.complete and self._may_be_ahead(replica, member.ending):
                    self._arrive(replica, member)
        elif self.live and all(member.complete for member in self.live.values()):
            self._finish()

    def _finish(self) -> None:
        """Apply a round that all have handed in; in the order of their numbers, so that the
        sum does not depend on who was first."""
        handed = dict(sorted({**self.left, **self.live}.items()))
        tokens = sum(member.tokens for member in handed.values())
        if tokens:
            changes = [(member.tokens, member.change) for member in handed.values()]
            self.optimizer.step(mean_gradient(changes))
        self.step = max(member.ending for member in self.live.values())
        for member in self.live.values():
            member.applied()
        missed = {n: step for n, step in self.waiting.items() if n not in self.live}
        self.left, self.waiting, self.notes = {}, missed, {}
        self.on_round([*handed], tokens)
        self.changed.notify_all()

    def _may_be_ahead(self, replica: int, step: int) -> bool:
        others = [one.step for number, one in self.live.items() if number != replica]
        ahead = step - min(others, default=step)
        return ahead <= self.settings.steps_ahead

    def _arrive(self, replica: int, member: Member) -> None:
        """Apply what one replica has handed in."""
        if member.tokens:
            self.optimizer.arrive(mean_gradient([(1.0, member.change)]), len(self.live))
        member.applied()
        self.counted[replica] = member.step
        self.step = min(one.step for one in self.live.values())
        self.on_round([replica], member.tokens)
        self.changed.notify_all()
