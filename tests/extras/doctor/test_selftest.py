"""`dmt doctor --selftest`: real runs on the processor, failures that do not stop the rest, and
what it would run on GPUs."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.processes import ROOT
from tests.rehearse.bugs import BUG
from tests.warm import SUBPROCESS
from toolkit.backend import BACKENDS
from toolkit.cli.main import main
from toolkit.doctor.calibrate import Machine
from toolkit.errors import EXIT_FAILED, PlanError
from toolkit.extras.doctor.selftest import command as selftest
from toolkit.extras.doctor.selftest import losses, plan, report, runs
from toolkit.extras.doctor.selftest.apart import in_processes
from toolkit.extras.doctor.selftest.check import Check, Workplace
from toolkit.hardware.cluster_file import load_cluster
from toolkit.intake.load import load_recipe
from toolkit.rehearse.comparison import Record, compare
from toolkit.rehearse.rehearsal import LayoutResult, Options, _assignment, prepare
from toolkit.run import jsonl
from toolkit.run.assignment import decide

SECRET = "hf_" + "aB3" * 12
LAYOUTS = ("ddp", "zero2", "fsdp3", "megatron-tp2-sp", "megatron-ep2")
"""One of each engine, and one of experts."""


SMALL = """
extends: {recipe}
model: {{config: {{hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2}}}}
training: {{global_batch_size: 4}}
"""


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fewer layouts of smaller models and shorter sequences (processors without bf16 emulate
    it a hundred times slower), and warm processes; what is measured is measured for real."""
    for name in ("DENSE", "EXPERTS"):
        recipe = getattr(plan, name)
        (tmp_path / recipe.name).write_text(SMALL.format(recipe=recipe))
        monkeypatch.setattr(plan, name, tmp_path / recipe.name)
    chosen = tuple(one for one in plan.layouts_for(2) if one.name in LAYOUTS)
    monkeypatch.setattr(plan, "layouts_for", lambda _: chosen)
    monkeypatch.setattr(losses, "SEQUENCE", 32)
    monkeypatch.setattr("toolkit.launchers.ranks.subprocess", SUBPROCESS)
    monkeypatch.chdir(ROOT)


def checks_of(text: str) -> dict[tuple[str, str], dict[str, Any]]:
    return {(one["step"], one["name"]): one for one in json.loads(text)["checks"]}


def only(monkeypatch: pytest.MonkeyPatch, *titles: str) -> None:
    """Of the whole self-test, the steps whose titles begin so."""
    every = plan.steps
    monkeypatch.setattr(
        plan, "steps", lambda *_: [one for one in every(*_) if one.title.startswith(titles)]
    )


