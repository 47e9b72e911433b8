"""The one reader of a model's config: what transformers makes of it, looked up once.

transformers' own classes fill in a config's defaults, and its shape is counted on its model
without storage, which imports torch. The result is kept by the text of the config and
transformers' version: for shipped recipes in `shapes.json`, for other configs in the cache. So
`dmt check` and `dmt plan` import no torch for a config that was read before.
"""

import json
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from toolkit.errors import PlanError, Problem
from toolkit.models.spec import ModelSpec, ParameterCounts
from toolkit.registry import load
from toolkit.system.atomic import write_atomically
from toolkit.system.untrusted import read_json
from toolkit.text.terminal import tell

Attention = Literal["sdpa", "eager"]
"""transformers' names of attention implementations: torch's scaled_dot_product_attention, and
plain matrix products with a softmax."""

SHAPES = Path(__file__).with_name("shapes.json")
"""The models of shipped recipes, by the digest of their configs: DMT_UPDATE_GOLDEN=1 on
`tests/models/test_model.py` writes it."""
_READERS = ("model.py", "judge.py", "counting.py", "spec.py")
"""Files that decide what a model is read as."""


_DROPOUT = re.compile(r"(?!classifier|summary).*(dropout|pdrop|layerdrop)")


def is_dropout(name: str) -> bool:
    """Whether this config key is a dropout probability. These are 0 unless the recipe sets
    them."""
    return _DROPOUT.match(name) is not None


def is_attention_dropout(name: str) -> bool:
    """Whether it is one of attention's weights."""
    return is_dropout(name) and "att" in name


class Config(dict[str, Any]):
    """A config with transformers' defaults and computed values, under transformers' own names
    and the standard ones. Dropouts that it does not state are 0. A key without a value is
    None."""

    def __missing__(self, key: str) -> None:
        """Return None."""

    @property
    def head_dim(self) -> int:
        """Features of one head. The hidden size divided by the heads if no key states it."""
        return int(self["head_dim"] or self["hidden_size"] // self["num_attention_heads"])


@dataclass(frozen=True)
class Model:
    """A model as its config describes it."""

    config: Config
    names: Mapping[str, str]
    """Standard names of keys, and the names that this type has for them."""
    spec: ModelSpec
    attention: Attention
    """The fastest implementation that computes this model's attention exactly."""


def check_config(config: Mapping[str, object]) -> list[Problem]:
    """Return every mistake in `config`. An empty list when `read` may be called.

    Nothing raises here, for any values.
    """
    try:
        return [*_examined(text_of(config))[0]]
    except (TypeError, ValueError, RecursionError):  # no JSON: a date, a number of many digits
        problems, _ = load("toolkit.models.judge:examine")(config)
        fallback = Problem("model_type", "values that JSON cannot have", "numbers and text")
        return [*problems] or [fallback]


def read(config: Mapping[str, object]) -> Model:
    """The model of a config. Keys that transformers does not read are passed over: those of a
    recipe were refused by `check_config`. Raises PlanError for a config that transformers does
    not load."""
    problems, model = _examined(text_of(config))
    if model is None and len(known := published(config)) < len(config):
        problems, model = _examined(text_of(known))
    if model is None:
        first = problems[0]
        raise PlanError(f"{first.key}: {first.found}; allowed: {first.allowed}", fix=first.fix)
    return model


def published(config: Mapping[str, Any]) -> dict[str, Any]:
    """A published config without the keys that transformers does not read, which many have:
    remains of other releases and tools."""
    known = _known_keys(str(config.get("model_type")))
    return {key: value for key, value in config.items() if not known or key in known}


def text_of(config: Mapping[str, object]) -> str:
    """The config as JSON, by which its model is kept. Raises TypeError or ValueError for values
    that JSON does not have."""
    return json.dumps(config, sort_keys=True)


@lru_cache(maxsize=1024)
def _examined(text: str) -> tuple[tuple[Problem, ...], Model | None]:
    digest = digest_of(text)
    entry = _shipped().get(digest) or _kept(digest)
    if entry is not None:
        with suppress(ValueError):
            return (), _model(entry)
    _say()
    problems, model = load("toolkit.models.judge:examine")(json.loads(text))
    if model is not None and not problems:
        _keep(digest, entry_of(model))
    return tuple(problems), model


@cache
def _known_keys(model_type: str) -> frozenset[str]:
    digest = digest_of(f"keys of {model_type}")
    entry = _kept(digest)
    if entry is None:
        _say()
        names = load("toolkit.models.judge:known_keys")(model_type)
        _keep(digest, entry := {"keys": sorted(names)})
    return frozenset(entry.get("keys", ()))


def _say() -> None:
    if "transformers" not in sys.modules:
        tell("reading a new model config with transformers, which takes some seconds once")


def digest_of(text: str) -> str:
    """The name under which the model of this config, as JSON, is kept."""
    return sha256(f"{_version()}\0{text}".encode()).hexdigest()[:32]


@cache
def _version() -> str:
    return version("transformers")


@cache
def _shipped() -> Mapping[str, Any]:
    with suppress(OSError, ValueError):
        shapes: dict[str, Any] = json.loads(SHAPES.read_text(encoding="utf-8"))
        return shapes
    return {}


def _file(digest: str) -> Path:
    cache = os.environ.get("DMT_CACHE", "")
    base = Path.home() / ".cache" / "dmt" if "://" in cache or not cache else Path(cache)
    readers = b"".join(Path(__file__).with_name(name).read_bytes() for name in _READERS)
    return base.expanduser() / "models" / f"{digest}-{sha256(readers).hexdigest()[:8]}.json"


def _kept(digest: str) -> dict[str, Any] | None:
    with suppress(OSError, TypeError, ValueError, RuntimeError):
        return dict(read_json(_file(digest)))
    return None


def _keep(digest: str, entry: Mapping[str, Any]) -> None:
    """Keep it for other processes, if the cache can be written."""
    with suppress(OSError, RuntimeError):
        file = _file(digest)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(entry))


def entry_of(model: Model) -> dict[str, Any]:
    """The model as a map of JSON."""
    return asdict(model)


def _model(entry: Mapping[str, Any]) -> Model:
    """The model of `entry_of`. Raises ValueError for another map."""
    try:
        parts = ParameterCounts(**entry["spec"]["parameters"])
        spec = ModelSpec(**{**entry["spec"], "parameters": parts})
        return Model(Config(entry["config"]), entry["names"], spec, entry["attention"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"no model: {error}") from error
