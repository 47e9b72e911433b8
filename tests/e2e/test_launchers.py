"""The same recipe under every way to start it: the same losses, a complete run directory."""

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.conftest import Project
from tests.e2e.product import checkpoints, curve, events, run, settings, tool
from tests.processes import ROOT
from tests.warm_program import warm_program
from toolkit.data.order import held_out_documents
from toolkit.launchers.base import free_port

pytestmark = pytest.mark.slow

STEPS = {"training.steps": 6}
WORKER = ROOT / "launch" / "train.py"


def assert_same_start(run_dir: Path, reference: Path) -> None:
    """The run's steps are the reference's first ones."""
    found, expected = curve(run_dir), curve(reference)
    assert found
    assert found == {
        step: pytest.approx(expected[step], rel=1e-5) for step in range(1, len(found) + 1)
    }


MPI_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
MPI = ("--bind-to", "none", "-np", "2", "python")


STRAY = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: fp16
num_processes: 2
num_machines: 1
machine_rank: 0
main_process_port: 0
fsdp_config: {fsdp_version: 2}
"""
"""A forgotten default_config.yaml, which switches FSDP on elsewhere (axolotl#394)."""


@pytest.mark.parametrize(
    ("start", "env"),
    [
        (tool("deepspeed", "--num_gpus", "2", "--master_port", str(free_port())), {}),
        (tool("accelerate", "launch", "--config_file", "stray.yaml"), {}),
        pytest.param(
            ["mpirun.openmpi", *MPI], MPI_AS_ROOT, marks=pytest.mark.needs("openmpi-bin")
        ),
        pytest.param(["mpirun.mpich", *MPI], {}, marks=pytest.mark.needs("mpich")),
    ],
    ids=["deepspeed", "accelerate", "openmpi", "mpich"],
)
def test_started_by_their_own_command(
    project: Project, ddp_run: Path, start: list[str], env: dict[str, str]
):
    """As docs/launchers.md shows; rank 0 shows what `dmt launch` shows. torchrun is in
    test_staying_alive.py."""
    (project.folder / "stray.yaml").write_text(STRAY)
    name = f"direct-{Path(start[0]).name}"
    plan = project.launch(name, STEPS, "--dry-run").err
    start = [warm_program() if word == "python" else word for word in start]
    argv = [*start, str(WORKER), str(project.recipe), "--run-dir", name, *settings(STEPS)]
    ended = run(argv, project.folder, env, code=0)
    assert_same_start(project.folder / name, ddp_run)
    assert checkpoints(project.folder / name) == [6]
    assert ended.err.count(plan) == ended.err.count(f"run directory {name}\n") == 1, ended.err
    assert ended.err.count("\nready after ") == 1
    assert ended.err.count("\nstep time    ") == 1
    assert ended.err.count(f"\nexport       {name}/export\n") == 1
    if "accelerate" in name:
        (line,) = [line for line in ended.err.splitlines() if line.startswith("dmt: ")]
        assert "ACCELERATE_USE_FSDP=true (parallel.engine is ddp)" in line
        assert "ACCELERATE_MIXED_PRECISION=fp16 (training.precision is fp32)" in line
        assert "the recipe takes precedence" in line


@pytest.mark.quick
def test_the_run_directory_is_complete(ddp_run: Path):
    files = {"recipe.yaml", "plan.json", "command.txt", "environment.json"}
    files |= {"metrics.jsonl", "events.jsonl", "logs/rank-0.log", "logs/rank-1.log"}
    files |= {"export/config.json", "export/model.safetensors", "export/tokenizer.json"}
    assert {name for name in files if not (ddp_run / name).is_file()} == set()
    assert sorted(curve(ddp_run)) == list(range(1, 21))
    assert checkpoints(ddp_run) == [20]
    assert not list(ddp_run.rglob("*.tmp"))
    (end,) = events(ddp_run, "end")
    assert (end["exit_code"], end["rank"], end["step"]) == (0, 0, 20)


@pytest.mark.quick
def test_the_export_reproduces_the_validation_loss(project: Project, ddp_run: Path):
    """A plain transformers loop over the held-out documents gets the run's last number."""
    model = AutoModelForCausalLM.from_pretrained(ddp_run / "export")
    tokenizer = AutoTokenizer.from_pretrained(ddp_run / "export")
    files = sorted((project.folder / "data").iterdir())
    stream, ends = [], set()
    for document in held_out_documents(len(files), 0.2, 7).tolist():
        stream += [*tokenizer(files[document].read_text())["input_ids"], tokenizer.eos_token_id]
        ends.add(len(stream) - 1)
    n_samples = min((len(stream) - 1) // 32, 4 * 8)
    tokens = torch.tensor(stream[: n_samples * 32 + 1])
    labels = tokens[1:].clone()
    labels[[end for end in ends if end < len(labels)]] = -100
    with torch.no_grad():
        logits = model.eval()(tokens[:-1].view(-1, 32)).logits
    loss = cross_entropy(logits.flatten(0, 1), labels)
    last = events(ddp_run, "evaluation")[-1]
    assert last["tokens"] == int((labels != -100).sum())
    assert loss.item() == pytest.approx(last["loss"], rel=1e-5)
