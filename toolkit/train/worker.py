"""The worker: one rank of a run, under any launcher.

`train_run_directory` continues from a run directory that `dmt launch` wrote. `train_recipe` is
for launchers that start the worker themselves: rank 0 plans, writes the run directory and
broadcasts recipe and plan, so that no shared disk is needed.
"""

import logging
import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers import PretrainedConfig

from toolkit.adapters.weights import AdaptedWeights
from toolkit.batch import MicroBatch
from toolkit.checkpoint.export import COMPANIONS, DTYPES
from toolkit.checkpoint.resume import Found
from toolkit.data.batches import GlobalBatches, evaluation_batches
from toolkit.data.build import TrainingData, build_data
from toolkit.data.lengths import cut
from toolkit.data.remote.store import RETRIES
from toolkit.data.rows import Samples
from toolkit.data.streaming.ahead import AheadWorkers
from toolkit.data.streaming.streams import Streams
from toolkit.engines import deterministic
from toolkit.engines.base import Engine
from toolkit.engines.distributed import Ranks, join, leave, limit_collectives, rank_here
from toolkit.engines.setup import EngineSetup, build_engine
from toolkit.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    BackendUnavailable,
    DmtError,
    RunFailed,
    Stopped,
)
from toolkit.failpoints import failpoint
from toolkit.intake.checks import steps_with
from toolkit.models import huggingface as hf
from toolkit.models.weights import RandomWeights, WeightSource
from toolkit.objectives.dpo import REFERENCE
from toolkit.recipe.lengths import SequenceLengths
from toolkit.run.announce import show_results
from toolkit.run.assignment import Assignment, assign, elastic_restarts, read_assignment
from toolkit.run.claim import claim
from toolkit.run.directory import RunDirectory
from toolkit.run.ending import PEER_LOST, cause_of, events_offset
from toolkit.run.events import EventLog, process_age_s
from toolkit.run.rank_log import setup_rank_logging
from toolkit.terminal import survive_lost_output, tell
from toolkit.track.progress import ProgressReport
from toolkit.train.all_ranks import AllRanks, PeerFailed
from toolkit.train.checkpoints import RunCheckpoints
from toolkit.train.exporting import add_turn_ends, export_last
from toolkit.train.gpu_memory import out_of_memory
from toolkit.train.loop import Progress, TrainingRun, train
from toolkit.train.observer import Observed, Observer, Reporter
from toolkit.train.phases import BUILDING, WAITING, CountedWeights, Phases
from toolkit.train.reference import RunReference
from toolkit.train.signals import StopRequest
from toolkit.train.watchdog import Watchdog, Watched, collective_limit, replayed

logger = logging.getLogger(__name__)

_PEER_LOST = re.compile(r"gloo/transport|by peer|ncclRemoteError|NCCL communicator was aborted")
"""Text in PyTorch's errors about a collective whose peer died."""

_INTERRUPTED = "ended by the third Ctrl-C; what was being saved is not a checkpoint"

PEER_FAILED_PAUSE_S = 1.0
"""How much later than the rank with the message the others exit."""


def train_run_directory(path: Path) -> int:
    """Train as the run directory states; return the exit code of this rank."""
    return _guarded(lambda ranks: read_assignment(path, ranks.world))


def train_recipe(recipe: Path, overrides: Sequence[str], run_dir: Path | None) -> int:
    """Plan a recipe for the ranks that a launcher started, and train it."""
    return _guarded(lambda ranks: assign(recipe, overrides, run_dir, sys.argv, ranks.world))


