"""A replica's part of the outer loop: an engine around its own, and the order of samples."""

import math
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from toolkit.batch import MicroBatch
from toolkit.checkpoint.shards import StateShard
from toolkit.data.order import Order
from toolkit.data.rows import Int64Array
from toolkit.engines.base import Counters, Engine, EvalResult, StepResult
from toolkit.errors import PlanError, Stopped
from toolkit.extras.outer import OuterSection
from toolkit.extras.outer.link import HolderLink
from toolkit.extras.outer.rectangles import Rectangles, Values, by_key, in_order
from toolkit.extras.outer.wire import Floats
from toolkit.text.terminal import tell
from toolkit.train.dropout_seed import seed_dropout

if TYPE_CHECKING:
    from toolkit.train.start import Start

_MARK_S = 2.0
"""Time between two signs of life of a rank that waits for other replicas."""


@dataclass(frozen=True)
class OfReplica:
    """The samples of one replica: of every global batch of all, its part."""

    whole: Order
    batch: int
    """Samples of a replica in each global batch."""
    replicas: int
    replica: int

    def indices(self, position: int, count: int) -> Int64Array:
        """See `Order.indices`."""
        found, end = [np.zeros(0, np.int64)], position + count
        while position < end:
            number, within = divmod(position, self.batch)
            size = min(self.batch - within, end - position)
            first = (number * self.replicas + self.replica) * self.batch + within
            found.append(self.whole.indices(first, size))
            position += size
        return np.concatenate(found)


def order(whole: Order, settings: OuterSection) -> Order:
    """The order of this replica's samples."""
    replica, _ = _place(settings)
    assert settings.whole_batch is not None, "the recipe is resolved"
    return OfReplica(
        whole, settings.whole_batch // settings.replicas, settings.replicas, replica
    )


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
    return OuterEngine(engine, settings, start)


