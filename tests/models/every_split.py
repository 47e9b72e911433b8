"""Train a small model of every type with DeepSpeed's AutoTP, and write what is split.

    python -m tests.models.every_split [TYPE …]

Three steps of tensor 2 and ZeRO on two ranks against a plain loop over transformers' model and
torch's AdamW. What trains as that does goes into `toolkit/engines/deepspeed/autotp.json`, the
reason of every other type, too, and both into the table of docs/models.md.
"""

import gc
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest.mock import patch

from torch import nn
from transformers import AutoConfig

from tests import processes
from tests.engines.cases import TOLERANCE
from tests.engines.parity_worker import Case, plain_loop, reference_model, train
from tests.forked import call_ranks
from tests.models.every_type import tiny, write_column
from toolkit.engines.deepspeed import autotp
from toolkit.engines.distributed import Ranks
from toolkit.models import huggingface as hf
from toolkit.models.config_check import check_config
from toolkit.models.families import model_spec
from toolkit.models.families.generic import model_types

STEPS = 3
VOCABULARY = 102
"""Which 2 divides, so that untied heads are split."""
OF_STYLE = {
    "colwise": autotp.COLUMN,
    "rowwise": autotp.ROW,
    "colwise_gather_output": autotp.GATHERED,
    "rowwise_split_input": autotp.ROW_OF_WHOLE,
    "replicated_with_grad_allreduce": autotp.PARTIAL,
}
"""transformers' styles; others, of experts and of latent attention, are left out."""
FUSED = {
    "self_attn.qkv_proj": autotp.QKV,
    "mlp.gate_up_proj": autotp.GATE_UP,
    "ffn.gate_up_proj": autotp.GATE_UP,
}
"""What transformers gathers because its model slices it: each of its parts is split."""
LEAVES = {
    autotp.COLUMN: (
        "q_proj", "k_proj", "v_proj", "query", "key", "value", "query_key_value", "gate_proj",
        "up_proj", "fc1", "fc_in", "dense_h_to_4h", "intermediate.dense",
    ),
    autotp.QKV: ("Wqkv", "qkv_proj"),
    autotp.GATE_UP: ("gate_up_proj", "Wi"),
    autotp.ROW: (
        "o_proj", "out_proj", "down_proj", "fc2", "fc_out", "dense_4h_to_h", "output.dense",
        "attention.dense", "self_attn.dense", "self_attention.dense", "Wo",
    ),
}  # fmt: skip
"""Ends of names by which types without a `tp_plan` are split, as AutoTP does."""
HEAD_NORMS = ("query_layernorm", "key_layernorm", "q_layernorm", "k_layernorm")
NO_REFERENCE = "no small model trains as a plain loop does"
NO_PARTS = "its layers do not run with parts of their heads or features"
NAMED = ("llama", "qwen3", "gemma3_text", "phi3", "gpt_neox", "olmo2")
GENERIC = ("cohere2", "starcoder2", "opt", "gptj", "bert")
"""Types with and without a family file that tests train in ZeRO 0, 1 and 2."""


def config_of(model_type: str) -> dict[str, Any]:
    return tiny(model_type) | {"vocab_size": VOCABULARY}


def candidate(model_type: str) -> dict[str, list[str]]:
    """What transformers' plan splits, or without one, what AutoTP's names say."""
    config = AutoConfig.for_model(**config_of(model_type))
    model = hf.meta_model(config)
    plan = getattr(config, "base_model_tp_plan", None) or {}
    kinds = dict(_planned(plan)) or dict(_by_name(model))
    kinds |= {name: kind for name, kind in FUSED.items() if name in kinds}
    if autotp.QKV in kinds.values() or autotp.GATE_UP in kinds.values():
        # Nothing is gathered any more.
        kinds = {n: autotp.ROW if k == autotp.ROW_OF_WHOLE else k for n, k in kinds.items()}
    found: dict[str, list[str]] = {}
    for name, kind in kinds.items():
        found.setdefault(kind, []).append(name)
    return found


