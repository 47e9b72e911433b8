"""Which weights of a transformers model AutoTP splits over tensor-parallel ranks.

`autotp.json` has every model type: what is split, which `python -m tests.models.every_split`
found to train as a plain loop does, or why nothing is. Nothing here imports torch.
"""

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).with_name("autotp.json")
WHY, DIFFERENCE = "why", "difference"
"""Keys of the reason of a type that is not split, and of the largest relative difference of the
losses and gradient norms of one that is."""
COLUMN, GATHERED, ROW, ROW_OF_WHOLE = "column", "column gathered", "row", "row of whole"
QKV, GATE_UP, PARTIAL = "column qkv", "column gate up", "partial"
"""How a linear layer is split: its outputs, which stay split or are gathered; its inputs, of
which a rank has its part or all; outputs that consist of several, each of which is split. Of a
`PARTIAL` module every rank has all, and a part of the gradient, which is summed."""
SUM_INPUTS = (COLUMN, GATHERED, QKV, GATE_UP)
"""Of whose inputs the gradients are summed over the ranks."""
NOT_IN_A_DECODER = "encoder_attn"
"""Modules that a decoder without an encoder has and does not call."""
ADAPTED = {
    COLUMN: "lora_B", GATHERED: "lora_B", QKV: "lora_B", GATE_UP: "lora_B",
    ROW: "lora_A", ROW_OF_WHOLE: "lora_A",
}  # fmt: skip
"""Which of an adapter's two layers is split like its base."""
WHOLE_EXPERTS = "its experts would be whole on every rank"
_LAYER = re.compile(r"(?:.*?\.)?\d+\.(.+)")
_PEFT = re.compile(r"\.(?:base_layer|(lora_[AB])\.default)$")


def base_name(name: str) -> str:
    """The name of a module without that of its part in PEFT's layer."""
    return _PEFT.sub("", name)


class SplitPlan(NamedTuple):
    """What becomes of the modules of one model type."""

    kinds: Mapping[str, str]
    """By the module's name inside of its decoder layer."""
    why: str = ""
    """Why none is split."""

    def kind_of(self, name: str) -> str | None:
        """How the module of this name is split; None: it is whole on every rank."""
        adapter = _PEFT.search(name)
        layer = _LAYER.fullmatch(base_name(name))
        kind = self.kinds.get(layer[1]) if layer else None
        if kind and adapter and adapter[1] and ADAPTED.get(kind) != adapter[1]:
            return None
        return kind


@cache
def table() -> Mapping[str, Mapping[str, Any]]:
    """By model type, the modules of each kind of split, or the reason."""
    found: Mapping[str, Mapping[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def split_plan(model_type: str) -> SplitPlan:
    """What is split of a model type."""
    entry = table().get(model_type)
    if entry is None:
        return SplitPlan({}, "no test has trained it so")
    if WHY in entry:
        return SplitPlan({}, entry[WHY])
    kinds = {kind: names for kind, names in entry.items() if kind != DIFFERENCE}
    return SplitPlan({name: kind for kind, names in kinds.items() for name in names})


def splits_head(vocabulary: int, tied: bool, tensor: int) -> bool:
    """Whether the output head is split: not if the embedding, which is whole, is its weight."""
    return not tied and vocabulary % tensor == 0