def _guarded(make_assignment: Callable[[Ranks], Assignment]) -> int:
    """Run one rank and turn every outcome into an exit code, a log line and an event."""
    survive_lost_output()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    logging.captureWarnings(True)
    # Until training starts there is nothing to save: Ctrl-C ends the process at once.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    worker: _Worker | None = None
    try:
        with Phases(rank_here()) as phases:
            phases.begin(WAITING)
            ranks = join()
            together = AllRanks(ranks, phases.begin)
            phases.begin("planning")
            assignment = together.rank_zero(lambda: make_assignment(ranks))
            _check_device(assignment, ranks)
            if assignment.recipe.training.deterministic:
                deterministic.switch_on(os.environ, on_gpu=ranks.device.type == "cuda")
            directory = RunDirectory(assignment.run_dir)
            together.rank_zero(lambda: claim(directory))
            setup_rank_logging(directory, ranks.rank)
            worker = _Worker(assignment, ranks, together, phases)
            worker.run()
            return worker.end(EXIT_DONE)
    except PeerFailed as error:
        # Launchers terminate all ranks at the first exit: the rank with the message exits
        # first.
        time.sleep(PEER_FAILED_PAUSE_S)
        return error.code
    except Stopped as error:
        assert worker is not None, "only training is stopped"
        worker.record_signal()
        if worker.ranks.rank == 0:
            tell(f"dmt: {error}")
        return worker.end(error.exit_code)
    except KeyboardInterrupt:
        # Python's normal exit would join the thread of the hanging save.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        tell(f"error: {_INTERRUPTED}")
        if worker is not None:
            worker.record_end(exit_code=EXIT_FAILED, error=_INTERRUPTED)
        return EXIT_FAILED
    except Exception as error:  # noqa: BLE001 - the last resort: every failure is reported
        error = _explained(error, worker)
        code, message = _failure(error)
        cause = worker.cause() if worker is not None and message == PEER_LOST else None
        tell(f"error: {cause or message}")
        if worker is not None:
            worker.fail(error, code, message)
        return code


def _check_device(assignment: Assignment, ranks: Ranks) -> None:
    """Raise BackendUnavailable if a run that was planned for GPUs finds none."""
    gpu = assignment.recipe.cluster.gpu
    if gpu != "cpu" and ranks.device.type == "cpu":
        raise BackendUnavailable(
            f"cluster.gpu is {gpu}, but torch finds no GPU on this machine",
            fix="`dmt doctor` shows why; to train on the CPU: --set cluster.gpu=cpu",
        )


def _failure(error: Exception) -> tuple[int, str]:
    """Exit code and message of a failure; the traceback is logged unless it is the user's
    mistake."""
    error = deterministic.as_users_mistake(error) or error
    if isinstance(error, DmtError):
        return error.exit_code, str(error)
    if _PEER_LOST.search(str(error)):
        logger.info("a collective failed", exc_info=error)  # for the log, not the terminal
        return EXIT_FAILED, PEER_LOST
    logger.error("training failed", exc_info=error)
    return EXIT_FAILED, f"{type(error).__name__}: {error}"


def _explained(error: Exception, worker: "_Worker | None") -> Exception:
    """The failure, or if memory ran out, an error that states where and what held it.

    Another start is worth while only after a step of this one.
    """
    if isinstance(error, DmtError):
        return error
    doing = worker.doing if worker is not None else "starting"
    stepped = worker is not None and worker.has_stepped
    explained = out_of_memory(error, doing, retry=stepped)
    if explained is not None:
        logger.error("out of memory", exc_info=error)
    return explained or error


