"""The stages of a rank's work: data, checkpoint, reference, engine, resume, train, export."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
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
from toolkit.models.adapters.weights import AdaptedWeights
from toolkit.models.families import model_spec
from toolkit.models.weights import RandomWeights, WeightSource
from toolkit.objectives.preference import REFERENCE
from toolkit.run import jsonl
from toolkit.run.assignment import elastic_restarts
from toolkit.run.events import process_age_s
from toolkit.run.progress import ProgressReport
from toolkit.text.terminal import tell
from toolkit.train.balance import Balancer
from toolkit.train.checkpoints import RunCheckpoints
from toolkit.train.companions import companion_files, take_ends
from toolkit.train.exporting import export_last
from toolkit.train.loop import TrainingRun
from toolkit.train.outer import OuterEngine, ReplicaOrder, place
from toolkit.train.reference import RunReference
from toolkit.train.reporter import TRACKER_GRACE_S, Reporter
from toolkit.train.start import Start
from toolkit.train.step_reduction import StepReduction
from toolkit.train.watchdog import BUILDING, CountedWeights, collective_limit


def work(start: Start) -> None:
    """Train from the newest checkpoint, or from the start, to the export."""
    config, data, steps = _read_data(start)
    checkpoints = _checkpoints(start, config, data)
    found = start.together.run(lambda: checkpoints.find(config, start.marks))
    if found and start.together.rank_zero(lambda: checkpoints.have_ended(found, steps)):
        start.progress.continue_at(found.manifest)
        _watch(start, steps, checkpoints)
        _close(start, checkpoints, None)
    else:
        reference = _reference(start, config, data, steps, checkpoints, found)
        engine = _engine(start, config, checkpoints)
        if start.recipe.parallel.outer is not None:
            engine = cast(Engine, OuterEngine(engine, start, steps))
        if reference is not None:
            reference.compute(engine, start.plan.layout, start.marks)
        if found is not None:
            _resume(start, checkpoints, engine, found)
            if start.recipe.parallel.balance == "auto":
                unit = start.recipe.training.batch_unit
                start.split.resume(found.manifest.layout, unit)
                checkpoints.layout = start.split.layout
        if isinstance(engine, OuterEngine):
            engine.join()
        reporter = _watch(start, steps, checkpoints)
        samples = reference or data
        validation = {
            name: _validation_batches(start, held_out)
            for name, held_out in samples.validation.items()
        }
        batches, seed = _batches(start, samples.train, data)
        balancer = Balancer(start, model_spec(config.to_dict()).hidden)
        run = TrainingRun(
            start, engine, batches, seed, validation, checkpoints, reporter, steps, balancer
        )
        run.to_the_end(StepReduction(start.stop, start.together.group))
        _close(start, checkpoints, engine)


def _read_data(start: Start) -> tuple[PretrainedConfig, TrainingData, int]:
    """The model's config, the data, and the steps of the whole run."""
    recipe, together = start.recipe, start.together
    outer = recipe.parallel.outer
    together.run(lambda: None if outer is None else place(outer))
    start.marks.begin("reading the data")
    config = together.run(lambda: hf.build_config(recipe.model))
    data = together.leaders_first(
        lambda: build_data(recipe.data, recipe.training, config.vocab_size, start.marks.track)
    )
    take_ends(config, recipe, data)
    steps = together.run(lambda: steps_with(recipe, data.samples_per_epoch))
    if start.leads:
        for note in data.notes(steps):
            tell(note)
    return config, data, steps


def _checkpoints(start: Start, config: PretrainedConfig, data: TrainingData) -> RunCheckpoints:
    companions = {}
    if start.leads:
        companions = companion_files(start.recipe, start.directory, config, data)
    group = start.together.group
    return RunCheckpoints(start.assignment, start.ranks.rank, data, companions, group)


def _reference(
    start: Start,
    config: PretrainedConfig,
    data: TrainingData,
    steps: int,
    checkpoints: RunCheckpoints,
    found: ResumePoint | None,
) -> RunReference | None:
    """The reference model's log-probabilities, if the objective reads them.

    The engine of a run that resumes does not have the weights of the reference: what is missing
    then is computed by an engine with the run's initial ones.
    """
    if REFERENCE not in start.recipe.objective().reads:
        return None
    note, resumed = start.directory.reference, found is not None
    reference = RunReference(
        start.recipe, config, data, note, start.together, steps=steps, resumed=resumed
    )
    if resumed and reference.missing:
        start.together.rank_zero(reference.check_weights)
        engine = _engine(start, config, checkpoints, first=True)
        reference.compute(engine, start.plan.layout, start.marks)
        engine.close()
    return reference


