"""What AutoTP needs of a recipe: a model type that was tested, and sizes that divide."""

from collections.abc import Iterator

from toolkit.engines.deepspeed import autotp
from toolkit.errors import Problem
from toolkit.features.base import FEATURES, inside_engines
from toolkit.models.config_keys import is_attention_dropout, is_dropout
from toolkit.plan.dimensions import is_above_one
from toolkit.plan.request import PlanRequest
from toolkit.plan.rules.legality import divisors, nearest

_TENSOR, _WHOLE = "parallel.tensor", "set parallel.tensor to 1"


def problems(job: PlanRequest) -> Iterator[Problem]:
    """Why a transformers model is not split as the recipe states."""
    degree, spec = job.parallel.tensor, job.spec
    if degree == "auto" or degree == 1:
        return
    why = autotp.split_plan(spec.family).why
    if why or spec.moe_layers:
        yield Problem(
            _TENSOR,
            f"{degree} with {spec.family} and model: hf",
            f"1: {why or autotp.WHOLE_EXPERTS}",
            f"{_WHOLE}, or parallel.model to auto",
        )
        return
    sizes = {
        "attention heads": spec.heads,
        "key/value heads": spec.kv_heads,
        "features of the MLP": spec.intermediate,
    }
    if wrong := [f"{size} {name}" for name, size in sizes.items() if size % degree]:
        fit = [
            one
            for one in divisors(job.cluster.world_size)
            if not any(size % one for size in sizes.values())
        ]
        yield Problem(
            _TENSOR,
            str(degree),
            f"a divisor of the model's {' and '.join(wrong)}",
            f"set {_TENSOR} to {nearest(degree, fit)}",
        )
    for key, rate in job.config.items():
        of_features = is_dropout(key) and "activation" in key
        if rate and (is_attention_dropout(key) or of_features):
            allowed = "0: ranks with different heads or features would drop the same of each"
            found = f"{rate} with {_TENSOR}: {degree} and model: hf"
            yield Problem(f"model.config.{key}", found, allowed, _WHOLE)
    for key, stated in _untested(job):
        allowed = "nothing with AutoTP's layers, with which no test runs it"
        yield Problem(key, f"{stated} with {_TENSOR}: {degree} and model: hf", allowed, _WHOLE)


def _untested(job: PlanRequest) -> Iterator[tuple[str, object]]:
    """Settings that would replace or miss the layers that AutoTP replaces."""
    zero = job.parallel.zero
    if is_above_one(job.parallel.context):
        yield "parallel.context", job.parallel.context
    stated = {
        "kernels.compile": job.kernels.compile,
        "parallel.zero.offload_optimizer": zero.offload_optimizer,
        "parallel.zero.offload_parameters": zero.offload_parameters,
    }
    for key, value in stated.items():
        if value not in ("auto", "none"):
            yield key, value
    for name, settings in inside_engines(job.features).items():
        for setting, on in FEATURES[name].values(settings).items():
            if on is not None:
                yield setting, "settings" if setting == name else str(on).lower()
