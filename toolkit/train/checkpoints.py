"""A worker's checkpoints: resume from one, write the next."""

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch.distributed as dist
from transformers import PretrainedConfig

from toolkit.checkpoint.export_adapters import check_base
from toolkit.checkpoint.manifest import Manifest
from toolkit.checkpoint.resume import (
    ResumePoint,
    check_shared_disk,
    find_newest,
    require_whole_together,
)
from toolkit.checkpoint.saved_state import SavedState, SavedWeights
from toolkit.checkpoint.saver import SaveOutcome, Saver
from toolkit.checkpoint.shards import stored_shape
from toolkit.checkpoint.store import CheckpointStore, folder_name
from toolkit.checkpoint.verify import verify
from toolkit.data.build import TrainingData
from toolkit.engines.base import Counters, Engine
from toolkit.errors import EXIT_DONE, EXIT_FAILED, CheckpointError, RunFailed
from toolkit.models import huggingface as hf
from toolkit.models.adapters.lora import lora_of
from toolkit.models.adapters.weights import AdaptedWeights, LoraWeights, fingerprint
from toolkit.models.weights import WeightSource
from toolkit.recipe.schema import ScheduleSection, TrainingSection
from toolkit.removed import without_unset
from toolkit.run import jsonl
from toolkit.run.announce import short
from toolkit.run.assignment import Assignment
from toolkit.run.changes import changes, may_change, shown
from toolkit.run.directory import RunDirectory, was_requested
from toolkit.run.environment import environment_report
from toolkit.run.events import EventLog
from toolkit.text.terminal import tell
from toolkit.train.all_ranks import PeerFailed
from toolkit.train.schedule import learning_rate
from toolkit.train.shared import Progress
from toolkit.train.watchdog import Mark, Marks

_Shapes = Mapping[str, tuple[int, ...]]
GB = 1e9
_VERIFYING = "verifying the checkpoint"
_EXPORTED = "`dmt checkpoint export {} DST --merged` and init: pretrained with hub: DST"
"""Hint for starting another run from a checkpoint of adapters."""


