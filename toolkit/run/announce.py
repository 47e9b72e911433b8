"""A run's messages besides its steps, under any launcher.

The process that plans a run prints the plan and the run directory: `dmt launch`, or rank 0
under another launcher. Rank 0 reports the run's progress when it starts, and the location of
its results when it ends.
"""

import shlex
from pathlib import Path

from toolkit.backend import BACKENDS
from toolkit.models.adapters.lora import spec_of
from toolkit.models.hub import ignored_keys, model_config
from toolkit.plan.dimensions import layout_text
from toolkit.plan.ledger import LedgerEntry, ledger
from toolkit.plan.plan import Plan
from toolkit.recipe.schema import Recipe
from toolkit.run.comparison import differences
from toolkit.run.directory import RunDirectory
from toolkit.run.events import EventLog
from toolkit.run.trackers import trackers_line
from toolkit.text.terminal import tell


def ledger_of(recipe: Recipe, plan: Plan) -> list[LedgerEntry]:
    """What this plan approximates."""
    config = model_config(recipe.model)
    engine_config = BACKENDS[plan.engine].render(recipe, plan.layout)
    spec = spec_of(config, (), recipe.adapter)
    return ledger(recipe, plan, spec, config, engine_config)


def show_plan(recipe: Recipe, plan: Plan) -> None:
    """The layout, the trackers, warnings, and what may not be meant."""
    tell(f"layout {layout_text(plan.engine, plan.model, plan.layout)}")
    if trackers := trackers_line(recipe.logging):
        tell(trackers)
    warnings = (reason for reason in plan.reasons if "WARNING" in reason)
    for line in filter(None, [*warnings, ignored_keys(recipe.model), *recipe.notes]):
        tell(line)


def show_results(run: RunDirectory, events: EventLog, *, done: bool) -> None:
    """What this start measured next to the plan's prediction. For a run that is `done`, where
    everything is."""
    for event in events.new():
        if event.get("kind") == "prediction":
            for quantity, text in differences(event):
                tell(f"{quantity:<12} {text}")
    shown = {
        "metrics": run.metrics,
        "events": run.events,
        "checkpoints": run.checkpoints,
        "export": run.export,
    }
    for name, path in shown.items():
        if done and path.exists():
            tell(f"{name:<12} {short(path)}")


def short(path: Path) -> str:
    """The path relative to the working directory where that is shorter, for a shell."""
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return shlex.quote(str(path))
