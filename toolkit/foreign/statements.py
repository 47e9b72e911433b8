"""What files state together: their batches, pairs of settings, and their tools' defaults."""

import math
from collections.abc import Sequence
from pathlib import Path

from toolkit.foreign.carry import (
    ACCUMULATION,
    DEEPSPEED_BATCH,
    DERIVED,
    PER_RANK,
    RSLORA,
    SHARDS,
    WORLD,
    Carried,
    ForeignSetting,
    Found,
)
from toolkit.foreign.files import read
from toolkit.recipe.schema import LENGTH_SETTINGS

_BATCH, _MICRO, _BETAS = (
    "training.global_batch_size",
    "training.micro_batch_size",
    "optimizer.betas",
)


def read_together(paths: Sequence[Path], option: str) -> Found:
    """The statements of several files. Raises RecipeError for a file that cannot be read or
    has what is not understood, and where two files contradict each other."""
    found = Found()
    for path in paths:
        found.merge(read(path, option))
    found.stop()
    found.settle()
    if (model := found.values.get("model.hub")) is not None:  # it brings its tokenizer
        found.values.setdefault("data.tokenizer", model)
    return found


def ranks_of(found: Found) -> int | None:
    """The ranks that the files state."""
    if WORLD in found.values:
        return found.number(WORLD)
    if "cluster.gpus_per_node" in found.values:
        return found.number("cluster.gpus_per_node") * found.number("cluster.nodes")
    return None


def add_batch(found: Found, dp: int | None, context: int) -> None:
    """The global batch: as stated, or micro batch · accumulation · data-parallel ranks.

    DeepSpeed counts ranks of context parallel as data-parallel ones.
    """
    values = found.values
    if (one := values.get(DEEPSPEED_BATCH)) is not None:
        found.put(_BATCH, max(1, one.value // context), one.at)
    micro, accumulation = values.get(_MICRO), values.get(ACCUMULATION)
    steps = accumulation.value if accumulation else found.defaults.get(ACCUMULATION)
    size = micro.value if micro else found.defaults.get(_MICRO)
    if (one := values.get(PER_RANK)) is not None and isinstance(size, int) and dp:
        found.put(_BATCH, one.value // size * size * dp, one.at, f"with dp {dp}")
    if isinstance(size, int) and steps and dp:
        note = f"{size} · {steps} · dp {dp}"
        stated = micro or accumulation
        at = stated.at if stated else ForeignSetting("the tool's default", None, "")
        found.values.setdefault(_BATCH, Carried(size * steps * dp, at, note))
    if accumulation is not None and (
        _BATCH not in values or not size or not dp or values[_BATCH].value != size * steps * dp
    ):
        found.drop(accumulation.at, f"derived: {_BATCH} / ({_MICRO} · dp)")


def add_betas(found: Found) -> None:
    """Both in one list, where a tool states them one by one."""
    pair = [found.values.pop(f"{_BETAS}[{index}]", None) for index in (0, 1)]
    if stated := next((one for one in pair if one), None):
        usual = found.defaults.get(_BETAS, [0.9, 0.999])
        both = [one.value if one else usual[index] for index, one in enumerate(pair)]
        found.values.setdefault(_BETAS, Carried(both, stated.at))


def add_alpha(found: Found) -> None:
    """The alpha that scales adapters as rsLoRA's alpha / √rank (arXiv:2312.03732)."""
    stated, (rank, alpha) = (
        found.values.pop(RSLORA, None),
        (
            found.value(f"adapter.{name}", found.defaults.get(f"adapter.{name}"))
            for name in ("rank", "alpha")
        ),
    )
    if stated is None or not stated.value:
        return
    if rank is None or alpha is None:
        found.drop(stated.at, "write adapter.alpha, which is divided by the rank, times √rank")
        return
    note = f"alpha {alpha:g} · √{rank}, for rsLoRA's scaling"
    found.values["adapter.alpha"] = Carried(alpha * math.sqrt(rank), stated.at, note)


def complete(found: Found, ranks: int | None) -> None:
    """Add what the tools do where the files are silent, and drop what a recipe derives. `ranks`
    count where the files state none."""
    add_betas(found)
    add_alpha(found)
    degrees = ("parallel.tensor", "parallel.pipeline", "parallel.context")
    others, ranks = math.prod(map(found.number, degrees)), ranks_of(found) or ranks
    add_batch(
        found, max(1, ranks // others) if ranks else None, found.number("parallel.context")
    )
    for key in DERIVED:
        found.values.pop(key, None)
    stated = found.values
    objective = stated["training.objective"].value if "training.objective" in stated else ""
    length = any(key in stated for key in LENGTH_SETTINGS)
    warmup = {"schedule.warmup_steps", "schedule.warmup_ratio"} & stated.keys()
    tool = next((one.name for one in found.tools if one.defaults), "the tool")
    for key, value in found.defaults.items():
        section = key.partition(".")[0]
        taken = (
            (key in LENGTH_SETTINGS and length)
            or (key.startswith("schedule.warmup") and warmup)
            or (key == "model.init" and "model.hub" not in stated)
            or (section in ("dpo", "orpo") and section != objective)
            or key in (ACCUMULATION, SHARDS)
        )
        if not taken:
            at = ForeignSetting(f"{tool}'s default", value, "")
            stated.setdefault(key, Carried(value, at))