def _planned(plan: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for pattern, style in plan.items():
        layer = re.fullmatch(r"(?:.*\.)?layers\.\*\.(.+)", pattern)
        if layer and style in OF_STYLE:
            yield layer[1], OF_STYLE[style]


def _by_name(model: nn.Module) -> Iterator[tuple[str, str]]:
    for name, module in model.named_modules():
        layer = re.fullmatch(r"(?:.*?\.)?\d+\.(.+)", name)
        if layer and layer[1].endswith(HEAD_NORMS):
            yield layer[1], autotp.PARTIAL
        if layer and isinstance(module, nn.Linear):
            for kind, leaves in LEAVES.items():
                if any(f".{layer[1]}".endswith(f".{leaf}") for leaf in leaves):
                    yield layer[1], kind


def tried(ranks: Ranks, config: Mapping[str, Any], stage: int, entry: Any) -> float:
    """The largest relative difference of losses and gradient norms, on one rank."""
    family = dict(config)
    try:
        expected = plain_loop(*reference_model(Case("ddp", 8, family=family)), steps=STEPS)
    except Exception as error:
        raise LookupError(NO_REFERENCE) from error
    split = {"model": "hf", "tensor": 2}
    case = Case("deepspeed", 4, stage, steps=STEPS, family=family, parallel=split)
    table = autotp.table() if entry is None else {config["model_type"]: entry}
    with patch.object(autotp, "table", lambda: table):
        found = train(case, ranks)
    differences: list[float] = [
        abs(got - want) / abs(want)
        for what in ("loss", "grad_norm")
        for got, want in zip(found[what], expected[what], strict=True)
    ]
    return max(differences)


def each(
    ranks: Ranks, jobs: Sequence[tuple[str, dict[str, Any], int, Any]]
) -> list[float | str]:
    """Of one job after the other, the difference, or the error."""
    found: list[float | str] = []
    for _, config, stage, entry in jobs:
        try:
            found.append(tried(ranks, config, stage, entry))
        except Exception as error:  # noqa: BLE001 - it goes into the table
            print(f"{type(error).__name__}: {error}")
            known = isinstance(error, LookupError) and error.args == (NO_REFERENCE,)
            found.append(NO_REFERENCE if known else NO_PARTS)
        gc.collect()
    return found


def refused(model_type: str) -> str:
    """Why a type is not tried."""
    config = config_of(model_type)
    if check_config(config):
        return NO_REFERENCE
    if model_spec(config).moe_layers:
        return autotp.WHOLE_EXPERTS
    return ""


def entry_of(model_type: str) -> dict[str, Any]:
    """The entry of one type."""
    try:
        if why := refused(model_type):
            return {autotp.WHY: why}
        entry = candidate(model_type)
    except Exception:  # noqa: BLE001 - transformers makes no such model
        return {autotp.WHY: NO_REFERENCE}
    rows = [n for kind in (autotp.ROW, autotp.ROW_OF_WHOLE) for n in entry.get(kind, ())]
    if len(rows) < 2:
        return {autotp.WHY: "neither transformers nor AutoTP says how both attention and MLP "
                "are split"}  # fmt: skip
    job = (model_type, config_of(model_type), 1, entry)
    try:
        results = [ranks[0] for ranks in call_ranks(each, 2, [job])]
    except AssertionError:
        return {autotp.WHY: NO_PARTS}
    if errors := [one for one in results if isinstance(one, str)]:
        return {autotp.WHY: errors[0]}
    worst = max(one for one in results if not isinstance(one, str))
    if not worst <= TOLERANCE:
        return {autotp.WHY: f"differs by {worst:.0e}"}
    return {autotp.DIFFERENCE: float(f"{worst:.0e}"), **entry}


def write(entries: Mapping[str, Any]) -> None:
    """The table, a type on each line."""
    lines = [f"{json.dumps(name)}: {json.dumps(entries[name])}" for name in sorted(entries)]
    autotp.FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def main(types: list[str]) -> int:
    processes.HANG_S = 120.0
    entries = json.loads(autotp.FILE.read_text(encoding="utf-8"))
    for model_type in types or sorted(model_types()):
        entries[model_type] = entry = entry_of(model_type)
        print(model_type, entry.get(autotp.WHY) or entry[autotp.DIFFERENCE], flush=True)
        write(entries)
    autotp.table.cache_clear()
    write_column()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
