"""Scripts that are not ours train as `dmt launch` does, with a recipe's parallelism."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import get_scheduler

from tests.accelerate.conftest import STEPS
from tests.accelerate.examples_worker import EXAMPLES, both_examples
from tests.e2e.conftest import Project
from tests.e2e.product import dmt, run, settings, tool
from tests.forked import run_ranks
from tests.processes import HANG_S, ROOT
from toolkit.accelerate.scripts import (
    nearest_schedule,
    planned_for_launcher,
    prepare,
    training_arguments,
)
from toolkit.errors import PlanError, RecipeError
from toolkit.recipe.schema import ScheduleSection
from toolkit.train.schedule import learning_rate

TINY = ROOT / "recipes" / "tiny" / "llama-bytes.yaml"
FSDP = "parallel.engine=fsdp"
SAME = 1e-6
"""Largest relative difference between losses in fp32; 5e-8 measured."""
SAME_BF16 = 1e-3
ONE_RANK = ["cluster.gpus_per_node=1", FSDP, "training.precision=bf16"]
RUNS = {
    "own loop, zero2": "zero2",
    "own loop, zero3": "zero3",
    "own loop, fsdp2": "fsdp2 in 3 units",
    "trainer, zero3": "zero3",
}
"""What shards the model: of FSDP2's units, two are layers."""


