"""`dmt doctor` on machines that lack something, as its users run it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.doctor.broken import bare_path, hiding
from tests.e2e.product import Ended, dmt, run, settings
from tests.processes import ROOT
from toolkit.cli.main import main
from toolkit.doctor import examine
from toolkit.doctor.finding import Finding

TINY = ROOT / "recipes" / "tiny" / "llama-bytes.yaml"
CPU_OFFLOAD = {"parallel.zero.offload_optimizer": "cpu"}


def found(ended: Ended) -> dict[str, dict[str, Any]]:
    """The findings of `--json` by name; the worst of each name."""
    order = ["ok", "note", "warning", "problem"]
    findings = json.loads(ended.out)["findings"]
    findings.sort(key=lambda one: order.index(one["level"]))
    return {one["name"]: one for one in findings}


def without_tools(tmp_path: Path) -> dict[str, str]:
    """No compiler, no numactl, no deepspeed, and the lock of a killed build."""
    lock = tmp_path / "extensions" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    place = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    return {**bare_path(tmp_path, "env"), **hiding(tmp_path, "deepspeed"), **place}


@pytest.mark.slow
def test_a_bare_machine_names_everything_with_its_fix(tmp_path: Path) -> None:
    """Acceptance 6 of issue 6: named, each with its fix; 3 only where the recipe needs it."""
    broken = without_tools(tmp_path)
    fixes = {
        "deepspeed": "pip install 'deepspeed>=",
        "C++ compiler": "apt-get install g++",
        "numactl": "apt-get install numactl",
        "lock of cpu_adam": f"rm {tmp_path / 'extensions' / 'cpu_adam' / 'lock'}",
        "sbatch": "apt-get install slurm-client",
    }
    nothing = run(dmt("doctor"), tmp_path, broken)
    assert nothing.code == 0, nothing.err
    for name, fix in fixes.items():
        line = next(line for line in nothing.out.splitlines() if f" {name} " in line)
        assert line.strip()[0] in "·!✗", line
        assert f"fix: {fix}" in nothing.out, name

    needing = dmt("doctor", TINY, *settings(CPU_OFFLOAD), "--json")
    ended = run(needing, tmp_path, broken)
    assert ended.code == 3, ended.err
    by_name = found(ended)
    needed = {name: one["needed_by"] for name, one in by_name.items() if one["needed_by"]}
    assert needed == {
        "deepspeed": "parallel.engine: deepspeed",
        "C++ compiler": "parallel.zero.offload_optimizer: cpu",
        "lock of cpu_adam": "parallel.zero.offload_optimizer: cpu",
    }
    for name, fix in fixes.items():
        assert by_name[name]["fix"].startswith(fix) or fix in by_name[name]["fix"], name

    other = dmt("doctor", TINY, "--set", "parallel.engine=ddp", "--json")
    ended = run(other, tmp_path, broken)
    assert ended.code == 0, ended.out
    by_name = found(ended)
    assert by_name["deepspeed"]["level"] == "problem"
    assert not any(one["needed_by"] for one in by_name.values())


@pytest.mark.slow
def test_libaio_is_needed_by_nvme_offload_alone(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    nvme = {
        "parallel.zero.offload_optimizer": "nvme",
        "parallel.zero.nvme_path": tmp_path / "nvme",
        "parallel.zero.stage": 3,
    }
    no_header = {"CFLAGS": "-nostdinc"}
    for changes, code in ((nvme, 3), (CPU_OFFLOAD, 0)):
        ended = run(dmt("doctor", TINY, *settings(changes), "--json"), tmp_path, no_header)
        assert ended.code == code, ended.out
        libaio = found(ended)["libaio"]
        assert "apt-get install libaio-dev" in libaio["fix"]
        assert libaio["level"] == ("problem" if code else "warning")


@pytest.mark.slow
def test_without_torch(tmp_path: Path) -> None:
    """It says so, which it could not if any check imported torch here."""
    ended = run(dmt("doctor"), tmp_path, hiding(tmp_path, "torch"))
    assert ended.code == 3, ended.err
    assert "fix: pip install 'torch>=" in ended.out
    assert "Traceback" not in ended.err


@pytest.mark.slow
def test_a_package_that_cannot_be_imported(tmp_path: Path) -> None:
    """As after an upgrade of torch below a compiled package: Dao-AILab/flash-attention#1832."""
    broken = tmp_path / "broken"
    (broken / "flash_attn").mkdir(parents=True)
    (broken / "flash_attn" / "__init__.py").write_text(
        "raise ImportError('flash_attn_2_cuda.so: undefined symbol: _ZN3c10')"
    )
    about = broken / "flash_attn-2.8.3.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\n")
    ended = run(dmt("doctor", "--json"), tmp_path, {"PYTHONPATH": f"{broken}:{ROOT}"})
    assert ended.code == 0, ended.err
    flash = found(ended)["flash-attn"]
    assert flash["level"] == "problem"
    assert "cannot be imported: ImportError: flash_attn_2_cuda.so: undefined" in flash["found"]
    assert flash["fix"].startswith("pip install --force-reinstall --no-build-isolation")


def test_findings_are_printed_as_they_come(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first one is out before the next check begins."""
    printed: list[str] = []

    def checks(*_: object) -> Iterator[Finding]:
        for name in ("python", "torch", "gloo"):
            printed.append(capsys.readouterr().out)
            yield Finding(name, "ok", "there", group="packages")

    monkeypatch.setattr(examine, "examine", checks)
    assert main(["doctor"]) == 0
    first, last = "packages\n  ✓ python ", "  ✓ gloo "
    assert [text[: len(first)] for text in printed[:2]] == ["", first]
    rest = capsys.readouterr().out
    assert rest.startswith(last) and rest.endswith("0 problems, 0 warnings, 0 notes\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--bandwidth", "--calibrate"], "--bandwidth would be ignored"),
        ([str(TINY), "--bandwidth"], "RECIPE would be ignored"),
        (["--set", "training.steps=1"], "--set would be ignored"),
        (["--out", "mine.yaml", "--processes", "2"], "--out, --processes would be ignored"),
        (["--hostfile", "/nonexistent"], "hostfile /nonexistent"),
        (["/nonexistent.yaml"], "/nonexistent.yaml"),
    ],
)
def test_mistakes(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error
