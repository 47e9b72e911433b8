"""The holder's rounds: which replicas take part, what they handed in, when it is applied.

No sockets here: a thread per replica calls these methods, which wait for each other.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from toolkit.extras.outer import OuterSection
from toolkit.extras.outer.optimizer import (
    OuterOptimizer,
    Shapes,
    Weights,
    mean_gradient,
    shapes_of,
)

_POLL_S = 0.2
"""Time between two looks at whether a replica that waits is still there."""
_OVERLAP_S = 180.0
"""How long a replica waits for the end of another start of itself; a machine that is cut off is
noticed within half of that."""


class Refused(Exception):
    """What a replica asks for is not possible; its user is shown why. `again`: another start of
    it may be taken in."""

    def __init__(self, message: str, *, again: bool = False) -> None:
        super().__init__(message)
        self.again = again


@dataclass(eq=False)
class Member:
    """One start of a replica, which takes part."""

    replica: int
    step: int
    """Inner steps of its rounds that are applied, or that were before it joined."""
    change: Weights | None = None
    """Of its weights, in the round that it has handed in."""
    tokens: float = 0.0
    ending: int = 0
    """Inner steps at the end of that round."""

    def applied(self) -> None:
        """Begin the next round."""
        self.step, self.change = self.ending, None


@dataclass
class Rounds:
    """The state of the outer loop. Every method may be called from any thread."""

    settings: OuterSection
    optimizer: OuterOptimizer
    step: int = 0
    """Inner steps before the present round; with `delayed`, those of the slowest replica."""
    expected: set[int] = field(default_factory=set)
    """Replicas that are waited for until they have joined."""
    counted: dict[int, int] = field(default_factory=dict)
    """With `delayed`: the step up to which a replica's changes are in the weights."""
    on_round: Callable[[list[int], float], None] = lambda *_: None
    """Called with the replicas and the tokens of what was applied, before they are answered."""

    def __post_init__(self) -> None:
        self.live: dict[int, Member] = {}
        self.left: dict[int, Member] = {}
        """Replicas that have ended after they had handed in the present round."""
        self.stopping = False
        self.changed = threading.Condition()

    @property
    def delayed(self) -> bool:
        """Whether updates are asynchronous."""
        return self.settings.overlap == "delayed"

    def begin(self, weights: Weights) -> None:
        """Replica 0's first weights are those of all, unless there are some."""
        with self.changed:
            self.optimizer.weights = self.optimizer.weights or weights
            self.changed.notify_all()

    def join(
        self, replica: int, step: int, begun: int, shapes: Shapes
    ) -> tuple[Member, dict[str, Any]]:
        """Take a replica in that has trained `step` steps, of which the present round began
        after `begun`, once there are weights.

        The answer: the step at which it continues, whether with the weights that it is sent,
        and how many of its steps are lost. Raises Refused.
        """
        with self.changed:
            self.changed.wait_for(lambda: self.stopping or self.optimizer.weights)
            ended = self.changed.wait_for(lambda: replica not in self.live, _OVERLAP_S)
            if self.stopping or not ended:
                why = "the holder is stopping, or the replica takes part already"
                raise Refused(why, again=True)
            if shapes != shapes_of(self.optimizer.weights):
                raise Refused("it trains other tensors than the holder has")
            if begun > self.step and not self.delayed:
                raise Refused(
                    f"its round began at step {begun} and the holder has weights of step "
                    f"{self.step}: move the replica's checkpoints behind that step away"
                )
            at, lost = max(step, self.step), 0
            if self.delayed:
                lost = max(0, step - self.counted.get(replica, self.step))
                self.counted[replica] = at
            member = Member(replica, at if self.delayed else self.step)
            self.live[replica] = member
            self.left.pop(replica, None)
            self.expected.discard(replica)
            takes = self.delayed or begun < self.step
            return member, {"step": at, "takes": takes, "lost": lost}

    def take(self) -> Weights:
        """The present weights. Asynchronously a copy; else they do not change before the
        replica has handed in its next round."""
        with self.changed:
            weights = self.optimizer.weights
            return {n: v.copy() for n, v in weights.items()} if self.delayed else weights

    def hand_in(
        self,
        member: Member,
        step: int,
        tokens: float,
        change: Weights,
        lost: Callable[[], bool] = lambda: False,
    ) -> bool:
        """The change of a replica's weights in the round that ended with `step`. Returns True
        when it is applied, and False when the holder stops before.

        Raises ConnectionError when the replica is `lost` meanwhile, and Refused.
        """
        for name, values in change.items():
            if not np.isfinite(values).all():
                # Its weights have diverged; those of the others must not.
                why = f"its change of {name} has values that are not finite: it diverged"
                raise Refused(why)
        with self.changed:
            member.change, member.tokens, member.ending = change, tokens, step
            self._apply()
            while member.step < step and not self.stopping:
                if not self.changed.wait(_POLL_S) and lost():
                    raise ConnectionError("the replica has left")
            return member.step >= step

    def leave(self, member: Member) -> None:
        """Leave a replica out of further rounds: it has ended. What it has handed in counts if
        the others end the round before it comes back."""
        with self.changed:
            del self.live[member.replica]
            if member.change is not None and not self.delayed:
                self.left[member.replica] = member
            self._apply()
            self.changed.notify_all()

    def give_up(self, replica: int) -> None:
        """Do not wait for a replica that will not join."""
        with self.changed:
            self.expected.discard(replica)
            self._apply()

    def stop(self) -> list[int]:
        """Complete no further round: replicas that wait for one are sent away. Returns those
        that take part in it."""
        with self.changed:
            self.stopping = True
            self.changed.notify_all()
            return sorted({*self.live, *self.left})

    def _apply(self) -> None:
        """Apply what is handed in and may be applied."""
        if self.stopping or self.expected:
            return
        if not self.delayed:
            if self.live and all(one.change is not None for one in self.live.values()):
                self._finish()
            return
        while ready := [one for one in self.live.values() if self._may_arrive(one)]:
            self._arrive(ready[0])

    def _finish(self) -> None:
        """Apply a round that all have handed in; in the order of their numbers, so that the
        sum does not depend on who was first."""
        handed = dict(sorted({**self.left, **self.live}.items()))
        tokens = sum(member.tokens for member in handed.values())
        changes = [(one.tokens, one.change) for one in handed.values() if one.change]
        if tokens:
            self.optimizer.step(mean_gradient(changes))
        self.step = max(member.ending for member in self.live.values())
        for member in self.live.values():
            member.applied()
        self.left = {}
        self.on_round([*handed], tokens)
        self.changed.notify_all()

    def _may_arrive(self, member: Member) -> bool:
        """Whether there is a change of a replica, which is not too far ahead of the others."""
        others = [one.step for one in self.live.values() if one is not member]
        ahead = member.ending - min(others, default=member.ending)
        return member.change is not None and ahead <= self.settings.steps_ahead

    def _arrive(self, member: Member) -> None:
        """Apply what one replica has handed in."""
        if member.tokens and member.change:
            self.optimizer.arrive(mean_gradient([(1.0, member.change)]), len(self.live))
        member.applied()
        self.counted[member.replica] = member.step
        self.step = min(one.step for one in self.live.values())
        self.on_round([member.replica], member.tokens)
        self.changed.notify_all()