@pytest.mark.slow
@pytest.mark.usefixtures("short")
def test_engines_on_the_processor(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every engine trains for real, in bf16 and emulated fp8, against transformers. fp32 is in
    the tests of `dmt rehearse`."""
    only(monkeypatch, "losses bf16", "losses fp8", "experts")
    folder = tmp_path / "selftest"
    code = main(["doctor", "--selftest", "--processes", "2", "--folder", str(folder), "--json"])
    out, err = capfd.readouterr()
    assert code == 0, out + err
    checks = checks_of(out)
    for precision, names in {
        "losses bf16": LAYOUTS[:4],
        "losses fp8": LAYOUTS[:3],
        "experts bf16": (LAYOUTS[0], LAYOUTS[4]),
    }.items():
        for name in names:
            one = checks.pop((precision, name))
            assert one["verdict"] == "ok", one
            assert one["numbers"]["attention"] == ["flash_for_cpu"], one
    assert not checks
    text = (folder / "report.md").read_text()
    assert text.startswith(plan.MARK) and "| losses bf16 | zero2 | ok |" in text
    assert "- torch: " in text
    assert not (folder / "runs").exists()  # nothing failed: nobody needs them


@pytest.mark.soak
@pytest.mark.usefixtures("short")
def test_runs_and_measurements_on_the_processor(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill and a resume, links, a cluster file, and every engine's speed against its plan."""
    only(monkeypatch, "resume", "bandwidth", "calibrate", "speed")
    folder, cluster = tmp_path / "selftest", tmp_path / "cluster.yaml"
    options = ["--processes", "2", "--folder", str(folder), "--out", str(cluster)]
    code = main(["doctor", "--selftest", "--calibrate", *options, "--json"])
    out, err = capfd.readouterr()
    assert code == 0, out + err
    checks = checks_of(out)
    resumed = checks.pop(("resume", "rank 1 killed"))
    assert resumed["verdict"] == "ok", resumed
    assert resumed["numbers"]["resumed_from"] == [runs.SAVED]
    assert 6 in resumed["numbers"]["repeated"]
    for operation in ("all-reduce", "all-gather", "reduce-scatter", "p2p"):
        assert checks.pop(("bandwidth", operation))["verdict"] == "measured"
    assert checks.pop(("calibrate", "cpu"))["verdict"] == "measured"
    for engine in BACKENDS.names:
        one = checks.pop((f"speed {engine}", "llama-bytes"))
        assert one["verdict"] == "measured" and "from measured speeds" in one["found"], one
    assert not checks
    assert load_cluster(cluster).gpu.measured is not None


@pytest.mark.slow
@pytest.mark.usefixtures("short")
def test_a_rank_that_fails_is_reported_and_the_rest_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layouts fail in their second step; bandwidth is measured all the same."""
    monkeypatch.setenv(BUG, "failing")
    monkeypatch.setattr(losses, "WORKER", "tests.rehearse.bugs")
    chosen = tuple(one for one in plan.layouts_for(2) if one.name in LAYOUTS[:2])
    monkeypatch.setattr(plan, "layouts_for", lambda _: chosen)
    only(monkeypatch, "losses fp32", "bandwidth")
    monkeypatch.setenv("HF_TOKEN", SECRET)
    folder = tmp_path / "selftest"
    assert (
        main(["doctor", "--selftest", "--processes", "2", "--folder", str(folder)])
        == EXIT_FAILED
    )
    out, _ = capfd.readouterr()
    assert "RuntimeError: the disk is full" in out
    assert "log: runs/losses-fp32/ddp/logs" in out
    assert "all-reduce" in out  # the next step ran
    text = (folder / "report.md").read_text()
    assert "bugs.py" in text and "the disk is full" in text
    assert (folder / "runs/losses-fp32/ddp/logs").is_dir()


@pytest.mark.slow
@pytest.mark.usefixtures("short")
def test_the_bounds_of_bf16_find_a_reduction_that_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one step of five, on two ranks."""
    monkeypatch.setenv(BUG, "dropped_reduction")
    monkeypatch.setattr(losses, "WORKER", "tests.rehearse.bugs")
    layouts = tuple(one for one in plan.layouts_for(2) if one.name == "zero2")
    suite = losses.Losses("losses bf16", plan.DENSE, layouts, "bf16")
    (check,) = suite.checks(Workplace(Machine("cpu", 2), tmp_path / "runs"))
    assert check.verdict == "failed"
    assert check.found.startswith("step 2: gradient norm")


def test_a_step_that_raises_does_not_end_the_others(tmp_path: Path) -> None:
    def raises() -> Iterator[Check]:
        yield Check("one", "begun", "ok", "")
        raise RuntimeError(f"could not log in with {SECRET}\nand more")

    def fine() -> Iterator[Check]:
        yield Check("two", "", "ok", "")

    place = Workplace(Machine("cpu", 2), tmp_path)
    found = list(plan.run([plan.Step("one", raises), plan.Step("two", fine)], place))
    assert [(check.step, check.verdict) for check in found] == [
        ("one", "ok"), ("one", "failed"), ("two", "ok"),
    ]  # fmt: skip
    assert found[1].found == "could not log in with ***"


def test_a_report_has_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567")
    tail = f"token={SECRET}\n0123456789abcdef0123456789abcdef01234567 {Path.home()}/run"
    check = Check("resume", "", "failed", f"{SECRET} was refused", log="runs/log", tail=tail)
    place = Workplace(Machine("cpu", 2), tmp_path)
    text = report.write(tmp_path, place, [check], 60).read_text()
    for secret in (SECRET, "0123456789abcdef0123456789abcdef01234567", f"{Path.home()}/run"):
        assert secret not in text
        assert secret not in json.dumps(report.machine_output(place, [check])).replace(
            f"{Path.home()}/run", ""
        )
    assert "was refused" in text and "## resume" in text


def test_refusals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ["--folder", str(tmp_path)]
    (tmp_path / "mine.txt").touch()
    for arguments, code, text in (
        (["--gpu-selftest"], 3, "torch sees no GPU"),
        (["--selftest", *folder], 2, "exists and was not written by this command"),
        (["--selftest", "--processes", "1000"], 2, "--processes: found 1000"),
        (["--selftest", "--out", "cluster.yaml"], 2, "--out would be ignored"),
        (["--selftest", "--bandwidth"], 2, "--bandwidth would be ignored"),
        (["--bandwidth", *folder], 2, "--folder would be ignored"),
    ):
        assert main(["doctor", *arguments]) == code, arguments
        assert text in capsys.readouterr().err
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    device = SimpleNamespace(name="Tesla P40")
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: device)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (6, 1))
    assert main(["doctor", "--gpu-selftest", "--folder", str(tmp_path / "new")]) == 3
    assert "--gpu-selftest: the hardware catalogue does not know" in capsys.readouterr().err
    assert (tmp_path / "mine.txt").exists() and not (tmp_path / "new").exists()


