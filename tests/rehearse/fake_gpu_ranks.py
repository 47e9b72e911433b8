"""Ranks on GPUs that are not there: one process each, forked from one that has imported all.

    python -m tests.rehearse.fake_gpu_ranks < CASES > RESULTS

A file of its own, because what stands for CUDA must be loaded before torch is imported.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib import import_module
from typing import Any

from toolkit.rehearse.gpu import guard

guard.load()
from toolkit.rehearse.gpu import device  # noqa: E402 - torch comes with it

MODE = device.pretend()

import torch  # noqa: E402
from torch.optim.optimizer import register_optimizer_step_pre_hook  # noqa: E402

from tests.engines.parity_worker import Case, recipe  # noqa: E402
from toolkit.backend import BACKENDS  # noqa: E402
from toolkit.checkpoint.copies import HostCopies  # noqa: E402
from toolkit.engines.base import Engine  # noqa: E402
from toolkit.rehearse.gpu.rank import rehearse  # noqa: E402
from toolkit.run.assignment import decide  # noqa: E402


def stay_on_the_host(_: Engine) -> None:
    """The bug: batches are not moved to the GPU."""
    for name in ("data_parallel", "megatron.engine"):
        sys.modules[f"toolkit.engines.{name}"].to_device = lambda batch, _: batch  # type: ignore[attr-defined]


def _changed(engine: Engine, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let the model's second decoder layer change what it returns."""
    chunks = getattr(engine, "chunks", None)
    layer = chunks[0].decoder.layers[1] if chunks else engine.model.model.layers[1]  # type: ignore[attr-defined]
    forward = layer.forward

    def changed(*arguments: Any, **options: Any) -> Any:
        output = forward(*arguments, **options)
        if isinstance(output, tuple):
            return change(output[0]), *output[1:]
        return change(output)

    layer.forward = changed


def scaled(hidden: torch.Tensor) -> torch.Tensor:
    """The bug: fp32 in a residual stream of 16 bits."""
    return hidden * torch.ones(1, hidden.shape[-1], device="cuda")


def looked_at(hidden: torch.Tensor) -> torch.Tensor:
    """The bug: the host waits for the GPU."""
    hidden.sum().item()
    return hidden


def printed(hidden: torch.Tensor) -> torch.Tensor:
    """The bug: a copy to the host, although it says that it does not block."""
    hidden.to("cpu", non_blocking=True)
    return hidden


def synchronized(hidden: torch.Tensor) -> torch.Tensor:
    """The bug: the host waits until the GPU has done everything."""
    torch.cuda.synchronize()
    return hidden


BUGS: dict[str, Callable[[Engine], None]] = {
    "": lambda _: None,
    "host": stay_on_the_host,
    "scaled": partial(_changed, change=scaled),
    "looked_at": partial(_changed, change=looked_at),
    "printed": partial(_changed, change=printed),
    "synchronized": partial(_changed, change=synchronized),
}


def run(case: dict[str, object], world: int, rank: int, bug: str) -> dict[str, object]:
    """What one rank finds, on a machine where a scheduler shows it one of four GPUs."""
    os.environ.update(LOCAL_RANK="3", OMPI_COMM_WORLD_LOCAL_RANK="3")
    wanted = recipe(Case(**case), world)  # type: ignore[arg-type]
    cluster = wanted.cluster.model_copy(update={"gpu": "h100-80gb"})
    assignment = decide(wanted.model_copy(update={"cluster": cluster}), None)
    engines: list[Engine] = []
    streams: list[tuple[str, int]] = []

    def change(engine: Engine) -> None:
        engines.append(engine)
        BUGS[bug](engine)

    _write_down(streams)
    found = rehearse(assignment, rank, MODE, change)
    adamw = _adamw(engines[0])
    return {**asdict(found), "engine": assignment.plan.engine, "streams": streams, **adamw}


def _write_down(streams: list[tuple[str, int]]) -> None:
    """The streams of a save's copies and of updates."""
    copy = HostCopies.of

    def note(event: str) -> None:
        streams.append((event, torch.cuda.current_stream().stream_id))

    def copied(self: HostCopies, values: torch.Tensor) -> torch.Tensor:
        note("copy")
        return copy(self, values)

    HostCopies.of = copied  # type: ignore[method-assign]
    register_optimizer_step_pre_hook(lambda *_: note("update"))


def _adamw(engine: Any) -> dict[str, object]:
    """Whether AdamW is one kernel, and where it counts its steps."""
    parts = getattr(engine.optimizer, "chained_optimizers", [engine])
    adams = [part.optimizer for part in parts if hasattr(part.optimizer, "param_groups")]
    groups = [group for adam in adams for group in adam.param_groups]
    steps = [state.get("step") for adam in adams for state in adam.state.values()]
    return {
        "fused": sorted({bool(group.get("fused")) for group in groups}),
        "counters": sorted(
            {str(step.device) for step in steps if isinstance(step, torch.Tensor)}
        ),
    }


def main() -> None:
    for name in BACKENDS.names:
        import_module(BACKENDS[name].engine.partition(":")[0])
    results = {}
    for name, case, world, rank, bug in json.load(sys.stdin):
        read, write = os.pipe()
        if os.fork() == 0:
            os.dup2(2, 1)
            try:
                result = json.dumps(run(case, world, rank, bug))
            except BaseException:  # noqa: BLE001 - the parent tells it
                result = json.dumps({"error": traceback.format_exc()})
            with os.fdopen(write, "w") as file:
                file.write(result)
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as file:
            results[name] = json.load(file)
        os.wait()
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
