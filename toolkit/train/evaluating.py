"""Evaluators during training: their weights, the wait of all ranks, their findings."""

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from toolkit.checkpoint.saver import Saver
from toolkit.checkpoint.store import CheckpointStore, folder_name, step_of
from toolkit.engines.base import Engine
from toolkit.errors import DataError, DmtError, RunFailed
from toolkit.evaluate.evaluation import evaluate, exported
from toolkit.evaluator import EVALUATORS, chosen
from toolkit.run.evaluations import Recorded, described, record
from toolkit.text.terminal import tell
from toolkit.train.checkpoints import RunCheckpoints
from toolkit.train.loop import Progress
from toolkit.train.start import Start

_WORK = ".training"
"""Folder in RUN/evaluations for weights while they are evaluated."""
_SHOWN = 8
"""Lines of an evaluator's findings in the terminal."""


class RunEvaluations:
    """Evaluates the weights of a run when due. Collective, like a save.

    The ranks save their weights, and rank 0 exports them and evaluates that folder in a process
    of its own, on its devices: training waits, because it needs the same devices. An evaluation
    that fails is a warning.
    """

    def __init__(
        self,
        start: Start,
        engine: Engine,
        checkpoints: RunCheckpoints,
        show: Callable[[str], object],
    ) -> None:
        """`show` prints a line; called on rank 0."""
        self._show = show
        self._start, self._engine, self._checkpoints = start, engine, checkpoints
        self._settings = chosen(start.recipe.evaluation)
        self._work = start.directory.evaluations / _WORK
        self._done_at: dict[str, int] = {}

    def evaluate(self, progress: Progress) -> None:
        """Evaluate what is due after this step."""
        step, usual = progress.step, self._start.recipe.evaluation.every_steps
        self._evaluate(
            progress,
            [
                name
                for name, settings in self._settings.items()
                if (every := settings.every_steps or usual) and step % every == 0
            ],
        )

    def evaluate_now(self, progress: Progress) -> None:
        """Evaluate everything, unless that was done at this step."""
        self._evaluate(progress, [*self._settings])

    def _evaluate(self, progress: Progress, due: Sequence[str]) -> None:
        step = progress.step
        names = [name for name in due if self._done_at.get(name) != step]
        if not names:
            return
        self._done_at |= dict.fromkeys(names, step)
        began = time.monotonic()
        checkpoint, problem = self._weights(progress)
        if torch.cuda.is_available():  # the evaluating process takes what this one leaves
            torch.cuda.empty_cache()
        self._start.together.rank_zero(
            lambda: self._judge(checkpoint, problem, names, step, began)
        )

    def _weights(self, progress: Progress) -> tuple[Path | None, str | None]:
        """A checkpoint of this step, or why there is none: the run's, or one of the weights
        alone."""
        start, checkpoints = self._start, self._checkpoints
        checkpoints.tell(wait=True)
        saved = start.together.rank_zero(lambda: self._saved(progress.step))
        if saved is not None:
            return saved, None
        start.phases.begin(f"saving the weights of step {progress.step} to evaluate them")
        store = CheckpointStore(self._work, keep=1)
        saver = Saver(store, asynchronous=False, group=start.together.group)
        manifest = checkpoints.manifest(self._engine, progress)
        saver.save(manifest, self._engine.state(), checkpoints.companions, ("weight",))
        outcome = saver.finished(wait=True)
        saver.close()
        assert outcome is not None, "it was waited for"
        if outcome.problem is not None:
            return None, outcome.problem
        return self._work / folder_name(progress.step), None

    def _saved(self, step: int) -> Path | None:
        """The run's own checkpoint of this step, unless its save has failed."""
        store = self._checkpoints.store
        if self._checkpoints.saved_at != step or step not in map(step_of, store.finished()):
            return None
        return store.of_step(step)

    def _judge(
        self,
        checkpoint: Path | None,
        problem: str | None,
        names: Sequence[str],
        step: int,
        began: float,
    ) -> None:
        start = self._start
        tick = start.phases.begin(f"evaluating the weights of step {step}")

        def mark(done: int = 0) -> None:
            tick(done)
            if start.stop.requested():
                raise RunFailed("the run was asked to stop")

        try:
            mark()  # asked while the weights were saved
            if checkpoint is None:
                raise RunFailed(problem or "no weights")
            with exported(checkpoint, self._work / "export", mark) as folder:
                found = evaluate(
                    folder,
                    {name: self._settings[name] for name in names},
                    start.ranks.device.type,
                    log=start.directory.logs / "evaluation.log",
                    limit_s=start.recipe.launch.hang_timeout_s,
                    mark=mark,
                )
            seconds = time.monotonic() - began
            for name in names:
                settings = self._settings[name].model_dump(mode="json")
                recorded = Recorded(name, step, settings, found[name])
                record(
                    start.directory, EVALUATORS[name].event, recorded, seconds=round(seconds, 3)
                )
                seconds = 0.0  # all of it is the first one's: they share the export
                lines = [*described(recorded)]
                for line in lines[:_SHOWN]:
                    self._show(f"step {step}  {line}")
                if len(lines) > _SHOWN:
                    self._show(f"  and {len(lines) - _SHOWN} more: `dmt report`")
        except (DmtError, OSError) as error:
            what = ", ".join(names)
            message = f"{what} of step {step} not evaluated, training continues: {error}"
            self._show(f"warning: {message}")
            start.events.write("warning", source="evaluation", step=step, message=message)
        finally:
            shutil.rmtree(self._work, ignore_errors=True)


def prepare_evaluators(start: Start, checkpoints: RunCheckpoints) -> None:
    """Remove what a kill has left, and let every evaluator look for what it needs.

    Raises its DmtError: a wrong name shall not be found after hours. In a run that continues,
    where they were found once, that is a warning: a hub may be away. Collective.
    """
    all_ = chosen(start.recipe.evaluation)
    settings = {name: one for name, one in all_.items() if one.can_lack_something}

    def prepare() -> None:
        shutil.rmtree(start.directory.evaluations / _WORK, ignore_errors=True)
        if not settings:
            return
        tick = start.phases.begin("preparing the evaluators")
        with TemporaryDirectory() as name:
            for path, content in checkpoints.companions.items():
                (Path(name) / Path(path).name).write_bytes(content)
            log = start.directory.logs / "evaluation.log"
            device = start.ranks.device.type
            try:
                evaluate(
                    Path(name), settings, device, prepare=True, log=log, mark=lambda: tick(0)
                )
            except (DataError, RunFailed) as error:
                if not checkpoints.store.expects_one():
                    raise
                tell(f"warning: the evaluators may fail, training continues: {error}")
                start.events.write("warning", source="evaluation", message=str(error))

    start.together.rank_zero(prepare)