@pytest.mark.parametrize("processes", [1, 2, 4, 8])
def test_what_would_run_on_gpus_is_legal(processes: int, tmp_path: Path) -> None:
    """Nothing that is planned for H100s is refused, on any number of them, and every engine
    and the kernel that Hopper is planned with are among it."""
    place = Workplace(Machine("h100-80gb", processes), tmp_path)
    here = [f"cluster.gpus_per_node={processes}", "cluster.gpu=h100-80gb"]
    rehearsal = prepare(load_recipe(plan.DENSE, here), Options(processes=processes))
    layouts = plan.layouts_for(processes)
    assert len({one.name for one in layouts}) == len(layouts)
    assert {one.parallel.engine for one in layouts} == set(BACKENDS.names)
    training = rehearsal.recipe.training.model_copy(update={"precision": "bf16"})
    recipe = rehearsal.recipe.model_copy(update={"training": training})
    for one in layouts:
        if one.parallel.expert == 1:
            folder = tmp_path / one.name
            found = _assignment(recipe, one.parallel, one.processes, folder, "h100-80gb")
            assert found.recipe.cluster.gpu == "h100-80gb"
            kernel = "varlen" if one.parallel.context != 1 else "cudnn"
            assert found.plan.attention_kernel == kernel
    shape, settings = plan._timed(place)
    for engine in BACKENDS.names:
        overrides = [*settings, *runs.QUIET, *here, f"parallel.engine={engine}"]
        planned = decide(load_recipe(shape, [*overrides, "cluster.nodes=1"]), tmp_path).plan
        assert planned.engine == engine and planned.fits


def test_experts_are_tested_on_one_gpu(tmp_path: Path) -> None:
    """In both implementations, whose layouts have other names there."""
    steps = plan.steps(Workplace(Machine("h100-80gb", 1), tmp_path), None)
    (experts,) = plan.chosen(steps, ["experts"])
    layouts = experts.run.func.__self__.layouts  # type: ignore[attr-defined]
    assert [one.parallel.engine for one in layouts] == ["ddp", "megatron"]


def test_a_gpu_without_a_data_sheet_is_compared_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    device = SimpleNamespace(name="NVIDIA H100 NVL")
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: device)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (9, 0))
    place = plan.workplace(True, None, tmp_path / "selftest")
    assert place.machine == Machine("h100-80gb", 1, "NVIDIA H100 NVL")
    steps = plan.steps(place, None)
    assert [step.title for step in steps if step.title.startswith("losses")]
    (speed,) = plan.run(plan.chosen(steps, ["speed"]), place)
    assert speed.verdict == "skipped" and "no data sheet of NVIDIA H100 NVL" in speed.found
    with pytest.raises(PlanError, match="--only: found 'loses'; the steps here: losses fp32, "):
        plan.chosen(steps, ["resume", "loses"])


