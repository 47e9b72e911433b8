"""W&B may fail in any way: the run ends well, with the same losses, and says so once."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import WANDB, Project
from tests.e2e.product import Command, Ended, checkpoints, curve, events, started
from tests.processes import ROOT

pytestmark = pytest.mark.slow

ONE_RANK = {**WANDB, "training.steps": 6, "cluster.gpus_per_node": 1}


def assert_trained_without_wandb(ended: Ended, run_dir: Path, reference: Path) -> None:
    assert ended.code == 0, ended.err
    assert ended.err.count("W&B is off") == 1, ended.err
    assert len(events(run_dir, "warning")) == 1
    assert "Traceback" not in ended.err
    found, expected = curve(run_dir), curve(reference)
    assert found == {step: pytest.approx(expected[step], rel=1e-5) for step in range(1, 7)}
    assert checkpoints(run_dir) == [6]
    assert (run_dir / "export" / "model.safetensors").exists()


@pytest.fixture(scope="module", autouse=True)
def run_without_server(project: Project) -> Iterator[Command]:
    """Runs beside the other tests: at its end it waits 15 s for W&B."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # Nobody listens.
        env = {
            "WANDB_BASE_URL": f"http://127.0.0.1:{closed.getsockname()[1]}",
            "WANDB_API_KEY": "0" * 40,
        }
        argv = project.command("wandb-away", {**ONE_RANK, "logging.wandb.mode": "online"})
        with started(argv, project.folder, env) as command:
            yield command


def test_it_is_not_installed(project: Project, ddp_run: Path, tmp_path: Path):
    (tmp_path / "wandb.py").write_text("raise ImportError('not here')\n")
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    ended = project.launch("wandb-missing", ONE_RANK, env=env, cold=True)
    assert "pip install wandb" in ended.err
    assert_trained_without_wandb(ended, project.folder / "wandb-missing", ddp_run)


def test_its_server_is_away(project: Project, ddp_run: Path, run_without_server: Command):
    run_dir = project.folder / "wandb-away"
    assert_trained_without_wandb(run_without_server.end(), run_dir, ddp_run)
