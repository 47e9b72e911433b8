"""The engines' steps on fake GPUs mix no devices, widen no activations, and wait once."""

import json
import os
import traceback
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from tests.engines.cases import MIXTRAL, Case, recipe
from tests.rehearse.warm_gpu import fork
from toolkit.rehearse.gpu.account import Account
from toolkit.run.assignment import decide

pytestmark = pytest.mark.slow
OURS = {"_read", "_run", "train_step"}
MCORE = {"get_grad_norm_fp32"}
ROUTED = MCORE | {"_maybe_dtoh_and_synchronize", "permute"}
ZERO = {"independent_gradient_partition_epilogue", "is_invalid_grad_norm"}
ZERO2 = ZERO | {"has_overflow", "mask_nan_or_inf_with_val_inplace"}
ZERO3 = ZERO | {"get_grad_norm_direct", "_allgather_params_coalesced"}
HF, VPP = {"model": "hf"}, {"pipeline": 2, "virtual_pipeline": 2}
RANKS: dict[str, tuple[Case, int, set[str]]] = {
    "ddp": (Case("ddp", 2), 2, set()),
    "fsdp3": (Case("fsdp", 2, 3), 2, set()),
    "tp2": (Case("megatron", 2, parallel={"tensor": 2, "sequence": True}), 4, MCORE),
    "vpp": (Case("megatron", 1, family={"num_hidden_layers": 4}, parallel=VPP), 2, MCORE),
    "ep2": (Case("megatron", 1, family=MIXTRAL, parallel={"expert": 2}), 2, ROUTED),
    "zero2": (Case("deepspeed", 2, 2, parallel=HF), 2, ZERO2),
    "zero3": (Case("deepspeed", 2, 3, parallel=HF), 2, ZERO3),
}
"""Case, ranks, and the functions of libraries that let the host wait in a step."""
aten = torch.ops.aten
READS = (aten._local_scalar_dense.default, aten.equal.default, aten.masked_select.default)
PROMOTING = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)
BUGS = {
    "mixed": lambda hidden: hidden + torch.ones(hidden.shape),
    "widened": lambda hidden: hidden * torch.ones(1, hidden.shape[-1], device="cuda"),
    "waits": lambda hidden: hidden * hidden.sum().item(),
    "synchronized": lambda hidden: torch.cuda.synchronize() or hidden,
}


class Watch(Account):
    """Writes down what no step should do, and where; of waits, those of the last step."""

    def __init__(self) -> None:
        super().__init__(routed=0.5)  # of four experts, two
        self.mixed, self.widened, self.waits = list[str](), list[str](), list[str]()

    def begin(self) -> None:
        super().begin()
        self.waits.clear()

    def wait(self, *_: object, **__: object) -> None:
        if (here := place()) not in self.waits[-1:]:  # reading all of a tensor is one wait
            self.waits.append(here)

    def __torch_dispatch__(self, func: Any, types: Any, *rest: Any) -> Any:
        if DTensor in types:
            return NotImplemented
        args, kwargs, *_ = *rest, {}, {}
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, FakeTensor)]
        kinds = {one.device.type for one in tensors if one.dim()}  # numbers are on any
        widths = {one.dtype for one in tensors if one.dim() > 1 and one.shape[-1] > 1}
        if func in READS and args[0].is_cuda:
            self.wait()
        elif func in (aten._to_copy.default, aten.copy_.default):
            target = torch.device(kwargs.get("device") or args[0].device).type
            pending = target == "cuda" and kwargs.get("non_blocking", args[-1] is True)
            if {tensors[-1].device.type, target} == {"cpu", "cuda"} and not pending:
                self.wait()
        elif func.namespace == "aten" and len(kinds) > 1 and "index" not in func._opname:
            self.mixed.append(place())
        elif func in PROMOTING and len(widths) > 1 and any(map(is_layer, self._modules)):
            self.widened.append(place())
        return super().__torch_dispatch__(func, types, *rest)

    def _leave(self, module: nn.Module, *rest: Any) -> None:
        super()._leave(module, *rest)
        stream = rest[-1][0] if isinstance(rest[-1], tuple) else rest[-1]
        if is_layer(module) and stream.dtype != torch.bfloat16:
            self.widened.append(type(module).__name__)


def is_layer(module: nn.Module) -> bool:
    return type(module).__name__.endswith(("DecoderLayer", "TransformerLayer"))


def place() -> str:
    """`file:line function` of the innermost frame outside of torch and of rehearsals."""
    skipped = (
        "/torch/",
        "/rehearse/gpu/",
        "/tests/",
        "contextlib",
        "functools",
        "_accelerator.py",
    )
    for frame in reversed(traceback.extract_stack()):
        if not any(one in frame.filename for one in skipped):
            return f"{Path(frame.filename).name}:{frame.lineno} {frame.name}"
    return "torch"


def step(name: str, bug: str, result: Path) -> None:
    """Train in a process where a scheduler shows one of four GPUs; `bug`: of a layer."""
    from toolkit.rehearse.gpu import device, rank

    os.environ.update(LOCAL_RANK="3", OMPI_COMM_WORLD_LOCAL_RANK="3")
    case = replace(RANKS[name][0], precision="bf16", gpu="h100-80gb")
    assignment = decide(recipe(case, world := RANKS[name][1]), None)
    watch, build, make = Watch(), rank.build_engine, torch.tensor

    def built(*arguments: Any, **options: Any) -> Any:
        engine: Any = build(*arguments, **options)
        if bug:
            forward = (layer := engine.model.model.layers[1]).forward
            layer.forward = lambda *inputs, **more: BUGS[bug](forward(*inputs, **more))
        return engine

    def made(*numbers: Any, **options: Any) -> Any:
        watch.wait() if "cuda" in str(options.get("device")) else None
        return make(*numbers, **options)

    rank.Account, rank.build_engine, torch.tensor = lambda _: watch, built, made
    for owner in (torch.cuda, torch.accelerator, device.Idle):
        owner.synchronize = watch.wait
    with suppress(RuntimeError if bug else ()):
        rank.rehearse(assignment, world - 1, device.pretend())
    result.write_text(json.dumps([watch.mixed, watch.widened, watch.waits]))


@pytest.mark.parametrize("name", RANKS)
def test_a_step_on_gpus(name: str, tmp_path: Path) -> None:
    assert (done := fork(step, name, "", tmp_path / "found"))[0] == 0, done[1]
    mixed, widened, waits = json.loads((tmp_path / "found").read_text())
    assert not mixed + widened
    places = [one.split()[-1] for one in waits]
    ours = [one for one in places if one in OURS]
    assert len(ours) == 1 and {*places} - {*ours} == RANKS[name][2]


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str, tmp_path: Path) -> None:
    fork(step, "fsdp3", bug, tmp_path / "found")
    mixed, widened, waits = json.loads((tmp_path / "found").read_text())
    assert {"mixed": mixed, "widened": widened}.get(bug, waits[1:])
