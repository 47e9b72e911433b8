"""What single types of transformers' models can do, as tests have found: `types.json`.

- `context: true`: a small model computes the same with rows that are spread over ranks, as
  `tests.models.every_type --context` found. Others may have a state along the row, count
  positions themselves, or attend in a way of their own.
- `router`: how its routers score their logits (`biased`: by sigmoids, with a correction bias).
  tests/models/test_routers.py runs each.
- `initialised: false`: transformers leaves weights without initial values, or fails at it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

Score: TypeAlias = Literal["softmax", "sigmoid"]

FILE = Path(__file__).with_name("types.json")
TYPES: Mapping[str, Mapping[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))

SPLIT_IS_KEPT = frozenset(name for name, known in TYPES.items() if known.get("context"))
"""Types that train with context parallel."""
NOT_INITIALISED = tuple(name for name, known in TYPES.items() if "initialised" in known)
BIASED = tuple(name for name, known in TYPES.items() if known.get("router") == "biased")
"""Types whose routers have a correction bias."""
SCORES: Mapping[str, Score] = {
    name: "softmax" if known["router"] == "softmax" else "sigmoid"
    for name, known in TYPES.items()
    if "router" in known
}
"""How the routers of a type score their logits. Other types score or choose differently."""
