"""`dmt doctor` on machines that lack something, as its users run it."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.doctor.broken import bare_path, hiding
from tests.e2e.product import Ended, dmt, run, settings
from tests.processes import ROOT
from toolkit.cli.main import main
from toolkit.doctor import examine, packages, toolchain
from toolkit.doctor.finding import Finding
from toolkit.doctor.needs import Needs

TINY = ROOT / "recipes" / "tiny" / "llama-bytes.yaml"
CPU_OFFLOAD = {"parallel.zero.offload_optimizer": "cpu"}


def found(ended: Ended) -> dict[str, dict[str, Any]]:
    """The findings of `--json` by name; the worst of each name."""
    order = ["ok", "warning", "problem"]
    findings = json.loads(ended.out)["findings"]
    findings.sort(key=lambda one: order.index(one["level"]))
    return {one["name"]: one for one in findings}


def without_tools(tmp_path: Path) -> dict[str, str]:
    """No compiler, no numactl, no deepspeed."""
    return {**bare_path(tmp_path, "env"), **hiding(tmp_path, "deepspeed")}


@pytest.mark.slow
def test_what_the_recipe_needs_is_named_with_its_cost_and_fix(tmp_path: Path) -> None:
    """On a machine without tools; 3 only where the recipe needs them."""
    broken = without_tools(tmp_path)
    nothing = run(dmt("doctor"), tmp_path, broken)
    assert nothing.code == 0, nothing.err
    actions = [line for line in nothing.out.splitlines() if line[0] in "!✗"]
    assert "! deepspeed" in {line.split("  ")[0] for line in actions}
    assert "C++" not in nothing.out and "sbatch" not in nothing.out

    ended = run(dmt("doctor", TINY, *settings(CPU_OFFLOAD), "--json"), tmp_path, broken)
    assert ended.code == 3, ended.err
    by_name = found(ended)
    assert {name: one["needed_by"] for name, one in by_name.items() if one["needed_by"]} == {
        "deepspeed": "parallel.engine: deepspeed",
        "C++ compiler": "parallel.zero.offload_optimizer: cpu",
        **{
            name: "parallel.zero.offload_optimizer: cpu"
            for name in ("ninja", "Python headers")
            if name in by_name
        },
    }
    assert by_name["deepspeed"]["fix"].startswith("pip install 'deepspeed>=")
    assert by_name["C++ compiler"]["fix"].startswith("apt-get install g++")
    assert "before its first step" in by_name["C++ compiler"]["cost"]


def test_libaio_is_needed_by_nvme_offload_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.engines.deepspeed.ops._libaio_links", lambda *_: False)
    monkeypatch.setattr(toolchain, "compiled_at_start", list)
    nvme = Needs(ops={"cpu_adam": "offload: nvme", "async_io": "nvme"})
    (libaio,) = (one for one in toolchain.check(nvme) if one.name == "libaio")
    assert "apt-get install libaio-dev" in libaio.fix and libaio.needed_by == "nvme"
    offload = toolchain.check(Needs(ops={"cpu_adam": "offload: cpu"}))
    assert "libaio" not in {one.name for one in offload}


@pytest.mark.slow
def test_without_torch(tmp_path: Path) -> None:
    """It says so, which it could not if any check imported torch here."""
    ended = run(dmt("doctor"), tmp_path, hiding(tmp_path, "torch"))
    assert ended.code == 3, ended.err
    assert "fix: pip install 'torch>=" in ended.out
    assert "Traceback" not in ended.err


def test_a_package_that_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an upgrade of torch below a compiled package: Dao-AILab/flash-attention#1832."""
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text(
        "raise ImportError('flash_attn_2_cuda.so: undefined symbol: _ZN3c10')"
    )
    about = tmp_path / "flash_attn-2.8.3.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    flash = next(one for one in packages.check(Needs()) if one.name == "flash-attn")
    assert flash.level == "warning"
    assert "cannot be imported: ImportError: flash_attn_2_cuda.so: undefined" in flash.found
    assert flash.fix.startswith("pip install --force-reinstall --no-build-isolation")


def test_a_group_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [Finding(name, "ok", "there", group="packages") for name in ("python", "torch")]
    few = Finding("files", "warning", "few", cost="much", fix="more", group="storage")
    monkeypatch.setattr(examine, "examine", lambda _: [*found, few])
    assert main(["doctor"]) == 0
    first, rest = capsys.readouterr().out.split("\n", 1)
    assert first.split() == ["✓", "packages", "python", "there,", "torch", "there"]
    assert "! files          few\n    costs: much\n    fix: more\n" in rest
    assert rest.endswith("0 problems, 1 warning\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpu-selftest", "--calibrate"], "without --calibrate"),
        ([str(TINY), "--calibrate"], "not with --calibrate"),
        (["--bandwidth"], "`dmt doctor --bandwidth` was removed"),
        (["--set", "training.steps=1"], "with RECIPE"),
        (["--out", "mine.yaml"], "with --calibrate or --gpu-selftest"),
        (["--hostfile", "hosts"], "`dmt doctor --hostfile` was removed"),
        (["/nonexistent.yaml"], "/nonexistent.yaml"),
    ],
)
def test_mistakes(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error