@pytest.mark.parametrize(
    ("loss", "gpu", "verdict"),
    [
        (5e-6, "h100-80gb", "ok"),
        (5e-5, "h100-80gb", "measured"),
        (5e-4, "h100-80gb", "failed"),
        (math.inf, "h100-80gb", "failed"),
        (5e-5, "cpu", "failed"),
    ],
)
def test_a_bound_is_softer_on_gpus(loss: float, gpu: str, verdict: str, tmp_path: Path) -> None:
    suite = losses.Losses("losses fp32", plan.DENSE, ())
    place = Workplace(Machine(gpu, 1), tmp_path)
    bounds = suite.bounds
    far = compare(Record([1 + loss], [1.0]), Record([1.0], [1.0]), bounds)
    planned = SimpleNamespace(attention_kernel="sdpa")
    result = LayoutResult(plan.layouts_for(1)[0], planned, comparison=far)  # type: ignore[arg-type]
    check = suite._check(result, bounds, tmp_path, place)
    assert check.verdict == verdict


def test_a_check_is_written_as_soon_as_it_has_ended(tmp_path: Path) -> None:
    place = Workplace(Machine("cpu", 1), tmp_path / "runs")

    def first() -> Iterator[Check]:
        yield Check("first", SECRET, "ok", "")

    def second() -> Iterator[Check]:
        (line,) = jsonl.read(tmp_path / plan.CHECKS)
        assert (line["step"], line["name"]) == ("first", "***")
        yield Check("second", "", "ok", "")

    steps = [plan.Step("first", first), plan.Step("second", second)]
    found = selftest._run(steps, place, 1)
    assert [check.verdict for check in found] == ["ok", "ok"]


@pytest.mark.slow
def test_steps_at_once_are_processes_of_their_own(tmp_path: Path) -> None:
    """Of which one finds nothing to do."""
    place = Workplace(Machine("cpu", 1), tmp_path / "runs")
    place.folder.mkdir()
    names = ("bandwidth", "no such step")
    steps = [plan.Step(name, lambda: iter(())) for name in names]
    found = {step.title: checks for step, checks in in_processes(steps, place, 2)}
    (skipped,), (failed,) = (found[name] for name in names)
    assert (skipped.step, skipped.verdict) == ("bandwidth", "skipped")
    assert failed.verdict == "failed" and "--only: found 'no such step'" in failed.tail
    assert (tmp_path / failed.log).is_file()


def rated(bus_gigabytes_per_s: float) -> dict[str, object]:
    """What the ranks of 8 H100 write of one collective: NVLink has 450 GB/s each way."""
    bus = bus_gigabytes_per_s * 1e9
    rate = {
        "operation": "all-reduce", "message_bytes": 2**28, "seconds": 2**28 / bus,
        "algorithm_bytes_per_s": bus, "bus_bytes_per_s": bus, "peak_bytes_per_s": 450e9,
    }  # fmt: skip
    return {"gpu": "h100-80gb", "nodes": 1, "world": 8, "rates": [rate]}


@pytest.mark.parametrize(("rate", "verdict"), [(370.0, "ok"), (55.0, "measured")])
def test_links_slower_than_nvlink_are_not_ok(
    rate: float, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """55 GB/s is what PCIe 5.0 would give."""
    monkeypatch.setattr(runs, "measured_by_ranks", lambda *_: rated(rate))
    (check,) = runs.bandwidth(Workplace(Machine("h100-80gb", 8), tmp_path))
    assert check.verdict == verdict and check.bound == "25% of the peak"


@pytest.mark.parametrize(("slower", "verdict"), [(1.4, "ok"), (2.5, "measured")])
def test_steps_slower_than_the_plan_are_not_ok(
    slower: float, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launched(_: Workplace, folder: Path, *_others: object, **_settings: object) -> int:
        run = folder / "run"
        run.mkdir(parents=True)
        event = {
            "kind": "prediction",
            "predicted": {"step_time_s": 0.5, "memory_gib": 30.0, "basis": "data sheet"},
            "measured": {"step_time_s": slower / 2, "memory_gib": 31.0, "process_gib": None},
            "measured_over_predicted": {"step_time": slower, "memory": 31 / 30},
        }
        (run / "events.jsonl").write_text(json.dumps(event) + "\n")
        lines = [json.dumps({"step": step, "mfu": 0.4}) for step in range(1, 6)]
        (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        return 0

    monkeypatch.setattr(runs, "_launch", launched)
    place = Workplace(Machine("h100-80gb", 1), tmp_path)
    (check,) = runs.speed(place, "fsdp", plan.BILLION, (), None)
    assert check.verdict == verdict
    assert "MFU 40.0%" in check.found and "data sheets (+" in check.found