class OuterEngine(Engine):
    """An engine that exchanges its weights with other replicas after every few steps."""

    def __init__(self, engine: Engine, settings: OuterSection, start: "Start") -> None:
        self._engine, self._settings, self._start = engine, settings, start
        replica, holder = _place(settings)
        together = start.together
        self._rectangles = Rectangles(engine, start.recipe, together.group)
        self._last = start.recipe.total_steps()
        self._link = HolderLink(holder, start.recipe.name, replica, settings)
        self._pending: _HandIn | None = None
        start.phases.begin("joining the other replicas")
        step, shapes = start.progress.step, self._rectangles.shapes
        joined: dict[str, Any] = together.rank_zero(
            lambda: self._link.join(start.ranks.world, step, shapes)
        )
        together.run(lambda: self._link.agree(self._rectangles.sends, self._rectangles.takes))
        self._step, self._tokens = int(joined["step"]), float(joined["tokens"])
        self._anchor = self._joined(joined)
        """The weights that the present round began with, of `takes`."""
        if joined["owes"]:
            self._exchange()
            if start.stop.agreed:
                raise Stopped(
                    f"stopped at step {self._step}, before an exchange with other replicas",
                    fix="start the same command again; it continues with the exchange",
                )

    def _joined(self, joined: dict[str, Any]) -> Values:
        """Give the holder its first weights, or take those of the present round."""
        parts, start = self._rectangles, self._start
        if joined["gives"]:
            own = parts.read()
            self._link.give(in_order(own, parts.sends))
            return own
        if not self._step:
            return parts.read()
        held = by_key(parts.takes, self._link.take())
        if joined["takes"]:
            parts.write(held)
            self._skip_to(self._step)
        if lost := joined["lost"]:
            message = (
                f"replica {self._settings.replica} continues with the holder's weights: what "
                f"its last {lost} steps have changed had not arrived there, and is lost"
            )
            self._warn(message, lost=lost)
        if start.leads:
            start.events.write("outer", step=self._step, joined=self._settings.replica)
        return held

    def _warn(self, message: str, **fields: int) -> None:
        if self._start.leads:
            tell(f"parallel.outer: {message}")
            self._start.events.write(
                "warning", source="outer", step=self._step, message=message, **fields
            )

    def _skip_to(self, step: int) -> None:
        """Continue at the holder's step: samples until then are not trained."""
        progress, batch = self._start.progress, self._start.recipe.training.global_batch_size
        if skipped := step - progress.step:
            self._warn(
                f"replica {self._settings.replica} joins at step {step} with the holder's "
                f"weights: the {skipped * batch} samples of its last {skipped} steps are not "
                "trained"
            )
            progress.consumed_samples += skipped * batch
            progress.step, progress.consumed_tokens = step, None

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        count: float,
        learning_rate: float,
        max_loss: float = math.inf,
    ) -> StepResult:
        self._seed_dropout()
        result = self._engine.train_step(micro_batches, count, learning_rate, max_loss)
        self._step += 1
        if result.skipped is None:
            self._tokens += count
        if self._step % self._settings.every_steps == 0 or self._step == self._last:
            self._exchange()
        return result

    def _seed_dropout(self) -> None:
        """Another stream on each replica than the loop's, which is a plain run's."""
        start, (replica, _) = self._start, _place(self._settings)
        seed = start.recipe.training.seed + (replica << 64)
        seed_dropout(seed, self._step, start.plan.layout.token_rank(start.ranks.rank))

    def _exchange(self) -> None:
        """End a round: hand in how the weights have changed, and get the new ones."""
        began, parts = time.monotonic(), self._rectangles
        now = parts.read()
        change = {key: now[key] - self._anchor[key] for key in now}
        delayed = self._settings.overlap == "delayed"
        if delayed and self._pending is not None:
            held = self._answer(self._pending)
            now = {key: held[key] + change[key] for key in held} if held else now
        self._pending = _HandIn(
            self._link, self._step, self._tokens, in_order(change, parts.sends)
        )
        if not delayed or self._step == self._last:
            now = self._answer(self._pending) or now
            self._pending = None
        if not self._start.stop.agreed:
            parts.write(now)
            self._anchor, self._tokens = now, 0.0
        elif self._step == self._last:
            raise Stopped(
                "stopped before the last exchange with the other replicas",
                fix="start the same command again; it continues from the last checkpoint",
            )
        if self._start.leads:
            seconds = round(time.monotonic() - began, 3)
            self._start.events.write("outer", step=self._step, seconds=seconds)

    def _answer(self, pending: "_HandIn") -> Values | None:
        """The holder's weights. None if it stops, or this replica does while it waits: then the
        run ends after this step."""
        self._start.watchdog.hear("waiting for other replicas")
        asked = False
        while pending.waits(_MARK_S):
            self._start.watchdog.hear("waiting for other replicas")
            if not asked and self._start.stop.requested():
                self._link.stop(pending.step)
                asked = True
        held = pending.result()
        if held is None:
            self._start.stop.agreed = True
            return None
        return by_key(self._rectangles.takes, held)

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> EvalResult:
        return self._engine.evaluate(micro_batches)

    def sequence_log_probs(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        return self._engine.sequence_log_probs(micro_batches)

    def replicated_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self._engine.replicated_weights()

    def state(self) -> Iterator[StateShard]:
        """Those of the engine. A save inside of a round also records its tokens."""
        if self._start.leads and self._tokens and self._pending is None:
            self._link.note(self._step, self._tokens)
        return self._engine.state()

    def follow_state(self) -> None:
        self._engine.follow_state()

    def counters(self) -> Counters:
        return self._engine.counters()

    def set_counters(self, counters: Counters) -> None:
        self._engine.set_counters(counters)

    def close(self) -> None:
        self._link.close()
        self._engine.close()


class _HandIn(threading.Thread):
    """Hands a round in while the rank does something else."""

    def __init__(self, to: HolderLink, step: int, tokens: float, change: list[Floats]) -> None:
        super().__init__(daemon=True)
        self.step = step
        self._hand_in = partial(to.hand_in, step, tokens, change)
        self._held: list[Floats] | None = None
        self._error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self._held = self._hand_in()
        except Exception as error:  # noqa: BLE001 - raised where the result is asked for
            self._error = error

    def waits(self, seconds: float) -> bool:
        """Whether there is no result after this time."""
        self.join(seconds)
        return self.is_alive()

    def result(self) -> list[Floats] | None:
        """What `HolderLink.hand_in` has returned, or raised."""
        self.join()
        if self._error is not None:
            raise self._error
        return self._held
