"""Single checks: what each says, and who needs it."""

import json
import shlex
import tomllib
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.processes import ROOT
from toolkit.doctor import accelerators, network, packages, storage
from toolkit.doctor.finding import Answer, Finding
from toolkit.doctor.needs import Needs, needs_of
from toolkit.intake.load import load_recipe
from toolkit.system.install import requirements

TINY = ROOT / "recipes" / "tiny" / "llama-bytes.yaml"
TWO_MACHINES = Needs(several_machines="cluster.nodes: 2")
NO_INTERFACES = ("GLOO_SOCKET_IFNAME", "MASTER_ADDR", "WORLD_SIZE")


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NO_INTERFACES, "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


def one(findings: Iterable[Finding], name: str) -> Finding:
    (found,) = (finding for finding in findings if finding.name == name)
    return found


def needs(*overrides: str) -> Needs:
    return needs_of(load_recipe(TINY, overrides))


def test_what_a_recipe_needs(tmp_path: Path) -> None:
    assert set(needs().packages) == {
        "torch",
        "transformers",
        "safetensors",
        "deepspeed",
        "wandb",
    }
    megatron = needs("parallel.engine=megatron", "logging.trackers=[]")
    assert set(megatron.packages) == {"torch", "transformers", "safetensors", "megatron-core"}
    nvme = needs(
        "parallel.zero.stage=3",
        "parallel.zero.offload_optimizer=nvme",
        f"parallel.zero.nvme_path={tmp_path}",
    )
    assert set(nvme.ops) == {"cpu_adam", "pin_memory", "async_io"}
    assert nvme.nvme == tmp_path
    gpus = needs("cluster.gpu=h100-80gb", "training.precision=bf16")
    assert (gpus.gpus, gpus.gpu, gpus.precision) == (2, "cluster.gpu: h100-80gb", "bf16")


def test_a_model_that_only_the_hub_knows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing is downloaded; what the recipe states itself is known."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    found = needs("model.config=null", "model.hub=nobody/nothing")
    assert "deepspeed" in found.packages and not found.ops
    assert "not planned" in found.note


def pins(file: str) -> dict[str, Version]:
    lines = (ROOT / file).read_text().splitlines()
    named = (line.split("==") for line in lines if not line.startswith("#"))
    versions = {canonicalize_name(name): Version(version) for name, version in named}
    return versions | {"gcsfs": versions["s3fs"]}  # released together


def test_the_bounds_of_every_dependency_are_tested_versions() -> None:
    """The oldest and the newest set that tests run with, docs/install.md; CI's is within."""
    oldest, newest = (pins(f".ci/constraints/{name}.txt") for name in ("floor", "newest"))
    between = pins("constraints.txt")
    own = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = own["optional-dependencies"] | {"dev": []}
    of_users = [*own["dependencies"], *(line for lines in extras.values() for line in lines)]
    names = {Requirement(line).name for line in of_users}
    for requirement in chain(*requirements().values()):
        name = requirement.name
        bounds = {one.operator: Version(one.version) for one in requirement.specifier}
        top, bottom = (versions[canonicalize_name(name)] for versions in (newest, oldest))
        assert bounds["<"].release[:2] == (top.major, top.minor + 1), name
        assert between[canonicalize_name(name)] in requirement.specifier, name
        assert bottom in requirement.specifier, name
        lowest = bounds[">="]
        if name in names:
            assert (bottom.major, bottom.minor) == (lowest.major, lowest.minor), name


@pytest.mark.parametrize(("version", "level"), [("0.20.1", "warning"), ("0.19.2", "ok")])
def test_a_version_that_was_not_tested_is_named(
    monkeypatch: pytest.MonkeyPatch, version: str, level: str
) -> None:
    monkeypatch.setattr(packages, "is_installed", lambda _: True)
    monkeypatch.setattr(packages, "_version", lambda _: Version(version))
    found = packages._package("megatron-core", None)
    assert found.level == level
    if level == "warning":
        assert found.found == "0.20.1; newer than the tests ran with (<0.20)"
        assert found.fix == "pip install 'megatron-core>=0.16,<0.20'"


def test_packages_are_those_that_the_recipe_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a recipe DMT's own; each fix installs the part that is used."""
    monkeypatch.setattr(packages, "is_installed", lambda _: False)
    bare = {one.name: one for one in packages.check(Needs())}
    assert {"torch", "deepspeed", "transformers"} < {*bare}
    assert not {"s3fs", "ray", "tensorboard", "flash-attn"} & {*bare}
    recipe = {"s3fs": "data: s3://", "ray": "launch.launcher: ray", "peft": "adapter"}
    absent = {one.name: one for one in packages.check(Needs(packages=recipe))}
    assert {*absent} == {*bare, *recipe}
    assert absent["s3fs"].fix.startswith("pip install 's3fs>=")
    assert absent["ray"].fix.startswith("pip install 'ray>=")
    assert absent["peft"].needed_by == "adapter" and absent["peft"].level == "problem"


