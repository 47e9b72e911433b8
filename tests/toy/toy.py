"""A complete engine of another package: what everyone who does not train with it asks.

`conftest.py` puts this file and `toy_engine.py` where that package would be installed.
"""

from typing import Any

from toolkit.backend import Backend, Rehearsed, Support
from toolkit.layout import Layout
from toolkit.plan.cost.engine import EngineCost
from toolkit.recipe.schema import Recipe


class ToyBackend(Backend):
    """Plain data parallel, with a configuration."""

    name = "toy"
    engine = "toy_engine:ToyEngine"
    supports = {"hf": Support()}  # noqa: RUF012
    packages = ("toy", "toy-kernels")
    configured = True
    cost = EngineCost()
    rehearsals = (Rehearsed("toy2", "hf", Layout(dp=2)),)

    def render(self, recipe: Recipe, layout: Layout) -> dict[str, Any]:
        """`toy.json`."""
        return {"ranks": layout.dp, "precision": recipe.training.precision}


BACKEND = ToyBackend()
