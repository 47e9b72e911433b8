"""A replica's part of the outer loop: an engine around its own, and the order of samples."""

import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from toolkit.batch import MicroBatch
from toolkit.checkpoint.shards import StateShard
from toolkit.data.order import Order
from toolkit.data.rows import Int64Array
from toolkit.engines.base import Engine, StepResult
from toolkit.errors import PlanError, Stopped
from toolkit.extras.outer import OuterSection
from toolkit.extras.outer.link import HolderLink
from toolkit.extras.outer.optimizer import Weights
from toolkit.extras.outer.states import note, notes
from toolkit.extras.outer.weights import WholeWeights
from toolkit.text.terminal import tell
from toolkit.train.dropout_seed import seed_dropout

if TYPE_CHECKING:
    from toolkit.train.start import Start

_MARK_S = 2.0
"""Time between two signs of life of a rank that waits for other replicas."""


@dataclass(frozen=True)
class OfReplica:
    """The samples of one replica: every so many-th, so of each global batch its part."""

    whole: Order
    replicas: int
    replica: int

    def indices(self, position: int, count: int) -> Int64Array:
        """See `Order.indices`."""
        of_all = self.whole.indices(position * self.replicas, count * self.replicas)
        return of_all[self.replica :: self.replicas]


def order(whole: Order, settings: OuterSection) -> Order:
    """The order of this replica's samples."""
    return OfReplica(whole, settings.replicas, _place(settings)[0])


def _place(settings: OuterSection) -> tuple[int, str]:
    """Number of this replica, and its holder."""
    if settings.replica is None or settings.holder is None:
        raise PlanError(
            "parallel.outer: only `dmt launch` starts all replicas; this launcher starts one",
            fix="state which, and where the holder is: --set parallel.outer.replica=N --set "
            "parallel.outer.holder=HOST:PORT",
        )
    return settings.replica, settings.holder


def attach(engine: Engine, settings: OuterSection, start: "Start") -> Engine:
    """The engine of a replica, which has joined the others; collective."""
    return cast(Engine, OuterEngine(engine, settings, start))