class RunCheckpoints:
    """Finds, loads and saves the checkpoints of one run. Collective, except `tell`.

    `data` is the run's training data. `companions` are the files of a Hugging Face folder
    except the weights: paths in a checkpoint, and contents. `group`: see Saver.
    """

    def __init__(
        self,
        assignment: Assignment,
        rank: int,
        data: TrainingData,
        companions: Mapping[str, bytes],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.assignment = assignment
        self.layout = assignment.plan.layout
        """The layout of the coming steps."""
        self.leader = rank == 0
        self.data = data
        self.companions = companions
        self.versions = environment_report() if self.leader else {}
        self.recipe = jsonl.plain(assignment.recipe.model_dump(mode="json"))
        """The recipe as manifests state it."""
        self.directory = RunDirectory(assignment.run_dir)
        self.events = EventLog(self.directory.events)
        section = assignment.recipe.checkpoint
        self.store = CheckpointStore(
            self.directory.checkpoints, section.keep, section.keep_best or 0
        )
        self.saver = Saver(self.store, asynchronous=section.asynchronous, group=group)
        self.saved_at = 0
        """Step of the last save that was started, or of the checkpoint that was loaded."""
        self.load_s: float | None = None
        """Seconds that loading took. None if nothing was loaded."""
        self._stall_s = 0.0
        self._found: ResumePoint | None = None
        self._saved: SavedState | None = None
        """The tensors of the checkpoint that the run continues from."""
        self._base: str | None = None
        """See `Manifest.base`. Known on rank 0 only."""

    def find(self, config: PretrainedConfig, marks: Marks) -> ResumePoint | None:
        """The checkpoint that the run, of a model with this `config`, continues from.

        Raises CheckpointError if recipe, model or data differ, or if all checkpoints are
        damaged or missing.
        """
        check_shared_disk(self.store.folder)
        found = find_newest(
            self.store,
            expected=any(e.get("kind") == "save" for e in jsonl.read(self.directory.events)),
            verifying=partial(marks.begin, _VERIFYING),
        )
        if found is None:
            return None
        for reason in found.skipped:
            self._warn(f"damaged checkpoint skipped: {reason}")
        self._found, self._saved = found, SavedState(found.folder)
        self._check_same_run(found, config)
        return found

    def _check_same_run(self, found: ResumePoint, config: PretrainedConfig) -> None:
        """Refuse the checkpoint of another run, whose state does not apply here."""
        manifest = found.manifest
        problems = [
            f"{key} was {shown(old)}, is {shown(new)}"
            for key, old, new in changes(manifest.recipe, self.recipe)
            # Data are compared as such, below.
            if not may_change(key)
            and not was_requested(self.directory, key, new)
            and key.split(".")[0] not in ("name", "data")
        ]
        if self.leader:
            assert self._saved is not None
            if problem := _shape_problem(self._saved.shapes, self._shapes(config)):
                problems.append(problem)
        if problems:
            weights = f"model.init: checkpoint and model.checkpoint: {found.folder}"
            if manifest.adapter is not None:
                weights = _EXPORTED.format(found.folder)
            raise CheckpointError(
                f"{found.folder} belongs to another run: {'; '.join(problems)}",
                fix="start in another directory (--run-dir OTHER); a run there can take these "
                f"weights: {weights}",
            )
        if manifest.data_fingerprint != self.data.fingerprint_at(manifest.consumed_samples):
            fix = "restore the data files, or start in another directory (--run-dir)"
            if isinstance(self.assignment.recipe.data.train, tuple):
                stage = f"add a stage to data.stages from step {manifest.step} on"
                fix += f"; to change weights, {stage}"
            raise CheckpointError(
                f"{found.folder} was trained on different data, so its position in the data "
                "cannot be used",
                fix=fix,
            )

    def _shapes(self, config: PretrainedConfig) -> Mapping[str, tuple[int, ...]]:
        """The tensors of the run's checkpoints: with adapters, only theirs."""
        lora = lora_of(self.assignment.recipe.adapter, config.to_dict())
        return hf.checkpoint_shapes(config) if lora is None else lora.shapes

    def weights(
        self, config: PretrainedConfig, marks: Marks, *, first: bool = False
    ) -> WeightSource:
        """The weights that the model is built with: those of the checkpoint that was found,
        otherwise the recipe's initial weights. With adapters, always the latter. `first`: the
        run's initial weights.

        Raises CheckpointError if a checkpoint's adapters were trained on other weights.
        """
        recipe, saved = self.assignment.recipe, None if first else self._saved
        lora = lora_of(recipe.adapter, config.to_dict())
        if lora is None and saved is not None:
            return SavedWeights(saved, hf.parameter_shapes(config))
        seed = recipe.training.seed
        base = self._start(config, marks) or hf.weight_source(recipe.model, config, seed)
        if lora is None:
            return base
        if self.leader:
            self._base = fingerprint(base)
            if self._found is not None:
                check_base(self._base, self._found.manifest, self._found.folder)
        own = LoraWeights(lora, seed) if saved is None else SavedWeights(saved, lora.shapes)
        return AdaptedWeights(base, own)

    def _start(self, config: PretrainedConfig, marks: Marks) -> WeightSource | None:
        """The weights of another run that the recipe starts from. None without one."""
        start = self.assignment.recipe.model.checkpoint
        if start is None:
            return None
        saved = SavedState(
            require_whole_together(Path(start), partial(marks.begin, _VERIFYING))
        )
        if Manifest.read(saved.folder).adapter is not None:
            raise CheckpointError(
                f"model.checkpoint: {saved.folder} holds adapters, not a model",
                fix=_EXPORTED.format(saved.folder),
            )
        if problem := _shape_problem(saved.shapes, hf.checkpoint_shapes(config)):
            raise CheckpointError(
                f"model.checkpoint: {saved.folder} holds another model: {problem}",
                fix="state that model's config in model.config",
            )
        return SavedWeights(saved, hf.parameter_shapes(config))

    def have_ended(self, found: ResumePoint, steps: int) -> bool:
        """Whether the run of `steps` steps ended with this checkpoint. If so, prints a message.

        Its last validation is then done, too. The export may be missing, or was not requested.
        """
        step, name = found.manifest.step, short(found.folder)
        history, section = found.manifest.validation, self.assignment.recipe.evaluation
        early = step < steps and history.ends_run(section.patience)
        ended = (step >= steps or early) and any(
            event.get("kind") == "end"
            and event.get("exit_code") == EXIT_DONE
            and event.get("step") == step
            for event in jsonl.read(self.directory.events)
        )
        if early:
            tell(f"stopped early: {name} is step {step} of {steps}; {history.reason}")
        elif ended:
            tell(f"finished: {name} is step {step} of {steps}, nothing is left to train")
        else:
            tell(f"continuing from step {step} of {steps}, {name}")
            self._report_bend(found.manifest, steps)
        return ended

    def _report_bend(self, manifest: Manifest, steps: int) -> None:
        """Warn if the run's new length changes the rate at which it continues: schedules decay
        over all steps of a run."""
        saved, step = without_unset(manifest.recipe), manifest.step
        before = TrainingSection(**saved["training"]).total_steps()
        if before is None or before == steps or step >= steps:
            return
        peak, schedule = (
            saved["optimizer"]["learning_rate"],
            ScheduleSection(**saved["schedule"]),
        )
        was = learning_rate(min(step, before - 1), before, peak, schedule)
        now = self.assignment.recipe
        rate = learning_rate(step, steps, now.optimizer.learning_rate, now.schedule)
        if not math.isclose(rate, was, rel_tol=1e-6):
            self._warn(
                f"the run has {steps} steps, it had {before}: schedule {now.schedule.name} "
                f"continues at learning rate {rate:.3g} instead of {was:.3g}"
            )

    def exported_step(self, last: int) -> int:
        """The step to export: the best one if the recipe keeps it and it is whole, otherwise
        the last."""
        best = self.store.best(until=last) if self.store.keep_best else set()
        for step in best - {last}:
            folder = self.store.of_step(step)
            if not (problems := verify(folder).problems):
                return step
            self._warn(f"{folder}, the best checkpoint, is not exported: {problems[0]}")
        return last

    def load(self, engine: Engine, found: ResumePoint, marks: Marks) -> None:
        """Load the rest of the state into the engine, which was built with the saved
        weights."""
        assert self._saved is not None, "found"
        began = time.monotonic()
        manifest = found.manifest
        for shard in marks.track(engine.state(), "loading the optimizer states"):
            self._saved.load(shard)
        self._saved.close()
        engine.set_counters(Counters(manifest.optimizer_steps, manifest.loss_scale))
        self.saved_at = manifest.step
        self.load_s = time.monotonic() - began

    def save(self, engine: Engine, progress: Progress, mark: Mark) -> None:
        """Start saving, unless this step is already saved.

        `mark` is called for each phase.
        """
        if self.saved_at == progress.step:
            return
        self.saved_at = progress.step
        began = time.monotonic()
        mark("waiting for the save before")
        self.tell(wait=True)
        mark(f"saving step {progress.step}")
        self.saver.save(self.manifest(engine, progress), engine.state(), self.companions)
        self._stall_s = time.monotonic() - began

    def add_validation(self, progress: Progress) -> None:
        """Add a validation to the checkpoint that the run continues from. A stop saved it
        before the validation that was due. Called on rank 0 only."""
        assert self._found is not None, "it continues"
        try:
            self.store.restate(replace(self._found.manifest, validation=progress.validation))
        except OSError as error:
            self._warn(f"step {progress.step} does not record its validation: {error}")

    def finish(self) -> None:
        """Wait for the save in flight.

        If it failed, rank 0 raises RunFailed and every other rank PeerFailed.
        """
        saved = self.tell(wait=True)
        if saved is not None and saved.problem is not None:
            if not self.leader:
                raise PeerFailed(EXIT_FAILED)
            raise RunFailed(
                f"step {saved.manifest.step} could not be saved: {saved.problem}",
                fix="make room and start the same command again; it continues from the "
                "checkpoint before",
            )

    def close(self) -> None:
        """Close the saver. No save is in flight."""
        self.saver.close()

    def tell(self, *, wait: bool = False) -> SaveOutcome | None:
        """Report a finished save, once. Called after every step, does not block."""
        saved = self.saver.finished(wait=wait)
        if saved is None or not self.leader:
            return saved
        step = saved.manifest.step
        if saved.problem is not None:
            self._warn(f"step {step} was not saved, training continues: {saved.problem}")
            return saved
        if saved.complaint is not None:
            self._warn(f"step {step} was saved, tidying up failed: {saved.complaint}")
        self.events.write(
            "save",
            step=step,
            folder=folder_name(step),
            seconds=round(saved.seconds, 3),
            stall_s=round(self._stall_s, 3),
            gigabytes=round(saved.manifest.nbytes / GB, 6),
        )
        return saved

    def _warn(self, message: str) -> None:
        if self.leader:
            tell(f"warning: {message}")
            self.events.write("warning", message=message)

    def manifest(self, engine: Engine, progress: Progress) -> Manifest:
        """The manifest of a checkpoint that is to be saved."""
        plan = self.assignment.plan
        counters = engine.counters()
        return Manifest(
            step=progress.step,
            consumed_samples=progress.consumed_samples,
            consumed_tokens=progress.consumed_tokens,
            optimizer_steps=counters.optimizer_steps,
            loss_scale=counters.loss_scale,
            recent_losses=progress.recent_losses,
            validation=progress.validation,
            data_fingerprint=self.data.fingerprint_at(progress.consumed_samples),
            engine=plan.engine,
            model=plan.model,
            layout=self.layout,
            base=self._base,
            recipe=self.recipe,
            versions=self.versions,
        )


def _shape_problem(saved: _Shapes, wanted: _Shapes) -> str | None:
    """The first tensor in which a checkpoint differs from a model. None when they agree."""
    needed = {name: stored_shape(shape) for name, shape in wanted.items()}
    for name in sorted({*saved, *needed}):
        if saved.get(name) != needed.get(name):
            before, now = (
                str([*shapes[name]]) if name in shapes else "missing"
                for shapes in (saved, needed)
            )
            return f"{name} is {before} in the checkpoint, {now} in the recipe's model"
    return None
