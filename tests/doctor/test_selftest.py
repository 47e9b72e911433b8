"""The self-test: real runs on the processor, and failures that do not stop the rest."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.processes import ROOT
from tests.rehearse.bugs import BUG
from tests.warm import SUBPROCESS
from toolkit.backend import BACKENDS
from toolkit.cli.main import main
from toolkit.doctor import selftest
from toolkit.doctor.calibrate import Machine
from toolkit.doctor.selftest import (
    DENSE,
    EXPERTS,
    MARK,
    Check,
    Suite,
    chosen_layouts,
    gpu_machine,
    machine_suites,
    report,
)
from toolkit.errors import EXIT_FAILED, BackendUnavailable
from toolkit.intake.load import load_recipe
from toolkit.rehearse.rehearsal import Options, _assignment, prepare

SECRET = "hf_" + "aB3" * 12
LAYOUTS = ("ddp",)
CPU = Machine("cpu", 2)
SMALLER = [
    f"model.config.{key}"
    for key in ("hidden_size=32", "intermediate_size=64", "num_hidden_layers=2")
]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short sequences (processors without bf16 emulate it), and warm processes."""
    monkeypatch.setattr(selftest, "SEQUENCE", 32)
    for module in ("launchers.ranks", "doctor.selftest"):
        monkeypatch.setattr(f"toolkit.{module}.subprocess", SUBPROCESS)
    monkeypatch.setattr("toolkit.cli.selftest.gpu_machine", lambda: CPU)
    monkeypatch.chdir(ROOT)


def without_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "resume", lambda *_: iter([Check("resume", "", "ok", "")]))


@pytest.mark.slow
def test_losses_and_a_resume_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In bf16 and emulated fp8; fp32 is in the tests of `dmt rehearse`."""
    dense = Suite(load_recipe(DENSE, SMALLER), ("bf16", "fp8"), LAYOUTS)
    experts = Suite(load_recipe(EXPERTS, SMALLER), ("bf16",), ("megatron-ep2",))
    monkeypatch.setattr(selftest, "machine_suites", lambda _: [dense, experts])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    out = tmp_path / "report.md"
    code = main(["doctor", "--gpu-selftest", "--out", str(out), "--json"])
    captured = capsys.readouterr()
    assert code == 0, captured.out + captured.err
    checks = {(one["step"], one["name"]): one for one in json.loads(captured.out)["checks"]}
    assert {one["verdict"] for one in checks.values()} == {"ok"}, checks
    assert {*checks} == {
        *(("tiny-llama-bytes bf16", name) for name in LAYOUTS),
        ("tiny-llama-bytes fp8", "ddp"),
        ("tiny-mixtral-bytes bf16", "megatron-ep2"),
        ("resume", "rank 1 killed"),
    }
    assert "resumed from step [5], repeated 6, " in checks["resume", "rank 1 killed"]["found"]
    text = out.read_text()
    assert text.startswith(MARK) and "| tiny-llama-bytes bf16 | ddp | ok |" in text
    assert "- torch: " in text
    assert not [*tmp_path.glob("dmt-selftest-*")], "nothing failed: nobody needs the runs"


@pytest.mark.slow
def test_a_reduction_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failed check: the bounds of bf16 find a reduction of one step of five."""
    monkeypatch.setenv(BUG, "dropped_reduction")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("toolkit.cli.rehearse.NUMBERS", ("bf16",))
    buggy = partial(Options, worker="tests.rehearse.bugs")
    monkeypatch.setattr("toolkit.cli.rehearse.Options", buggy)
    without_resume(monkeypatch)
    settings = [word for one in SMALLER for word in ("--set", one)]
    command = ["rehearse", str(DENSE), "--on", "gpu", "--layouts", "zero2", "--json", *settings]
    assert main([*command, "--out", str(tmp_path / "report.md")]) == EXIT_FAILED
    failed, resumed = json.loads(capsys.readouterr().out)["checks"]
    assert (failed["verdict"], resumed["verdict"]) == ("failed", "ok")
    assert "step 2: gradient norm" in failed["found"]
    (runs,) = tmp_path.glob("dmt-selftest-*")
    assert (runs / "tiny-llama-bytes/bf16/zero2/logs").is_dir()


def test_a_part_that_raises_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(suite: Suite, *_: object) -> Iterator[Check]:
        yield Check(suite.recipe.name, "begun", "ok", "")
        raise RuntimeError(f"could not log in with {SECRET}\nand more")

    monkeypatch.setattr(selftest, "losses", raises)
    without_resume(monkeypatch)
    suites = [Suite(load_recipe(DENSE))]
    checks = [*selftest.self_test(suites, CPU, tmp_path, Options())]
    assert [(check.step, check.verdict) for check in checks] == [
        ("tiny-llama-bytes", "ok"), ("tiny-llama-bytes", "failed"), ("resume", "ok"),
    ]  # fmt: skip
    assert (checks[1].found, checks[1].tail) == ("could not log in with ***", "and more")


def test_a_report_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567")
    tail = f"token={SECRET}\n0123456789abcdef0123456789abcdef01234567 {Path.home()}/run"
    check = Check("resume", "", "failed", f"{SECRET} was refused", tail=tail)
    text = report(CPU, [check], 60)
    for secret in (SECRET, "0123456789abcdef0123456789abcdef01234567", f"{Path.home()}/run"):
        assert secret not in text
    assert "was refused" in text and "## resume" in text


def test_refusals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(BackendUnavailable, match="needs a GPU, and torch sees none"):
        gpu_machine()
    mine = tmp_path / "mine.txt"
    mine.write_text("own")
    assert main(["doctor", "--gpu-selftest", "--out", str(mine)]) == 2
    assert "exists and was not written by this command" in capsys.readouterr().err
    assert mine.read_text() == "own"


@pytest.mark.parametrize("processes", [1, 2, 8])
def test_layouts_for_gpus_are_legal(processes: int, tmp_path: Path) -> None:
    """Nothing that is planned for H100s is refused, on any number of them, and every engine
    and the kernel that Hopper is planned with are among it."""
    rehearsal = prepare(load_recipe(DENSE), Options(processes=processes))
    layouts = chosen_layouts(rehearsal.layouts[0], processes)
    assert len({one.name for one in layouts}) == len(layouts)
    assert {one.parallel.engine for one in layouts} == set(BACKENDS.names)
    recipe = rehearsal.recipe.with_values({"training.precision": "bf16"})
    for one in layouts:  # in 16 bits, DeepSpeed's stage 0 is skipped
        stage_0 = (one.parallel.engine, one.parallel.zero.stage) == ("deepspeed", 0)
        if one.parallel.expert == 1 and not stage_0:
            folder = tmp_path / one.name
            found = _assignment(recipe, one.parallel, one.processes, folder, "h100-80gb")
            kernel = "varlen" if one.parallel.context != 1 else "cudnn"
            assert found.plan.attention_kernel == kernel


def test_a_gpu_without_a_data_sheet_is_tested_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On one GPU, experts are tested in both implementations."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    device = SimpleNamespace(name="NVIDIA H100 NVL")
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: device)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (9, 0))
    assert gpu_machine() == Machine("h100-80gb", 1, "NVIDIA H100 NVL")
    rehearsal = prepare(load_recipe(EXPERTS), Options(processes=1, gpu="h100-80gb"))
    layouts = chosen_layouts(rehearsal.layouts[0], 1, machine_suites(1)[1].patterns)
    assert {one.parallel.engine for one in layouts} == {"ddp", "megatron"}
