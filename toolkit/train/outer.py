"""The engine of a replica, which exchanges weights with the others, and its samples.

All replicas have the same layout. Each rank averages its own elements with the rank of the same
number of every other replica, so no rank ever holds more than its part. torchft finds out who
takes part, and gives a replica that comes back the anchors and momenta of another one.
"""

import hashlib
import json
import logging
import math
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import timedelta
from os import environ
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from xxhash import xxh3_64_intdigest

from toolkit.batch import MicroBatch
from toolkit.checkpoint.shards import OUTER_QUANTITIES, StateShard
from toolkit.data.order import Order
from toolkit.data.rows import Int64Array
from toolkit.engines.base import Engine, StepResult
from toolkit.errors import PlanError, RunFailed, Stopped
from toolkit.models.frozen import matching
from toolkit.recipe.schema import OuterSection
from toolkit.system.install import optional
from toolkit.text.terminal import tell
from toolkit.train.all_ranks import PREPARATION_TIMEOUT
from toolkit.train.shared import Worker

_PATIENCE_S = 300.0
"""Time that a replica waits at its start for all others, if none of them trains already."""
_HASHES = 1 << 31
_TRIES = 10
"""Exchanges that may fail one after the other."""
_MARK_S = 2.0
"""Time between two signs of life of a rank that waits for other replicas."""
_LIGHTHOUSE, _REPLICA = "TORCHFT_LIGHTHOUSE", "REPLICA_GROUP_ID"
_AGAIN = "start the same command again; it continues from the last checkpoint"


@dataclass(frozen=True)
class ReplicaOrder:
    """The samples of one replica: every so many-th one."""

    whole: Order
    replicas: int
    replica: int

    def indices(self, position: int, count: int) -> Int64Array:
        """See `Order.indices`."""
        of_all = self.whole.indices(position * self.replicas, count * self.replicas)
        return of_all[self.replica :: self.replicas]


def place(settings: OuterSection | None) -> tuple[int, str] | None:
    """The number of this replica and the address of torchft's lighthouse, as the environment
    states them. None without `parallel.outer`. Raises PlanError."""
    if settings is None:
        return None
    lighthouse, replica = environ.get(_LIGHTHOUSE), environ.get(_REPLICA)
    if replica is None or lighthouse is None:
        raise PlanError(
            f"parallel.outer: a launch starts one replica, and {_REPLICA} or {_LIGHTHOUSE} is "
            "not set",
            fix="start `torchft_lighthouse --min_replicas 1`, then each replica: "
            f"{_REPLICA}=N {_LIGHTHOUSE}=http://HOST:29510 dmt launch RECIPE --run-dir RUN-N",
        )
    if replica not in map(str, range(settings.replicas)):
        raise PlanError(
            f"{_REPLICA}: {replica}, not a number from 0 to {settings.replicas - 1}",
            fix="number the replicas of parallel.outer from 0",
        )
    url = urlsplit(lighthouse)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise PlanError(
            f"{_LIGHTHOUSE}: {lighthouse}, not http://HOST:PORT",
            fix=f"export {_LIGHTHOUSE}=http://10.0.0.1:29510",
        )
    return int(replica), lighthouse