@pytest.fixture(scope="module")
def results(finetune: Project, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Both examples under every engine, in one start of two ranks."""
    return run_ranks(both_examples, 2, finetune.recipe, tmp_path_factory.mktemp("output"))[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_the_losses_are_the_workers(
    name: str, results: dict[str, Any], worker_losses: list[float]
) -> None:
    """Accumulation, uneven masks, clipping, weight decay and schedule included."""
    found = results[name]
    assert found["losses"] == pytest.approx(worker_losses, rel=SAME)
    assert (len(found["losses"]), found["kind"]) == (STEPS, RUNS[name])


@pytest.mark.slow
def test_rotary_frequencies_stay_fp32_under_deepspeed(
    results: dict[str, Any], worker_losses: list[float]
) -> None:
    """The worker of the test looks at the buffers' types."""
    losses = results["own loop, bf16"]["losses"]
    assert losses == pytest.approx(worker_losses, rel=SAME_BF16)
    assert losses != worker_losses


def launched(project: Project, script: Path, changes: dict[str, object], *more: str) -> str:
    """What a script prints under `accelerate launch`, by the file rendered of the recipe."""
    file, stated = project.folder / "rendered.yaml", settings(changes)
    rendered = dmt("render", project.recipe, "--to", "accelerate", *stated)
    file.write_text(run(rendered, project.folder, code=0).out)
    start = tool("accelerate", "launch", "--config_file", file, script, project.recipe)
    return run([*start, *more, *stated], project.folder, code=0).out


@pytest.mark.slow
def test_a_loop_of_ones_own_under_accelerate_launch(
    finetune: Project, worker_losses: list[float]
) -> None:
    zero2 = {"parallel.engine": "deepspeed", "parallel.zero.stage": 2}
    printed = launched(finetune, EXAMPLES / "accelerate_loop.py", zero2)
    found = [float(loss) for loss in re.findall(r"^step .*loss (\S+)$", printed, re.M)]
    assert found == pytest.approx(worker_losses, rel=SAME)


PEAK, ALL = 1e-2, 20


@pytest.mark.parametrize("smallest", [0.0, 1e-3])
@pytest.mark.parametrize("name", ["cosine", "linear", "constant", "wsd"])
def test_the_schedule_of_a_plain_trainer(name: Any, smallest: float) -> None:
    """It is the recipe's, less than one step late."""
    decay = 5 if name == "wsd" else None
    schedule = ScheduleSection(
        name=name, warmup_steps=4, decay_steps=decay, min_learning_rate=smallest
    )
    stated = nearest_schedule(schedule, PEAK)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = get_scheduler(
        stated["lr_scheduler_type"],
        optimizer,
        num_warmup_steps=stated["warmup_steps"],
        num_training_steps=ALL,
        scheduler_specific_kwargs=stated["lr_scheduler_kwargs"],
    )
    rates = []
    for _ in range(ALL):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    ours = [learning_rate(step, ALL, PEAK, schedule) for step in range(ALL)]
    # wsd's warm-up starts at its smallest rate, not at 0.
    first = schedule.warmup_steps if name == "wsd" else 1
    for step in range(first, ALL):
        around = ours[step - 1 : step + 1]
        assert min(around) - 1e-9 <= rates[step] <= max(around) + 1e-9, step


@pytest.mark.parametrize(
    ("environ", "overrides", "said"),
    [
        # Accelerate's MULTI_CPU, for one, starts one process where two were asked for.
        ({"WORLD_SIZE": "1"}, [], r"has 1 node\(s\) with 2 .* the launcher started 1"),
        # axolotl#394, a stray Accelerate configuration switched FSDP on.
        ({"ACCELERATE_USE_FSDP": "true"}, [], "is configured for fsdp, .* engine deepspeed"),
        # It would replicate what the plan shards, whatever plugin the script passes.
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, [FSDP], "USE_PARALLELISM_CONFIG=true"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, [FSDP], "ACCELERATE_USE_MEGATRON_LM=true"),
        ({}, ["training.stepz=3"], r"training\.stepz"),
        ({}, ["parallel.model=megatron"], "which an Accelerate script cannot run"),
    ],
)
def test_what_disagrees_with_the_launcher_is_refused(
    environ: dict[str, str],
    overrides: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, text in {"WORLD_SIZE": "2", **environ}.items():
        monkeypatch.setenv(name, text)
    with pytest.raises((PlanError, RecipeError), match=said):
        planned_for_launcher(TINY, overrides)


def test_a_file_for_the_plans_engine_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert planned_for_launcher(TINY, [FSDP])[1].engine == "fsdp"


def test_variables_neither_compile_nor_offload(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate takes from the environment whatever a script leaves open."""
    code = (
        "import toolkit.accelerate as a\n"
        f"state = a.prepare({str(TINY)!r}, {ONE_RANK}).state\n"
        "plugin = state.fsdp_plugin\n"
        "print(state.dynamo_plugin.backend.value, "
        "getattr(plugin, 'activation_checkpointing_offload', False), "  # since 1.11
        "plugin.mixed_precision_policy.reduce_dtype)"
    )
    environ = {
        "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "true",
    }
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S
    )
    assert ended.stdout.splitlines()[-1].split() == ["NO", "False", "torch.float32"], (
        ended.stderr
    )
    assert "ACCELERATE_DYNAMO_BACKEND=INDUCTOR (kernels.compile decides)" in ended.stderr


EARLY = ["evaluation.patience=2", "evaluation.every_steps=5", "parallel.engine=ddp"]


@pytest.mark.parametrize(
    ("overrides", "more", "said"),
    [
        *(([], {name: {}}, f"^{name} is given, .*: engine deepspeed")
          for name in ("deepspeed", "fsdp_config", "use_cpu")),
        (["optimizer.name=muon"], {}, r"optimizer\.name, which TrainingArguments cannot"),
        (EARLY, {}, r"evaluation\.patience, which Training"),
        (["optimizer.groups=[{parameters: ['*'], lr_mult: 0.5}]"], {}, r"optimizer\.groups"),
        ([FSDP], {}, "a Trainer on CPUs would not shard"),
    ],
)  # fmt: skip
def test_what_no_argument_may_state_is_refused(
    overrides: list[str], more: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(PlanError, match=said):
        training_arguments(TINY, overrides, output_dir="out", **more)
    with pytest.raises(PlanError, match=r"^cpu is given"):
        prepare(TINY, cpu=True)
