"""Runs tasks by the lm-evaluation-harness, with its own model class for transformers."""

import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]  # has no type hints of its own
import torch

from toolkit.errors import DataError
from toolkit.evaluate.completions import require_template_in
from toolkit.evaluate.tasks import TasksSection
from toolkit.system.install import optional
from toolkit.text.suggest import did_you_mean

_NOT_METRICS = ("name", "alias", "sample_len")
_ADAPTERS = "adapter_config.json"


def evaluate(folder: Path, settings: TasksSection, device: str) -> dict[str, dict[str, float]]:
    """The harness's numbers by task and metric: those of its command line with `--model hf`.

    The name of a metric is the harness's, without its filter where that is `none`.
    """
    manager, names = _tasks(settings)
    if settings.chat:
        require_template_in(folder, "evaluation.tasks.chat")
    with _explained(settings):
        found = _lm_eval().simple_evaluate(
            model="hf",
            model_args=_model_arguments(folder, device),
            tasks=names,
            device=device,
            num_fewshot=settings.few_shot,
            batch_size=settings.batch,
            limit=settings.limit,
            apply_chat_template=settings.chat,
            log_samples=False,
            task_manager=manager,
        )
    return {
        task: {
            metric.removesuffix(",none"): float(value)
            for metric, value in metrics.items()
            if metric not in _NOT_METRICS and isinstance(value, int | float)
        }
        for task, metrics in found["results"].items()
    }


def prepare(folder: Path, settings: TasksSection) -> None:
    """Load the tasks with their data sets.

    Raises DataError for an unknown task, and for data that are neither here nor downloaded.
    """
    if settings.chat:
        require_template_in(folder, "evaluation.tasks.chat")
    manager, names = _tasks(settings)
    with _explained(settings):
        manager.load(names)


def _model_arguments(folder: Path, device: str) -> dict[str, Any]:
    found: dict[str, Any] = {"pretrained": str(folder)}
    if (adapters := folder / _ADAPTERS).is_file():
        base = json.loads(adapters.read_text(encoding="utf-8"))["base_model_name_or_path"]
        found = {"pretrained": base, "tokenizer": str(folder), "peft": str(folder)}
    if device == "cuda":
        # One model over all GPUs, as much as they have room for; the rest in host memory.
        room = psutil.virtual_memory().available
        found |= {"parallelize": True, "max_cpu_memory": room}
    return found


def _lm_eval() -> Any:
    what = "tasks are run by the lm-evaluation-harness, which"
    return optional("lm_eval", "eval", what)


def _tasks(settings: TasksSection) -> tuple[Any, list[str]]:
    """The harness's index of tasks, and the names that are meant: `*` stands for any text.
    Raises DataError for one that the index does not have."""
    _lm_eval()
    from lm_eval.tasks import TaskManager

    folder = settings.include_path
    if folder is not None and not Path(folder).is_dir():
        raise DataError(f"evaluation.tasks.include_path: {folder} is no folder")
    manager = TaskManager(include_path=folder)
    names: list[str] = []
    for name in settings.names:
        if not (meant := manager.match_tasks([name])):
            where = f", nor has {folder}" if folder else ""
            fix = "`lm_eval ls tasks` lists them; your own need include_path"
            raise DataError(
                f"the lm-evaluation-harness has no task {name}{where}",
                fix=did_you_mean(name, manager.all_tasks, fix),
            )
        names += [task for task in meant if task not in names]
    return manager, names


@contextmanager
def _explained(settings: TasksSection) -> Iterator[None]:
    """Turn what the harness and `datasets` raise into one sentence. What is not about files or
    the network has a traceback, too."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        if isinstance(error, OSError):
            fix = (
                "a data set that is not in the cache is downloaded once, where there is a "
                "network (HF_HUB_OFFLINE unset); a task of your own may name files (data_files)"
            )
        else:
            traceback.print_exc()
            fix = "look at the traceback above it, or in the run's logs/evaluation.log"
        first = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise DataError(
            f"tasks {', '.join(settings.names)}: {type(error).__name__}: {first[0]}", fix=fix
        ) from error