class OuterEngine:
    """An engine that exchanges its weights with other replicas after every few steps; all else
    is that of the engine inside.

    Weights of the holder, and those of all ranks together, are on rank 0; on the other ranks
    they are empty.
    """

    def __init__(self, engine: Engine, settings: OuterSection, start: "Start") -> None:
        self._engine, self._settings, self._start = engine, settings, start
        self._replica, holder = start.together.run(lambda: _place(settings))
        self._last = start.recipe.total_steps()
        self._batch = start.recipe.training.global_batch_size
        self._weights = WholeWeights(engine, start.recipe, start.together.group)
        self._link = HolderLink(holder, self._weights.shapes, settings.compress)
        self._sender = ThreadPoolExecutor(1)
        self._pending: Future[Weights | None] | None = None
        """The answer to what was handed in, on rank 0."""
        self._anchor: Weights = {}
        """The weights that the present round began with."""
        step = self._step = start.progress.step
        noted = start.together.rank_zero(lambda: notes(start.directory))
        self._begun, self._tokens = noted.get(step, (step, 0.0))
        """The step at which the present round began, and what was trained since then."""
        start.marks.begin("joining the other replicas")
        self._join()
        if self._step > self._begun and self._step % settings.every_steps == 0:
            self._exchange()
            if start.stop.agreed:
                raise Stopped(
                    f"stopped at step {self._step}, before an exchange with other replicas",
                    fix="start the same command again; it continues with the exchange",
                )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def _join(self) -> None:
        """Enter this replica; take the weights of the present round, unless it is inside."""
        start, parts = self._start, self._weights
        stated = {
            "run": start.recipe.name,
            "replica": self._replica,
            "step": self._step,
            "begun": self._begun,
            "settings": self._settings.shared(start.recipe.training),
        }
        first = parts.gather() if self._replica == self._step == 0 else {}
        answer = start.together.rank_zero(lambda: self._link.join(stated, first))
        self._anchor, self._link.held = self._link.held, {}
        if answer["takes"]:
            parts.scatter(self._anchor)
            self._skip_to(answer["step"])
        if lost := answer["lost"]:
            message = (
                f"replica {self._replica} continues with the holder's weights: what "
                f"its last {lost} steps have changed had not arrived there, and is lost"
            )
            self._warn(message, lost=lost)
        if start.leads:
            start.events.write("outer", step=self._step, joined=self._replica)

    def _warn(self, message: str, **fields: int) -> None:
        if self._start.leads:
            tell(f"parallel.outer: {message}")
            self._start.events.write(
                "warning", source="outer", step=self._step, message=message, **fields
            )

    def _skip_to(self, step: int) -> None:
        """Begin a round at the holder's step: samples until then are not trained."""
        progress, self._tokens = self._start.progress, 0.0
        self._step = self._begun = step
        if skipped := step - progress.step:
            self._warn(
                f"replica {self._replica} joins at step {step} with the holder's weights: the "
                f"{skipped * self._batch} samples of its last {skipped} steps are not trained"
            )
            progress.consumed_samples += skipped * self._batch
            progress.step, progress.consumed_tokens = step, None

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        count: float,
        learning_rate: float,
        max_loss: float = math.inf,
    ) -> StepResult:
        """See `Engine.train_step`."""
        start = self._start
        # Another stream on each replica than the loop's, which is a plain run's.
        seed = start.recipe.training.seed + (self._replica << 64)
        seed_dropout(seed, self._step, start.plan.layout.token_rank(start.ranks.rank))
        result = self._engine.train_step(micro_batches, count, learning_rate, max_loss)
        self._step += 1
        if result.skipped is None:
            self._tokens += count
        if self._step % self._settings.every_steps == 0 or self._step == self._last:
            self._exchange()
        return result

    def _exchange(self) -> None:
        """End a round: hand in how the weights have changed, and get the new ones."""
        began, start, ends = time.monotonic(), self._start, self._step == self._last
        now = self._weights.gather()
        change = {name: now[name] - self._anchor[name] for name in now}
        delayed = self._settings.overlap == "delayed"
        if delayed and (held := self._answer()) is not None:
            now = {name: held[name] + change[name] for name in held}
        if not start.stop.agreed and start.leads:
            round_ = self._step, self._tokens, change
            self._pending = self._sender.submit(self._link.hand_in, *round_)
        if not start.stop.agreed and (ends or not delayed):
            now = self._answer() or now
        if not start.stop.agreed:
            self._weights.scatter(now)
            self._anchor, self._tokens, self._begun = now, 0.0, self._step
        elif ends:
            raise Stopped(
                "stopped before the last exchange with the other replicas",
                fix="start the same command again; it continues from the last checkpoint",
            )
        if start.leads:
            seconds = round(time.monotonic() - began, 3)
            start.events.write("outer", step=self._step, seconds=seconds)

    def _answer(self) -> Weights | None:
        """The holder's weights, once it has answered what is pending. None if nothing is; or if
        the holder stops, or this replica does while it waits: the run ends after this step."""
        start = self._start
        while (state := start.together.rank_zero(self._poll)) == "waits":
            start.marks.begin("waiting for other replicas")
        pending, self._pending = self._pending, None
        if state == "stops":
            start.stop.agreed = True
        if state != "answered":
            return None
        return {} if pending is None else pending.result()

    def _poll(self) -> Literal["nothing", "waits", "answered", "stops"]:
        """The state of what is pending, on rank 0."""
        if self._pending is None:
            return "nothing"
        with suppress(TimeoutError):
            return "stops" if self._pending.result(_MARK_S) is None else "answered"
        if self._link.waits and self._start.stop.requested():
            self._link.close()
            return "stops"
        return "waits"

    def state(self) -> Iterator[StateShard]:
        """Those of the engine. Of a save inside of a round, or before its exchange, a note
        says so."""
        if self._start.leads:
            note(self._start.directory, self._step, self._begun, self._tokens)
        return self._engine.state()

    def close(self) -> None:
        """Leave the other replicas."""
        if self._start.leads:
            self._link.close()
        self._engine.close()
