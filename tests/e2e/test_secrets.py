"""No credential reaches a file of the run directory, or the terminal."""

from pathlib import Path

import pytest

from tests.e2e.conftest import WANDB, Project
from tests.e2e.hooks import hooked
from tests.e2e.product import Ended, events, run, settings, tool
from tests.processes import ROOT

pytestmark = pytest.mark.slow

CANARY = "canary7d1f2c9b"
SECRETS = {
    "WANDB_API_KEY": f"{CANARY}{'0' * 26}",
    "HF_TOKEN": f"hf_{CANARY}abcdefghijkl",
    "AWS_SECRET_ACCESS_KEY": f"{CANARY}+aws/secret",
    "MY_PASSWORD": f"{CANARY} with a space",
    "DB_PASS": f"{CANARY}db",
    "MY_PAT": f"{CANARY}pat",
    "KEYRING_PASSWORD": f"{CANARY}ring",
    "SURVEYMONKEY_API_KEY": f"{CANARY}survey",
}
ENDINGS = [SECRETS[name] for name in list(SECRETS)[-4:]]


def assert_no_canary(folder: Path, ended: Ended) -> None:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    leaks = [path for path in files if CANARY.encode() in path.read_bytes()]
    assert not leaks
    assert not [path for path in folder.rglob("*") if CANARY in path.name]
    assert CANARY not in ended.out + ended.err


def test_a_run_with_secrets_around_it(project: Project):
    run_dir = project.folder / "secrets"
    password = SECRETS["MY_PASSWORD"].replace(" ", "-")
    changes = {
        **WANDB,
        "training.steps": 2,
        "cluster.gpus_per_node": 1,
        # Not the secret itself, which is refused, but a text around it.
        "name": f"a-{password}-b",
        "launch.kubernetes.pod": f"{{a: [before-{password}, "
        f"{', '.join(map('a {}'.format, ENDINGS))}]}}",
    }
    argv = tool("python", ROOT / "launch" / "train.py", project.recipe, "--run-dir", run_dir)
    env = {**SECRETS, "OTHER_PASSWORD": password}
    ended = run([*argv, *settings(changes)], project.folder, env, code=0)
    assert list(run_dir.glob("wandb/offline-run-*/*.wandb"))
    assert_no_canary(run_dir, ended)


def test_an_exception_that_holds_a_secret(project: Project):
    env = hooked("failing_step", **SECRETS)
    ended = project.launch("failing", WANDB, env=env, code=4)
    assert "error: RuntimeError: cannot log in with ***" in ended.err
    run_dir = project.folder / "failing"
    assert {e["exit_code"] for e in events(run_dir, "end")} == {4}
    assert "cannot log in with ***" in (run_dir / "logs" / "rank-0.log").read_text()
    assert_no_canary(run_dir, ended)