class _Worker:
    """One rank's work, from data to export."""

    def __init__(
        self, assignment: Assignment, ranks: Ranks, together: AllRanks, phases: Phases
    ) -> None:
        self.assignment = assignment
        self.ranks = ranks
        self.together = together
        self.phases = phases
        self.directory = RunDirectory(assignment.run_dir)
        self.progress = Progress()
        self._events_before = events_offset(assignment.run_dir)
        self._stop: StopRequest | None = None
        self._watchdog: Watchdog | None = None
        self._watching = ExitStack()
        """Ends with the process: a rank that cannot exit hangs, too."""
        self._at_end = ExitStack()
        """Closed after the `end` event is written, which W&B reads."""

    def run(self) -> None:
        """Train from the newest checkpoint, or from the start, to the export."""
        recipe = self.assignment.recipe
        self.phases.begin("reading the data")
        config = self.together.run(lambda: hf.build_config(recipe.model))
        data = self._build_data(config)
        if recipe.model.init != "pretrained":
            config.eos_token_id = data.tokenizer.eos_token_id
            config.bos_token_id = data.tokenizer.bos_token_id
        steps = self.together.run(
            lambda: steps_with(recipe, data.samples_per_epoch, data.ends_after)
        )
        if self.ranks.rank == 0:
            wanted = recipe.lengths.total_steps(recipe.training, data.samples_per_epoch)
            for note in data.notes(steps, wanted):
                tell(note)
        checkpoints = self._checkpoints(config, data)
        found = self.together.run(lambda: checkpoints.find(config, self.phases))
        engine: Engine | None = None
        train_samples: Samples = data.train
        validation: Mapping[str, Samples] = data.validation
        if found and self.together.rank_zero(lambda: checkpoints.have_ended(found, steps)):
            self.progress = checkpoints.take(found)
        else:
            if data.streams is not None:
                self._open_streams(data.streams, data.lengths, found)
            reference = self._reference(config, data, steps, resumed=found is not None)
            if reference is not None:
                self._compute_lost(reference, config, checkpoints, resumed=found is not None)
                train_samples, validation = reference.train, reference.validation
            engine = self._build_engine(config, checkpoints)
            if reference is not None:
                reference.compute(engine, self.assignment.plan.layout, self.phases)
            if found is not None:
                load = partial(checkpoints.load, engine, found, self.phases)
                self.progress = self.together.run(load)

        self._stop = stop = self._at_end.enter_context(self._stop_request())
        self._watchdog = watchdog = self._new_watchdog(stop)
        reporter = self._start_reporter(self.progress, steps, checkpoints)
        self._watching.enter_context(watchdog)
        limit = collective_limit(recipe.launch.hang_timeout_s)
        limit_collectives(limit, but=self.together.group)
        self.phases.heard = watchdog.hear
        if engine is not None:
            observer = Observer(self._observed(engine, validation, checkpoints), reporter)
            batches = GlobalBatches(
                train_samples, data.order, recipe.training.global_batch_size, data.lengths
            )
            self._train(self._job(engine, batches, steps), observer, watchdog, stop)
        self.phases.show()
        self.phases.begin("closing")
        checkpoints.close()
        if engine is not None:
            engine.close()
        if recipe.checkpoint.export:
            self.together.rank_zero(
                lambda: export_last(self.directory, self.progress.step, self.phases)
            )

    def _train(
        self, job: TrainingRun, observer: Observer, watchdog: Watchdog, stop: StopRequest
    ) -> None:
        """Run the remaining steps, save, validate, and compare with the plan."""
        progress, checkpoints = self.progress, observer.run.checkpoints
        watchdog.mark(f"step {progress.step + 1}", progress.step)
        with observer.reporter.progress if observer.reporter is not None else nullcontext():
            try:
                train(job, progress, Watched(observer, watchdog), stop)
            except (RunFailed, PeerFailed):
                checkpoints.tell(wait=True)  # raised on every rank: the save in flight is good
                raise
            # A signal from here on has no effect: the rest is short. Saving comes first, so
            # that a kill loses no step.
            observer.save_now(progress)
            observer.evaluate_now(progress)
            observer.compare(progress)

    def end(self, code: int) -> int:
        """Record a successful end; no rank exits before rank 0's reports are written."""
        self.phases.begin("finishing the logs")
        failpoint("leaving")
        self._report_retries()
        if self.ranks.rank == 0:
            self.record_end(exit_code=code)
        self._at_end.close()
        dist.barrier(self.together.group)
        leave()
        self._watching.close()
        self.phases.hide()
        if self.ranks.rank == 0:
            show_results(self.directory, self._events_before, done=code == EXIT_DONE)
        return code

    def _stop_request(self) -> StopRequest:
        file = self.directory.stop if self.ranks.rank == 0 else None
        return StopRequest(file, self.together.group)

    @property
    def doing(self) -> str:
        """What this rank began last."""
        return self._watchdog.doing if self._watchdog is not None else self.phases.last

    @property
    def has_stepped(self) -> bool:
        """Whether this start has completed a training step."""
        return self._watchdog is not None and self._watchdog.has_stepped

    def record_signal(self) -> None:
        """Record what stopped the run, on the ranks that received the request."""
        if self._stop is not None and (name := self._stop.reason):
            EventLog(self.directory.events).write(
                "signal", rank=self.ranks.rank, step=self.progress.step, signal=name
            )

    def cause(self) -> str | None:
        """Why another rank failed, if it reported a reason."""
        return cause_of(self.directory.path, self._events_before)

    def fail(self, error: Exception, code: int, message: str) -> None:
        """Record this rank's failure, without waiting for ranks that may never arrive."""
        self._report_retries()
        retry = {} if getattr(error, "retry", True) else {"retry": False}
        self.record_end(exit_code=code, error=message, **retry)
        self._at_end.__exit__(type(error), error, error.__traceback__)

    def _report_retries(self) -> None:
        """Report how often this rank had to retry reading data."""
        if count := RETRIES.count:
            said = f"{count} reads of remote data failed and were tried again"
            EventLog(self.directory.events).write(
                "warning", source="data", rank=self.ranks.rank, message=said, count=count
            )
            tell(f"data: {said} (rank {self.ranks.rank})")

    def record_end(self, **fields: Any) -> None:
        """Write the `end` event of this rank."""
        EventLog(self.directory.events).write(
            "end", rank=self.ranks.rank, step=self.progress.step, **fields
        )

    def _start_reporter(
        self, progress: Progress, steps: int, checkpoints: RunCheckpoints
    ) -> Reporter | None:
        """Rank 0's outputs; None on the other ranks."""
        if self.ranks.rank != 0:
            return None
        recipe, world = self.assignment.recipe, self.ranks.world
        engine = self.assignment.plan.engine
        events = EventLog(self.directory.events)
        seconds = round(process_age_s(), 3)
        if attempt := elastic_restarts():
            events.write(
                "restart",
                time=time.time() - seconds,
                attempt=attempt,
                reason="the launcher's elastic agent started all ranks again",
                from_step=progress.step,
            )
        self.phases.hide()
        if progress.step < steps:
            tell(self.phases.summary())
        phases = {doing: round(s, 3) for doing, s in self.phases.seconds.items()}
        events.write(
            "start",
            step=progress.step,
            world=world,
            engine=engine,
            seconds=seconds,
            phases=phases,
        )
        if checkpoints.load_s is not None:
            events.write("load", step=progress.step, seconds=round(checkpoints.load_s, 3))
        if lost := replayed(self.directory.heartbeats, progress.step):
            events.write("replay", **lost)
        bar = ProgressReport(steps, progress.step, self.phases.console)
        reporter = Reporter(self.directory, recipe, events, progress.step, bar)
        self._at_end.callback(reporter.finish)
        return reporter

    def _new_watchdog(self, stop: StopRequest) -> Watchdog:
        launch = self.assignment.recipe.launch
        return Watchdog(
            self.directory,
            self.ranks.rank,
            self.ranks.world,
            self.progress.step,
            stop,
            launch.hang_timeout_s,
            launch.grace_s,
        )

    def _job(self, engine: Engine, batches: GlobalBatches, steps: int) -> TrainingRun:
        recipe, plan = self.assignment.recipe, self.assignment.plan
        training = recipe.training
        return TrainingRun(
            engine,
            batches,
            plan.layout,
            plan.layout.data_rank(self.ranks.rank),
            training.seed,
            steps,
            recipe.optimizer,
            recipe.schedule,
            recipe.guard,
            recipe.objective(),
        )

    def _build_data(self, config: PretrainedConfig) -> TrainingData:
        recipe = self.assignment.recipe
        return self.together.leaders_first(
            lambda: build_data(
                recipe.data,
                sequence_length=recipe.training.sequence_length,
                global_batch_size=recipe.training.global_batch_size,
                seed=recipe.training.seed,
                vocab_size=config.vocab_size,
                base=Path.cwd(),
                track=self.phases.track,
            )
        )

    def _open_streams(
        self, streams: Streams, lengths: SequenceLengths, found: Found | None
    ) -> None:
        """Tokenise the windows of the first samples, and start tokenising ahead."""
        batch, samples = self.assignment.recipe.training.global_batch_size, 0
        if found is not None:
            samples = found.manifest.consumed_samples
            self.together.run(lambda: streams.continue_at(found.manifest.streams))
        self.phases.begin("tokenising the first samples")
        if self.ranks.local_rank == 0:
            workers = streams.section.workers
            ahead = AheadWorkers(streams.sources, workers, streams.advance)
            self._at_end.enter_context(ahead)
            streams.report(lambda _: ahead.want())
        if self.ranks.rank == 0:
            events = EventLog(self.directory.events)
            streams.report(lambda window: events.write("window", **asdict(window)))
        first, behind = lengths.block_of(samples), lengths.blocks(samples + batch)
        self.together.leaders_first(lambda: streams.open(first, behind - first))

    def _reference(
        self, config: PretrainedConfig, data: TrainingData, steps: int, *, resumed: bool
    ) -> RunReference | None:
        """The reference's log-probabilities, if the objective reads them."""
        recipe = self.assignment.recipe
        if REFERENCE not in recipe.objective().reads:
            return None
        note = self.directory.reference
        return RunReference(
            recipe, config, data, note, self.together, steps=steps, resumed=resumed
        )

    def _compute_lost(
        self,
        reference: RunReference,
        config: PretrainedConfig,
        checkpoints: RunCheckpoints,
        *,
        resumed: bool,
    ) -> None:
        """In a run that continues, the engine to come has other weights than the reference."""
        if resumed and reference.missing:
            self.together.rank_zero(reference.check_weights)
            engine = self._build_engine(config, checkpoints, first=True)
            reference.compute(engine, self.assignment.plan.layout, self.phases)
            engine.close()

    def _build_engine(
        self, config: PretrainedConfig, checkpoints: RunCheckpoints, *, first: bool = False
    ) -> Engine:
        """The engine with its initial weights: the saved ones if the run resumes, unless the
        run's first ones are requested."""
        recipe, plan = self.assignment.recipe, self.assignment.plan
        engine_config = self.assignment.engine_config
        self.phases.begin("building operators")
        self.together.leaders_first(lambda: self.assignment.prepare(tell))
        self.phases.begin(BUILDING)
        weights = self.together.run(lambda: self._weights(config, checkpoints, first=first))
        self.phases.begin(BUILDING)
        setup = self.together.run(
            lambda: EngineSetup.of(recipe, plan, engine_config, self.ranks, config, weights)
        )
        return build_engine(plan.engine, setup)

    def _weights(
        self, config: PretrainedConfig, checkpoints: RunCheckpoints, *, first: bool
    ) -> WeightSource:
        source = checkpoints.weights(config, self.phases, first=first)
        base = source.base if isinstance(source, AdaptedWeights) else source
        drawn = isinstance(base, RandomWeights)
        doing = "drawing the weights" if drawn else "loading the weights"
        return CountedWeights(source, doing, self.assignment.plan.layout, self.phases)

    def _checkpoints(self, config: PretrainedConfig, data: TrainingData) -> RunCheckpoints:
        companions = {}
        if self.ranks.rank == 0:
            recipe = self.assignment.recipe
            dtype = DTYPES.get(recipe.training.precision, torch.float32)
            with TemporaryDirectory() as folder:
                stated = recipe.model.config
                hf.save_companions(config, dtype, Path(folder), self._base_model(), stated)
                self._save_tokenizer(data, Path(folder))
                add_turn_ends(recipe, data.tokenizer, Path(folder))
                files = sorted(Path(folder).iterdir())
                companions = {f"{COMPANIONS}/{file.name}": file.read_bytes() for file in files}
        return RunCheckpoints(self.assignment, self.ranks.rank, data, companions)

    def _base_model(self) -> Path | None:
        """The folder with the config of the initial model, if there is one."""
        model = self.assignment.recipe.model
        if model.init == "pretrained":
            assert model.hub is not None, "checked at load"
            return hf.snapshot_folder(model.hub, model.revision)
        if model.checkpoint is None:
            return None
        # A resumed run may have outlived the checkpoint that it started from.
        own = sorted(self.directory.checkpoints.glob(f"step-????????/{COMPANIONS}"))
        folders = Path(model.checkpoint) / COMPANIONS, *own
        return next((folder for folder in folders if folder.is_dir()), None)

    def _save_tokenizer(self, data: TrainingData, folder: Path) -> None:
        recipe = self.assignment.recipe
        name, revision = recipe.data.tokenizer, recipe.data.tokenizer_revision
        local = Path(name).expanduser()
        if local.is_dir():
            hf.copy_tokenizer(local, folder)
        elif (name, revision) == (recipe.model.hub, recipe.model.revision):
            hf.copy_tokenizer(hf.snapshot_folder(name, revision), folder)
        else:
            data.tokenizer.save_pretrained(folder)
        if recipe.data.chat_template is not None:
            hf.write_chat_template(str(data.tokenizer.chat_template), folder)

    def _observed(
        self, engine: Engine, validation: Mapping[str, Samples], checkpoints: RunCheckpoints
    ) -> Observed:
        return Observed(
            self.assignment.recipe,
            self.assignment.plan,
            engine,
            self.ranks,
            {name: self._batches_of(samples) for name, samples in validation.items()},
            checkpoints,
            self.assignment.prediction,
            self.phases.begin,
        )

    def _batches_of(self, validation: Samples) -> Callable[[int], Sequence[MicroBatch]]:
        """This rank's validation batches, built on request: the same tokens, split into parts
        like the samples of the steps."""
        recipe, layout = self.assignment.recipe, self.assignment.plan.layout
        return lambda parts: evaluation_batches(
            cut(validation, parts),
            recipe.training.global_batch_size,
            recipe.evaluation.batches * parts,
            layout.data_rank(self.ranks.rank),
            layout.dp,
            layout.micro_batch,
        )