class OuterEngine:
    """An engine that exchanges weights with the other replicas after every few steps.

    A round starts at the anchor θ, which all replicas share. The outer gradient Δ is θ minus
    the mean of their weights, and the update torch's SGD with Nesterov's momentum:
    M ← μ M + Δ; θ ← θ - lr (Δ + μ M). With `overlap: delayed`, Δ travels while the next round
    trains, and the weights are those of that round plus what the update has changed.
    """

    def __init__(
        self, engine: Engine, worker: Worker, steps: int, replica: int, lighthouse: str
    ) -> None:
        """`steps` are those of the whole run. For the others, see `place`."""
        settings = worker.recipe.parallel.outer
        assert settings is not None
        self._engine, self._worker, self._last = engine, worker, steps
        self._settings, self._replica = settings, replica
        self._delayed = settings.overlap == "delayed"
        self._step = 0
        self._anchors = [_on_host(shard.get("weight")) for shard in self._shards()]
        self._momenta = [torch.zeros_like(anchor) for anchor in self._anchors]
        self._alike = self._fingerprint()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="outer")
        self._works: list[Any] = []
        """The exchange on its way: of a weight, and each Δ."""
        self._deltas: list[Tensor] = []
        self._bases: list[Tensor] = []
        """The weights when it began."""
        self._healed = self._moved = False
        """Whether the last meeting gave this replica the state of another one, and whether it
        has changed the anchor."""
        worker.marks.begin("meeting the other replicas")
        self._manager = self._meet(lighthouse)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def _meet(self, lighthouse: str) -> Any:
        """torchft's manager of this rank. Rank 0's also speaks for the replica."""
        torchft = optional("torchft", "outer", "parallel.outer: torchft", ", or remove it")
        # A lost replica is an event, no traceback.
        logging.getLogger("torchft").setLevel(logging.CRITICAL)
        ranks, together = self._worker.ranks, self._worker.together
        near = urlsplit(lighthouse).hostname in ("localhost", "127.0.0.1", "::1")
        host = "localhost" if near else socket.gethostname()
        self._store = (
            dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
            if ranks.rank == 0
            else None
        )
        port = together.rank_zero(lambda: self._store.port if self._store else 0)
        limit = timedelta(seconds=self._worker.recipe.launch.hang_timeout_s / 2)

        def manager() -> Any:
            try:
                return torchft.Manager(
                    pg=torchft.ProcessGroupGloo(timeout=limit),
                    load_state_dict=self._take,
                    state_dict=self._give,
                    min_replica_size=1,
                    use_async_quorum=False,
                    init_sync=False,
                    timeout=limit,
                    quorum_timeout=PREPARATION_TIMEOUT,
                    rank=ranks.rank,
                    world_size=ranks.world,
                    store_addr=host,
                    store_port=port,
                    lighthouse_addr=lighthouse,
                    replica_id=f"replica_{self._replica}",
                    hostname=host,
                    max_retries=_TRIES,
                )
            except (RuntimeError, TimeoutError) as error:
                fix = f"start `torchft_lighthouse`, and export {_LIGHTHOUSE}=http://HOST:29510"
                raise RunFailed(f"no lighthouse at {lighthouse}: {error}", fix=fix) from error

        first = together.run(lambda: manager() if ranks.rank == 0 else None)
        return together.run(lambda: first or manager())

    def _shards(self) -> Iterator[StateShard]:
        """The shards of the engine inside whose weights train."""
        return filter(self._exchanges, self._engine.state())

    def _exchanges(self, shard: StateShard) -> bool:
        recipe, tensors = self._worker.recipe, {block.tensor for block in shard.blocks}
        frozen = tensors <= matching(recipe.model.freeze, tensors)
        return bool(tensors) and (shard.trains if recipe.adapter is not None else not frozen)

    def _fingerprint(self) -> int:
        """A number that is equal on ranks that may exchange weights."""
        recipe, outer = self._worker.recipe, self._settings
        stated = [
            repr([shard.blocks for shard in self._shards()]),
            (outer.replicas, outer.every_steps, outer.learning_rate, outer.momentum),
            (outer.overlap, recipe.training.seed, recipe.training.global_batch_size),
        ]
        digest = hashlib.sha256(json.dumps(stated).encode()).digest()
        return int.from_bytes(digest[:7], "big")

    def _give(self) -> dict[str, Any]:
        """The state that a replica gets when it comes back."""
        own = {"step": self._step, "alike": self._alike}
        return {**own, "anchors": self._anchors, "momenta": self._momenta}

    def _take(self, given: dict[str, Any]) -> None:
        if given["alike"] != self._alike:
            raise RunFailed(
                "the replicas cannot exchange weights: their layouts, seeds, batches or "
                "settings in parallel.outer differ",
                fix="start every replica with the same recipe and cluster",
            )
        for own, theirs in (
            (self._anchors, given["anchors"]),
            (self._momenta, given["momenta"]),
        ):
            for tensor, values in zip(own, theirs, strict=True):
                tensor.copy_(values)
        self._step, self._healed = given["step"], True

    def join(self) -> None:
        """Meet the other replicas. After `load`, if the run resumes.

        A replica that is behind takes their anchor and step. One that had stopped before an
        exchange does it now.
        """
        worker, progress = self._worker, self._worker.progress
        self._step, until = progress.step, time.monotonic() + _PATIENCE_S
        while True:
            done = self._begin(sends=False) and self._finish()
            if worker.stop.agreed:
                raise Stopped("stopped while waiting for other replicas", fix=_AGAIN)
            others, alone = self._manager.num_participants(), not (self._moved or self._healed)
            patient = worker.together.rank_zero(lambda: time.monotonic() < until)
            if done and not (alone and patient and others < self._settings.replicas):
                break
            time.sleep(0.2)
        if worker.leads:
            worker.events.write("outer", step=self._step, joined=self._replica)
        if self._step > progress.step:
            self._skip(self._step - progress.step)
        elif alone and self._step % self._settings.every_steps == 0 and self._owes():
            self._exchange()
            if worker.stop.agreed:
                message = (
                    f"stopped at step {self._step}, before an exchange with other replicas"
                )
                raise Stopped(message, fix=_AGAIN)

    def _place(self) -> int:
        """The number that torchft compares to find replicas that need another one's state.

        A hash of the step, of the anchor, which replicas of one step share, and of what must be
        alike. Of two that are not alike, one is to take the other's state, and refuses."""
        hashes = [xxh3_64_intdigest(anchor.numpy().data) for anchor in self._anchors]
        found = torch.tensor((self._alike + sum(hashes)) % _HASHES)
        dist.all_reduce(found, group=self._worker.together.group)
        return self._step * _HASHES + int(found) % _HASHES

    def _owes(self) -> bool:
        """Whether weights of any rank differ from the anchor. Collective."""
        pairs = zip(self._shards(), self._anchors, strict=True)
        differ = any(not torch.equal(one.get("weight").cpu(), anchor) for one, anchor in pairs)
        return bool(self._most([differ])[0])

    def _most(self, flags: Sequence[bool]) -> list[int]:
        """Which flags are set on any rank of this replica. Collective."""
        found = torch.tensor(flags, dtype=torch.int32)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._worker.together.group)
        return found.tolist()

    def _skip(self, steps: int) -> None:
        """Continue at the step of the other replicas."""
        progress, samples = (
            self._worker.progress,
            steps * self._worker.recipe.training.global_batch_size,
        )
        message = (
            f"replica {self._replica} continues at step {self._step} with the weights of the "
            f"others: the {samples} samples of its last {steps} steps are not trained"
        )
        if self._worker.leads:
            tell(f"parallel.outer: {message}")
            self._worker.events.write(
                "warning", source="outer", step=self._step, message=message
            )
        progress.step, progress.consumed_tokens = self._step, None
        progress.consumed_samples += samples

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        count: float,
        learning_rate: float,
        max_loss: float = math.inf,
    ) -> StepResult:
        """See `Engine.train_step`."""
        result = self._engine.train_step(micro_batches, count, learning_rate, max_loss)
        self._step += 1
        if self._step % self._settings.every_steps == 0 or self._step == self._last:
            self._exchange()
        return result

    def _exchange(self) -> None:
        """End a round. A stop while others are waited for leaves the exchange to the next
        start, after a save."""
        began, worker, ends = time.monotonic(), self._worker, self._step == self._last
        if self._works:
            self._finish()  # if it has failed, the next one sends its changes, too
        while not worker.stop.agreed and self._begin(sends=True):
            if self._healed:
                raise RunFailed(
                    f"the other replicas have continued without this one at step {self._step}",
                    fix="start it again (launch.max_restarts does), and let the lighthouse "
                    "wait longer: --join_timeout_ms",
                )
            if (self._delayed and not ends) or self._finish():
                break
        if worker.stop.agreed and ends:
            raise Stopped("stopped before the last exchange with other replicas", fix=_AGAIN)
        if worker.leads and not worker.stop.agreed:  # torchft would wait until others are lost
            seconds = round(time.monotonic() - began, 3)
            replicas = self._manager.num_participants()
            worker.events.write("outer", step=self._step, seconds=seconds, replicas=replicas)

    def _begin(self, *, sends: bool) -> bool:
        """Meet the others, and send what the weights have changed since the anchor, if this
        replica `sends` it. False: the run is to stop, and nothing was sent."""
        self._healed = False
        self._manager.load_state_dict({"step": self._place(), "batches_committed": 0})
        if not self._wait(self._manager.start_quorum, "waiting for other replicas"):
            return False
        shards = list(self._shards())
        if self._healed:
            for shard, anchor in zip(shards, self._anchors, strict=True):
                shard.put("weight", anchor)
        self._bases = [_on_host(shard.get("weight")) for shard in shards]
        weight = float(sends and not self._healed)
        changes = zip(self._anchors, self._bases, strict=True)
        self._deltas = [(anchor - base) * weight for anchor, base in changes]
        if not all(torch.isfinite(delta).all() for delta in self._deltas):
            raise RunFailed(
                f"step {self._step}: the weights are not finite, nothing is exchanged"
            )
        self._head = torch.tensor([weight])
        tensors = (self._head, *self._deltas)
        self._works = [self._manager.allreduce(tensor) for tensor in tensors]
        return True

    def _wait(self, call: Callable[[], Any], doing: str) -> bool:
        """Wait until `call` has returned on every rank. False: a stop was requested before."""
        waiting = self._thread.submit(call)
        while True:
            wait([waiting], _MARK_S)
            waits, stops = self._most([not waiting.done(), self._worker.stop.stop_requested])
            if not waits:
                _torchft(waiting.result)
                return True
            if stops:
                self._worker.stop.agreed = True
                return False
            self._worker.marks.begin(doing, step=self._step)

    def _finish(self) -> bool:
        """Wait for the exchange, move the anchor, and the weights by as much. False: a replica
        was lost meanwhile, or the run is to stop, and nothing has changed."""
        works, self._works = self._works, []
        arrived = self._wait(lambda: [work.wait() for work in works], "exchanging weights")
        if not (arrived and _torchft(self._manager.should_commit)):
            return False
        share = float(self._head)
        self._moved = share > 0
        rate, mu = self._settings.learning_rate, self._settings.momentum
        parts = (self._shards(), self._anchors, self._momenta, self._deltas, self._bases)
        for shard, anchor, momentum, delta, base in zip(*parts, strict=True):
            if self._moved:
                change = _on_host(shard.get("weight")).sub_(base)
                momentum.mul_(mu).add_(delta.div_(share))
                anchor.sub_(delta.add_(momentum, alpha=mu), alpha=rate)
                shard.put("weight", anchor + change)
        self._deltas, self._bases = [], []
        self._engine.follow_state()
        return True

    def state(self) -> Iterator[StateShard]:
        """The shards of the engine, and anchors and momenta of those that are exchanged."""
        yield from self._engine.state()
        for shard, *outer in zip(self._shards(), self._anchors, self._momenta, strict=True):
            values = dict(zip(OUTER_QUANTITIES, outer, strict=True))
            yield StateShard(shard.blocks, values, saved_here=shard.saved_here)

    def close(self) -> None:
        """Leave the other replicas."""
        self._manager.shutdown(wait=False)
        self._engine.close()


def _torchft(call: Callable[[], Any]) -> Any:
    """Call torchft and return its result. Raises RunFailed where it gives up."""
    try:
        return call()
    except (RuntimeError, TimeoutError) as error:
        raise RunFailed(f"parallel.outer: {error}", fix=_AGAIN) from error


def _on_host(values: Tensor) -> Tensor:
    """A copy in host memory."""
    return values.to("cpu", copy=True)
