"""A complete foreign format of another package: a JSON file that `dmt` writes and reads."""

import json
from collections.abc import Mapping, Sequence

from toolkit.engines.deepspeed.json_file import JsonFile
from toolkit.plan.plan import Plan
from toolkit.recipe.schema import Recipe
from toolkit.targets.base import (
    ForeignSetting,
    Row,
    SettingSource,
    Target,
    TargetKey,
    read_settings,
    written,
)
from toolkit.targets.facts import values_of

KEYS: Mapping[str, Row] = {
    "toy_steps": "training.steps",
    "toy_rate_per_mille": TargetKey(
        "optimizer.learning_rate", lambda rate: rate / 1000, lambda rate: rate * 1000
    ),
}


class ToyTarget(Target):
    kind = "toy settings"
    form = "toy settings (JSON)"
    names = frozenset(KEYS)
    rendered = True
    who = ("the toy reads only this file",)

    def read(self, file: JsonFile, recipe: Recipe | None) -> SettingSource:
        settings = {
            key: ForeignSetting(key, value, file.place(key))
            for key, value in file.values.items()
        }
        found = SettingSource(str(file.path), self.kind, self.who)
        found.add(read_settings(settings, KEYS))
        return found

    def write(self, recipe: Recipe, plan: Plan) -> tuple[str, Sequence[str]]:
        return json.dumps(written(KEYS, values_of(recipe, plan))), ("toys have no schedule",)


TARGET = ToyTarget()
