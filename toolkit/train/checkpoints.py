"""The checkpoints of a run as the worker sees them: continue from one, write the next."""

import json
import sys
import time
from collections.abc import Mapping

from toolkit.checkpoint.manifest import Manifest
from toolkit.checkpoint.resume import Found, find_newest, load
from toolkit.checkpoint.saved_state import SavedState
from toolkit.checkpoint.saver import Saved, Saver
from toolkit.checkpoint.store import CheckpointStore, folder_name
from toolkit.engines.base import Counters, Engine
from toolkit.errors import EXIT_FAILED, CheckpointError, RunFailed
from toolkit.redact import redact
from toolkit.train import jsonl
from toolkit.train.assignment import Assignment
from toolkit.train.environment import environment_report
from toolkit.train.events import EventLog
from toolkit.train.loop import Mark, Progress
from toolkit.train.run_dir import RunDirectory
from toolkit.train.together import PeerFailed
from toolkit.train.wandb_follower import PostedState

GB = 1e9


class RunCheckpoints:
    """Finds, loads and saves the checkpoints of one run. Collective, but for `tell`.

    `companions` are what a Hugging Face folder has beside weights: paths in a checkpoint, and
    contents.
    """

    def __init__(
        self,
        assignment: Assignment,
        rank: int,
        data_fingerprint: str,
        companions: Mapping[str, bytes],
    ) -> None:
        self.assignment = assignment
        self.leader = rank == 0
        self.fingerprint = data_fingerprint
        self.companions = companions
        self.versions = environment_report() if self.leader else {}
        self.directory = RunDirectory(assignment.run_dir)
        self.events = EventLog(self.directory.events)
        section = assignment.recipe.checkpoint
        self.store = CheckpointStore(self.directory.checkpoints, section.keep)
        self.saver = Saver(self.store, asynchronous=section.asynchronous)
        self.saved_at = 0
        """Step of the newest save that was begun, or of the checkpoint that was loaded."""
        self.load_s: float | None = None
        """Seconds that loading took; None where nothing was loaded."""
        self._stall_s = 0.0

    def find(self) -> Found | None:
        """The checkpoint that the run continues from.

        Raises CheckpointError when the recipe forbids to continue, when the data are others,
        or when all checkpoints are damaged or gone.
        """
        began_before = any(e.get("kind") == "save" for e in jsonl.read(self.directory.events))
        found = find_newest(self.store, expected=began_before)
        if found is None:
            return None
        if self.assignment.recipe.checkpoint.resume == "never":
            raise CheckpointError(
                f"{self.store.folder} holds checkpoints and checkpoint.resume is never",
                fix="start in another directory (--run-dir), or set checkpoint.resume: auto",
            )
        if found.manifest.data_fingerprint != self.fingerprint:
            raise CheckpointError(
                f"{found.folder} was trained on other data: its cursor means nothing here",
                fix="restore the data files, or start in another directory (--run-dir)",
            )
        for told in found.skipped:
            self._warn(f"damaged checkpoint skipped: {told}")
        return found

    def load(self, engine: Engine, found: Found) -> Progress:
        """Give the engine, which was built with the saved weights, the rest of its state."""
        began = time.monotonic()
        manifest = found.manifest
        load(engine.state(), SavedState(found.folder))
        engine.set_counters(Counters(manifest.optimizer_steps, manifest.loss_scale))
        self.saved_at = manifest.step
        if self.leader:
            self._restore_wandb_id(manifest)
        self.load_s = time.monotonic() - began
        return Progress(manifest.step, manifest.consumed_samples, manifest.recent_losses)

    def _restore_wandb_id(self, manifest: Manifest) -> None:
        """Let W&B go on with the same run, also where its own file was lost."""
        if manifest.wandb_id is not None and not self.directory.wandb_state.exists():
            posted = PostedState(manifest.wandb_id, posted_step=manifest.step)
            posted.save(self.directory.wandb_state)

    def save(self, engine: Engine, progress: Progress, mark: Mark) -> None:
        """Begin to save, unless that was done at this step already.

        `mark` is told what it begins with.
        """
        if self.saved_at == progress.step:
            return
        self.saved_at = progress.step
        began = time.monotonic()
        mark("waiting for the save before")
        self.tell(wait=True)
        mark(f"saving step {progress.step}")
        self.saver.save(self._manifest(engine, progress), engine.state(), self.companions)
        self._stall_s = time.monotonic() - began

    def finish(self) -> None:
        """Wait for the save in flight.

        When it came to nothing, rank 0 raises RunFailed and every other rank PeerFailed.
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
        """End what saves; nothing is in flight."""
        self.saver.close()

    def tell(self, *, wait: bool = False) -> Saved | None:
        """Report a save that has ended, once; called after every step, waits for nothing."""
        saved = self.saver.finished(wait=wait)
        if saved is None or not self.leader:
            return saved
        step = saved.manifest.step
        if saved.problem is not None:
            self._warn(f"step {step} was not saved, training goes on: {saved.problem}")
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
            print(redact(f"warning: {message}"), file=sys.stderr, flush=True)
            self.events.write("warning", message=message)

    def _manifest(self, engine: Engine, progress: Progress) -> Manifest:
        recipe, plan = self.assignment.recipe, self.assignment.plan
        counters = engine.counters()
        return Manifest(
            step=progress.step,
            consumed_samples=progress.consumed_samples,
            optimizer_steps=counters.optimizer_steps,
            loss_scale=counters.loss_scale,
            recent_losses=progress.recent_losses,
            data_fingerprint=self.fingerprint,
            engine=plan.engine,
            model=plan.model,
            layout=plan.layout,
            recipe=jsonl.plain(recipe.model_dump(mode="json")),
            versions=self.versions,
            wandb_id=self._wandb_id(),
        )

    def _wandb_id(self) -> str | None:
        try:
            text = self.directory.wandb_state.read_text(encoding="utf-8")
            return str(json.loads(text)["run_id"])
        except (OSError, ValueError, KeyError):
            return None