def test_a_driver_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """In torch's words."""
    words = "The NVIDIA driver on your system is too old (found version 11040)"
    torch = {"driver": "470.82", "cuda": "13.0", "hip": None, "devices": [], "why": words}
    text = json.dumps(torch | {"nccl": "2.27"})
    monkeypatch.setattr(accelerators, "ask_python", lambda _: Answer(True, text))
    needing = Needs(gpus=1, gpu="cluster.gpu: h100-80gb")
    found = one(accelerators.check(needing), "GPUs")
    assert found.level == "problem" and found.found.endswith(words)
    # pip would keep the torch that is there.
    assert "--force-reinstall torch --index" in found.fix
    assert one(accelerators.check(Needs()), "GPUs").level == "warning"


def test_gpus() -> None:
    volta = ["Tesla V100-SXM2-32GB", 32 * 2**30, 7, 0]
    torch = {"driver": "550.1", "cuda": "12.8", "devices": [volta], "why": ""}
    needing = Needs(gpus=2, gpu="cluster.gpu: v100-32gb", precision="bf16")
    few, old = accelerators._devices(torch, needing)
    assert few.level == "problem" and "sees 1; the recipe has 2" in few.found
    assert "--set cluster.gpus_per_node=1" in few.fix
    assert old.level == "problem" and old.needed_by == "training.precision: bf16"
    (found,) = accelerators._devices(torch, Needs())
    assert found.level == "ok" and "32 GiB" in found.found
    words = "Torch not compiled with CUDA enabled"
    hidden = {"driver": "550.1", "cuda": None, "devices": [], "why": words}
    (found,) = accelerators._devices(hidden, Needs())
    assert found.level == "warning" and words in found.found and "reinstall" in found.fix


def test_a_name_that_is_loopback_breaks_several_machines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without GLOO_SOCKET_IFNAME gloo takes 127.0.0.1, and the run hangs."""
    monkeypatch.setattr("socket.gethostname", lambda: "localhost")
    together = one(network.check(TWO_MACHINES), "host name")
    assert together.level == "problem" and "127.0.0.1" in together.found
    assert "export GLOO_SOCKET_IFNAME=" in together.fix and "/etc/hosts" in together.fix
    for quiet in (Needs(), TWO_MACHINES):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
        assert "host name" not in {found.name for found in network.check(quiet)}
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("localhost", "127.0.0.1"),
        ("no-such-host.invalid", "does not resolve"),
        ("x" * 80, "does not resolve"),
    ],
)
def test_master_address(address: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", address)
    assert not [*network.check(Needs())]
    found = one(network.check(TWO_MACHINES), "MASTER_ADDR")
    assert found.level == "problem" and said in found.found


@pytest.mark.parametrize("hostile", ["x; rm -rf ~", "$(id)", "-oProxyCommand=id", "a'b `id`"])
def test_no_fix_hands_a_foreign_word_to_the_shell(hostile: str, tmp_path: Path) -> None:
    """Users paste fixes: what a recipe states is quoted there."""
    foreign = str(tmp_path / hostile)
    fix = storage._nvme(Path(foreign)).fix
    assert shlex.quote(foreign) in fix and hostile not in fix.replace(shlex.quote(foreign), "")


def test_the_checkpoints_that_are_kept_and_a_new_one_must_fit(tmp_path: Path) -> None:
    """Old ones go only when the new one is complete."""
    assert needs("checkpoint.keep=7").checkpoints_kept == 7
    needing = Needs(run_dir=tmp_path / "mine", checkpoint_bytes=10**18, checkpoints_kept=3)
    found = storage._disk(needing)
    assert found.level == "warning" and "4 checkpoints" in found.found
    assert "take 4000000.0 TB" in found.found


def test_no_other_owner_is_advised_for_a_folder_high_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The nearest folder that is there may be `/`: no advice to own that."""
    monkeypatch.setattr(storage.os, "access", lambda *_: False)  # as for anybody but root
    found = storage._disk(Needs(run="every recipe", run_dir=Path("/none/runs/mine")))
    assert found.level == "problem" and found.found == "cannot write in /"
    assert found.fix == "name another folder with --run-dir"


def test_an_nvme_folder_that_is_not_there(tmp_path: Path) -> None:
    found = storage._nvme(tmp_path / "none")
    assert found.level == "problem" and found.fix.startswith(f"mkdir -p -- {tmp_path / 'none'}")


def test_little_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(storage, "LEAST_SHARED_BYTES", 2**60)
    (found,) = storage._shared_memory(tmp_path, Needs(gpu="cluster.gpu: h200"))
    assert (
        not [*storage._shared_memory(tmp_path, Needs())] or Path("/proc/driver/nvidia").is_dir()
    )
    assert found.level == "warning" and "docker run --shm-size" in found.fix
