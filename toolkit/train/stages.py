"""A rank's work in stages: data, checkpoint, reference, engine, resume, train, export."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import cast

from transformers import PretrainedConfig

from toolkit.batch import MicroBatch
from toolkit.checkpoint.resume import ResumePoint
from toolkit.data.batches import GlobalBatches, evaluation_batches
from toolkit.data.build import TrainingData, build_data
from toolkit.data.rows import Samples
from toolkit.engines.base import Engine
from toolkit.engines.build import build_engine
from toolkit.engines.distributed import limit_collectives
from toolkit.engines.setup import EngineSetup
from toolkit.intake.checks import steps_with
from toolkit.models import huggingface as hf
from toolkit.models.families import model_spec
from toolkit.objectives.preference import REFERENCE
from toolkit.run import jsonl
from toolkit.run.assignment import elastic_restarts
from toolkit.run.events import process_age_s
from toolkit.run.progress import ProgressReport
from toolkit.text.terminal import tell
from toolkit.train.balance import Balancer
from toolkit.train.checkpoints import RunCheckpoints
from toolkit.train.exporting import companion_files, export_last, take_ends
from toolkit.train.loop import TrainingRun
from toolkit.train.outer import OuterEngine, ReplicaOrder, place
from toolkit.train.reference import RunReference
from toolkit.train.reporter import TRACKER_GRACE_S, Reporter
from toolkit.train.shared import Worker
from toolkit.train.step_reduction import StepReduction
from toolkit.train.watchdog import CountedWeights, collective_limit


class Stages(Worker):
    """A worker with the stages of its work."""

    config: PretrainedConfig
    """The model's config."""
    data: TrainingData
    steps: int
    """Steps of the whole run."""
    replica: tuple[int, str] | None
    """See `place`. Rank 0's environment decides, so that all ranks of a replica train its
    samples."""
    checkpoints: RunCheckpoints

    def work(self) -> None:
        """Train from the newest checkpoint, or from the start, to the export."""
        self._read_data()
        config, checkpoints = self.config, self.checkpoints
        found = self.together.run(lambda: checkpoints.find(config, self.marks))
        if found and self.together.rank_zero(lambda: checkpoints.have_ended(found, self.steps)):
            self.progress.continue_at(found.manifest)
            self._watch()
            self._close(None)
            return
        reference = self._reference(found)
        engine = self._engine()
        if self.replica is not None:
            engine = cast(Engine, OuterEngine(engine, self, self.steps, *self.replica))
        if reference is not None:
            reference.compute(engine, self.plan.layout, self.marks)
        if found is not None:
            self.together.run(lambda: checkpoints.load(engine, found, self.marks))
            self.progress.continue_at(found.manifest)
            if self.recipe.parallel.balance == "auto":
                self.split.resume(found.manifest.layout, self.recipe.training.batch_unit)
                checkpoints.layout = self.split.layout
        if isinstance(engine, OuterEngine):
            engine.join()
        reporter = self._watch()
        samples = reference or self.data
        validation = {
            name: self._validation_batches(held_out)
            for name, held_out in samples.validation.items()
        }
        batches, seed = self._batches(samples.train)
        balancer = Balancer(self, model_spec(config.to_dict()).hidden)
        run = TrainingRun(
            self, engine, batches, seed, validation, checkpoints, reporter, self.steps, balancer
        )
        run.to_the_end(StepReduction(self.stop, self.together.group))
        self._close(engine)

    def _read_data(self) -> None:
        """Read config and data, and look at the checkpoints."""
        recipe, together = self.recipe, self.together
        self.replica = together.rank_zero(lambda: place(recipe.parallel.outer))
        self.marks.begin("reading the data")
        self.config = config = together.run(lambda: hf.build_config(recipe.model))
        training, track = recipe.training, self.marks.track
        self.data = data = together.leaders_first(
            lambda: build_data(recipe.data, training, config.vocab_size, track)
        )
        take_ends(config, recipe, data)
        self.steps = together.run(lambda: steps_with(recipe, data.samples_per_epoch))
        companions = {}
        if self.leads:
            for note in data.notes(self.steps):
                tell(note)
            companions = companion_files(recipe, self.directory, config, data)
        self.checkpoints = RunCheckpoints(
            self.assignment, self.ranks.rank, data, companions, together.group
        )

    def _reference(self, found: ResumePoint | None) -> RunReference | None:
        """The reference model's log-probabilities, if the objective reads them.

        The engine of a run that resumes does not have the weights of the reference: what is
        missing then is computed by an engine with the run's initial ones.
        """
        if REFERENCE not in self.recipe.objective().reads:
            return None
        reference = RunReference(
            self.recipe, self.config, self.data, self.directory.reference, self.together,
            steps=self.steps, resumed=found is not None,
        )  # fmt: skip
        if found is not None and reference.missing:
            self.together.rank_zero(reference.check_weights)
            engine = self._engine(first=True)
            reference.compute(engine, self.plan.layout, self.marks)
            engine.close()
        return reference

    def _engine(self, *, first: bool = False) -> Engine:
        """The engine with its initial weights: the saved ones if the run resumes, unless the
        run's `first` ones are requested."""
        together, marks = self.together, self.marks
        marks.begin("building operators")
        together.leaders_first(lambda: self.assignment.prepare(tell))
        marks.begin("finding the weights")
        weights = together.run(
            lambda: self.checkpoints.weights(self.config, marks, first=first)
        )
        engine_config = self.assignment.engine_config
        setup = together.run(
            lambda: EngineSetup.of(
                self.recipe, self.plan, engine_config, self.ranks, self.config, weights
            )
        )
        # After the ranks have waited for each other, which is a phase, too.
        counted = CountedWeights(weights, marks.begin("building the model"))
        return build_engine(self.plan.engine, replace(setup, weights=counted))

    def _watch(self) -> Reporter | None:
        """The Reporter of rank 0, None on the others. From here on, signals save before they
        stop the run, and steps have a time limit."""
        self.at_end.enter_context(self.stop)
        reporter = self._reporter() if self.leads else None
        self.marks.at_step(self.progress.step)
        limit = collective_limit(self.recipe.launch.hang_timeout_s)
        limit_collectives(limit, but=self.together.group)
        return reporter

    def _reporter(self) -> Reporter:
        step, marks, events = self.progress.step, self.marks, self.events
        seconds = round(process_age_s(), 3)
        if attempt := elastic_restarts():
            events.write(
                "restart",
                time=time.time() - seconds,
                attempt=attempt,
                reason="the launcher started all ranks again",
                from_step=step,
            )
            self._report_resize()
        marks.hide()
        if step < self.steps:
            tell(marks.summary())
        events.write(
            "start",
            step=step,
            world=self.ranks.world,
            engine=self.plan.engine,
            seconds=seconds,
            phases={doing: round(s, 3) for doing, s in marks.seconds.items()},
        )
        if (load_s := self.checkpoints.load_s) is not None:
            events.write("load", step=step, seconds=round(load_s, 3))
        bar = ProgressReport(self.steps, step, marks.console)
        reporter = Reporter(self.directory, self.recipe, events, step, bar)
        self.at_end.callback(lambda: reporter.trackers.finish(TRACKER_GRACE_S, self.exit_code))
        return reporter

    def _report_resize(self) -> None:
        """Write how many ranks there were before the agents met again, if `launch.elastic`, and
        how long ago a step was logged."""
        events = jsonl.read(self.directory.events)
        before = next((one for one in reversed(events) if one.get("kind") == "start"), None)
        if self.recipe.launch.elastic is None or before is None:
            return
        idle_s = None
        with suppress(OSError):
            idle_s = round(time.time() - self.directory.metrics.stat().st_mtime, 3)
        ranks = {"from": before.get("world"), "to": self.ranks.world}
        self.events.write("resize", step=self.progress.step, **ranks, idle_s=idle_s)

    def _validation_batches(self, validation: Samples) -> Callable[[], Sequence[MicroBatch]]:
        """This rank's validation batches, built on request."""
        recipe = self.recipe
        return lambda: evaluation_batches(
            validation,
            recipe.training.global_batch_size,
            recipe.evaluation.batches,
            self.plan.layout.data_rank(self.ranks.rank),
            self.split.layout.micro_batches,
        )

    def _batches(self, samples: Samples) -> tuple[GlobalBatches, int]:
        """The global batches of all steps, and the seed of the other random numbers."""
        training, outer = self.recipe.training, self.recipe.parallel.outer
        order, seed = self.data.order, training.seed
        if outer is not None and self.replica is not None:
            replica, _ = self.replica
            order = ReplicaOrder(order, outer.replicas, replica)
            seed += replica << 64  # other random numbers on each replica
        return GlobalBatches(samples, order, training.batches), seed

    def _close(self, engine: Engine | None) -> None:
        """Close what writes checkpoints, and export one."""
        self.marks.show()
        self.marks.begin("closing")
        self.checkpoints.close()
        if engine is not None:
            engine.close()
        if self.recipe.checkpoint.export:
            self.together.rank_zero(self._export)

    def _export(self) -> None:
        step = self.checkpoints.exported_step(self.progress.step)
        export_last(self.directory, step, self.marks)