def _engine(
    start: Start, config: PretrainedConfig, checkpoints: RunCheckpoints, *, first: bool = False
) -> Engine:
    """The engine with its initial weights: the saved ones if the run resumes, unless the run's
    `first` ones are requested."""
    together, assignment = start.together, start.assignment
    start.marks.begin("building operators")
    together.leaders_first(lambda: assignment.prepare(tell))
    start.marks.begin(BUILDING)
    weights = together.run(lambda: _counted_weights(start, config, checkpoints, first=first))
    start.marks.begin(BUILDING)
    setup = together.run(
        lambda: EngineSetup.of(
            start.recipe, start.plan, assignment.engine_config, start.ranks, config, weights
        )
    )
    return build_engine(start.plan.engine, setup)


def _counted_weights(
    start: Start, config: PretrainedConfig, checkpoints: RunCheckpoints, *, first: bool
) -> WeightSource:
    source = checkpoints.weights(config, start.marks, first=first)
    base = source.base if isinstance(source, AdaptedWeights) else source
    drawn = isinstance(base, RandomWeights)
    doing = "drawing the weights" if drawn else "loading the weights"
    return CountedWeights(source, doing, start.plan.layout, start.marks)


def _resume(
    start: Start, checkpoints: RunCheckpoints, engine: Engine, found: ResumePoint
) -> None:
    """Load optimizer states and progress."""
    start.together.run(lambda: checkpoints.load(engine, found, start.marks))
    start.progress.continue_at(found.manifest)


def _watch(start: Start, steps: int, checkpoints: RunCheckpoints) -> Reporter | None:
    """The Reporter of rank 0, None on the others. From here on, signals save before they stop
    the run, and steps have a time limit."""
    start.at_end.enter_context(start.stop)
    reporter = _reporter(start, steps, checkpoints) if start.leads else None
    start.marks.at_step(start.progress.step)
    limit = collective_limit(start.recipe.launch.hang_timeout_s)
    limit_collectives(limit, but=start.together.group)
    return reporter


def _reporter(start: Start, steps: int, checkpoints: RunCheckpoints) -> Reporter:
    step, marks, events = start.progress.step, start.marks, start.events
    seconds = round(process_age_s(), 3)
    if attempt := elastic_restarts():
        events.write(
            "restart",
            time=time.time() - seconds,
            attempt=attempt,
            reason="the launcher started all ranks again",
            from_step=step,
        )
        _report_resize(start)
    marks.hide()
    if step < steps:
        tell(marks.summary())
    events.write(
        "start",
        step=step,
        world=start.ranks.world,
        engine=start.plan.engine,
        seconds=seconds,
        phases={doing: round(s, 3) for doing, s in marks.seconds.items()},
    )
    if checkpoints.load_s is not None:
        events.write("load", step=step, seconds=round(checkpoints.load_s, 3))
    bar = ProgressReport(steps, step, marks.console)
    reporter = Reporter(start.directory, start.recipe, events, step, bar)
    start.at_end.callback(reporter.trackers.finish, TRACKER_GRACE_S)
    return reporter


def _report_resize(start: Start) -> None:
    """Write how many ranks there were before the agents met again, if `launch.elastic`, and how
    long ago a step was logged."""
    events = jsonl.read(start.directory.events)
    before = next((one for one in reversed(events) if one.get("kind") == "start"), None)
    if start.recipe.launch.elastic is None or before is None:
        return
    idle_s = None
    with suppress(OSError):
        idle_s = round(time.time() - start.directory.metrics.stat().st_mtime, 3)
    ranks = {"from": before.get("world"), "to": start.ranks.world}
    start.events.write("resize", step=start.progress.step, **ranks, idle_s=idle_s)


def _validation_batches(
    start: Start, validation: Samples
) -> Callable[[], Sequence[MicroBatch]]:
    """This rank's validation batches, built on request."""
    recipe, layout = start.recipe, start.plan.layout
    return lambda: evaluation_batches(
        validation,
        recipe.training.global_batch_size,
        recipe.evaluation.batches,
        layout.data_rank(start.ranks.rank),
        start.split.layout.micro_batches,
    )


def _batches(start: Start, samples: Samples, data: TrainingData) -> tuple[GlobalBatches, int]:
    """The global batches of all steps, and the seed of the other random numbers."""
    order, seed, outer = data.order, start.recipe.training.seed, start.recipe.parallel.outer
    if outer is not None:
        replica, _ = place(outer)
        order = ReplicaOrder(order, outer.replicas, replica)
        seed += replica << 64  # other random numbers on each replica
    return GlobalBatches(samples, order, start.recipe.training.batches), seed


def _close(start: Start, checkpoints: RunCheckpoints, engine: Engine | None) -> None:
    """Close what writes checkpoints, and export one."""
    start.marks.show()
    start.marks.begin("closing")
    checkpoints.close()
    if engine is not None:
        engine.close()
    if start.recipe.checkpoint.export:
        start.together.rank_zero(lambda: _export(start, checkpoints))


def _export(start: Start, checkpoints: RunCheckpoints) -> None:
    step = checkpoints.exported_step(start.progress.step)
    export_last(start.directory, step, start.marks)
