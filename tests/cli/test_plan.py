"""`dmt plan` as a user and as a program reads it."""

import json
import os
import re
from pathlib import Path

import pytest

from tests.dmt import Dmt
from toolkit.cli.recipes import SPEEDS
from toolkit.errors import EXIT_DONE, EXIT_USER_ERROR
from toolkit.intake.load import load_recipe
from toolkit.plan.planner import plan_recipe
from toolkit.starter.draft import is_tiny, shipped_sizes
from toolkit.text.units import human

RECIPES = Path(__file__).parents[2] / "recipes"
LLAMA_8B = str(RECIPES / "llama/llama-3.1-8b-pretrain.yaml")
LLAMA_70B = str(RECIPES / "llama/llama-3.1-70b-pretrain.yaml")
LLAMA_405B = str(RECIPES / "llama/llama-3.1-405b-pretrain.yaml")
EIGHT_NODES = ["--cluster", "8x8xh100-80gb"]
TINY = str(RECIPES / "tiny/llama-bytes.yaml")


def shown(dmt: Dmt, *arguments: str, code: int = EXIT_DONE) -> str:
    return dmt("plan", *arguments, code=code).out


def changed(*settings: str) -> list[str]:
    return [word for one in settings for word in ("--set", one)]


def test_the_whole_answer(dmt: Dmt) -> None:
    fixed = ("parallel.engine=deepspeed", "parallel.model=hf", "training.micro_batch_size=1")
    fixed += ("kernels.compile=none", "parallel.zero.stage=2")
    out = shown(dmt, LLAMA_8B, *changed(*fixed))
    facts, table, why = out.rstrip().split("\n\n")
    title, *lines = facts.splitlines()
    assert title == "llama-3.1-8b-pretrain  8.03B parameters; 32 nodes × 8 h100-80gb"
    assert lines[:3] == [
        "  layout   deepspeed dp256 zero2",
        "  batch    1 micro batch × 4 accumulation × 256 dp = 1,024 samples",
        "  kernels  recompute none, attention cudnn, chunked loss",
    ]
    memory, step, time, run = lines[3:]
    total = re.match(r"  memory   (\d+\.\d) of 79.1 GiB, \d+% free: ", memory)
    assert total is not None
    assert sum(map(float, re.findall(r"[a-zL] (\d+\.\d\d)", memory))) == pytest.approx(
        float(total[1]), abs=0.1
    )
    assert re.match(r"  step     \d\.\d\d s: [\d,]+ tokens/s per GPU, MFU \d+\.\d%$", step)
    assert time.startswith("  time     in s: matmul ")
    assert re.search(r"  run      [\d,]+ steps: \d+\.\d days, [\d,]+ GPU-hours$", run)
    epochs = dmt("plan", "qwen3-8b-sft").out
    assert re.search(
        r"  run      \d epochs? of data .*: [\d.]+ s for each 1,000 samples\n", epochs
    )
    names, chosen, *_ = table.splitlines()
    assert names.split()[:4] == ["engine", "dp", "tp", "pp"]
    assert chosen.split()[0] == "deepspeed"
    assert re.match(r"  why +the (fastest|simplest) layout that fits", why)
    assert why.splitlines()[-1].startswith("  exact but for  bf16, order of sums")


def test_the_best_of_every_strategy(dmt: Dmt) -> None:
    """Also of engines that `auto` does not take; what does not fit comes last."""
    _, table, _ = shown(dmt, LLAMA_8B).split("\n\n")
    header, *rows = [line.split() for line in table.splitlines()]
    zero = header.index("zero")
    assert {row[zero] for row in rows if row[0] == "deepspeed"} == {"1", "2", "3"}
    assert {row[0] for row in rows[:-1]} == {"deepspeed", "megatron", "fsdp", "ddp"}
    assert rows[-2][0] == "ddp" and rows[-2][-3:] == ["too", "much", "-"]
    assert " ".join(rows[-1]).startswith("auto takes deepspeed or megatron")


@pytest.mark.parametrize("recipe", [LLAMA_8B, LLAMA_70B, LLAMA_405B, TINY])
def test_about_30_lines_on_80_columns(
    recipe: str, monkeypatch: pytest.MonkeyPatch, dmt: Dmt
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    out = re.sub(r"\x1b\[[0-9;]*m", "", shown(dmt, recipe))
    assert len(out.splitlines()) <= 34
    assert max(map(len, out.splitlines())) <= 80
    monkeypatch.delenv("FORCE_COLOR")
    assert re.sub(r"\s+", " ", out) == re.sub(r"\s+", " ", shown(dmt, recipe))


def test_explain_shows_other_values_and_formulas(dmt: Dmt) -> None:
    whole = shown(dmt, LLAMA_70B, *EIGHT_NODES, "--explain")
    assert "\n  - zero 3: auto\n" in whole
    assert re.findall(r"parallel\.zero\.stage=(\d+) +(?:fits|does)", whole) == ["2"]
    assert re.search(r"parallel\.engine=megatron +fits .* -\d\.\d%\n", whole)
    formulas = whole.partition("why each number: memory")[2].partition("compared with")[0]
    assert "  - weights 2.05 GiB = weight_bytes · (dense / weight_ranks + experts" in formulas
    assert "  - pipeline bubble" not in formulas, "parts that are zero"


def test_recipes_lists_the_gpus_and_speed_of_every_size_and_task(dmt: Dmt) -> None:
    """The stored speeds are the planner's, one in ten is planned: DMT_UPDATE_GOLDEN=1 plans
    and writes all."""
    paths = {
        f"{size}-{task}": path
        for size, tasks in shipped_sizes().items()
        for task, path in tasks.items()
        if not is_tiny(size)
    }
    renewed = "DMT_UPDATE_GOLDEN" in os.environ
    speeds: dict[str, float] = {}
    for name in [*paths][:: 1 if renewed else 10]:
        plan = plan_recipe(load_recipe(paths[name]), explained=False)
        assert plan.tokens_per_s_per_gpu is not None
        speeds[name] = float(f"{plan.tokens_per_s_per_gpu * plan.layout.world:.2g}")
    if renewed:
        SPEEDS.write_text(json.dumps(speeds, indent=1) + "\n", encoding="utf-8")
    stored = json.loads(SPEEDS.read_text(encoding="utf-8"))
    assert stored.keys() == paths.keys() and stored | speeds == stored
    lines = dmt("recipes").out.splitlines()
    assert max(map(len, lines)) <= 80
    (row,) = (line.split() for line in lines if line.startswith("llama-3.1-8b "))
    assert row[1:5] == ["8.03B", "256", "h100", human(stored["llama-3.1-8b-pretrain"])]


def test_clusters_beside_each_other(tmp_path: Path, dmt: Dmt) -> None:
    priced = tmp_path / "mine.yaml"
    priced.write_text(
        "{name: mine, nodes: 8, gpus_per_node: 8, gpu: h100-80gb, price_per_gpu_hour: 2}"
    )
    out = shown(dmt, LLAMA_70B, *EIGHT_NODES, "--cluster", str(priced))
    header, usual, layout, mine, priced_layout = out.splitlines()
    assert header.split() == ["recipe", "cluster", "GiB", "step", "tok/s/GPU", "MFU"]
    assert (usual.split()[1], mine.split()[1]) == ("8x8xh100-80gb", "mine")
    assert usual.split()[2:] == mine.split()[2:]
    same, _, cost = priced_layout.partition(", cost ")
    assert same == layout and float(cost.replace(",", "")) > 1e6
    alone = json.loads(shown(dmt, LLAMA_70B, "--cluster", str(priced), "--json"))
    run = alone["run"]
    assert run["cost"] == pytest.approx(2 * run["gpu_hours"])
    assert run["gpu_hours"] == pytest.approx(run["days"] * 24 * 64)


def test_recipes_beside_each_other(dmt: Dmt) -> None:
    out = shown(dmt, LLAMA_8B, LLAMA_70B)
    names = ["recipe", "llama-3.1-8b-pretrain", "llama-3.1-70b-pretrain"]
    assert [line.split()[0] for line in out.splitlines() if line[0] != " "] == names
    assert max(map(len, out.splitlines())) <= 80
    both = json.loads(shown(dmt, LLAMA_8B, LLAMA_70B, "--json"))["comparison"]
    assert [one["recipe"] for one in both] == names[1:]


def test_what_does_not_fit_says_how_far_off_and_what_would(dmt: Dmt) -> None:
    tight = ["--cluster", "1x8xh100-80gb", *changed("parallel.engine=megatron")]
    out = shown(dmt, LLAMA_70B, *tight, code=EXIT_USER_ERROR)
    far = re.search(r"needs (\d+\.\d) of 79.1 GiB per GPU, (\d+\.\d) GiB too much", out)
    assert far is not None
    assert float(far[1]) - 79.1 == pytest.approx(float(far[2]), abs=0.11)
    assert re.search(
        r"\n  parallel.engine: megatron +\d+\.\d GiB +[\d,]+ GiB .* s\n    --set ", out
    )
    assert re.search(r"\n  \d+ GPUs are needed +\d+\.\d GiB .*\n    --set cluster.nodes=", out)
    assert len(out.splitlines()) < 30 and "why" not in out
    found = json.loads(shown(dmt, LLAMA_70B, *tight, "--json", code=EXIT_USER_ERROR))
    assert not found["plans"][0]["fits"]
    assert len(found["remedies"]) == 2


def test_launch_prints_layout_trackers_and_warnings_alone(tmp_path: Path, dmt: Dmt) -> None:
    told = dmt("launch", TINY, "--dry-run", "--run-dir", tmp_path / "run").err.splitlines()
    assert "layout deepspeed dp2 zero2, micro batch 8 × 1" in told
    assert "logging to W&B (offline), project dmt" in told
    assert not [line for line in told if "auto" in line or line.startswith("exact")]


def test_json_is_the_contract(dmt: Dmt) -> None:
    captured = dmt("plan", LLAMA_8B, "--json")
    output = json.loads(captured.out)
    assert captured.err == ""
    assert len(output["plans"]) == 8
    times = [plan["step_time_s"] for plan in output["plans"]]
    assert times[1:] == sorted(times[1:]) and times[0] <= 1.1 * min(times)
    for plan in output["plans"]:
        assert plan["engine"] in ("deepspeed", "megatron")
        assert set(plan["layout"]) == {
            "dp", "tp", "pp", "vpp", "cp", "ep", "sequence_parallel", "zero_stage",
            "offload_optimizer", "offload_parameters", "recompute", "loss", "micro_batch",
            "gradient_accumulation", "replicate", "compile", "fused", "experts", "exchange",
        }  # fmt: skip
        memory = plan["memory_gib"]
        parts = memory["model_states"] + memory["activations"] + memory["other"]
        assert memory["total"] == pytest.approx(parts)
        assert sum(plan["memory_parts_gib"].values()) == pytest.approx(parts)
        assert memory["total"] <= 80 and plan["fits"]
        assert sum(plan["time_parts_s"].values()) == pytest.approx(plan["step_time_s"])
        assert 0.1 < plan["mfu"] < 0.7
        speed = 1024 * 8192 / 256 / plan["step_time_s"]
        assert plan["tokens_per_s_per_gpu"] == pytest.approx(speed)
    ledger = output["plans"][0]["ledger"]
    assert {"bf16", "order of sums"} <= {entry["what"] for entry in ledger}


def test_more_nodes_can_be_planned_but_not_launched_from_here(tmp_path: Path, dmt: Dmt) -> None:
    run_dir = tmp_path / "run"
    dmt("check", LLAMA_8B, "--set", "launch.launcher=local")
    message = dmt("launch", LLAMA_8B, "--run-dir", str(run_dir), code=2).err
    assert "launch.rendezvous: nothing" in message
    assert "cluster.nodes is 32\n  fix: " in message
    assert not run_dir.exists()


def test_another_cluster_is_checked_as_the_recipes_own(dmt: Dmt) -> None:
    fp16 = ["--set", "training.precision=fp16", "--set", "cluster.gpu=h100-80gb"]
    assert "found    fp16 on cpu" in dmt("plan", TINY, "--cluster", "2xcpu", *fp16, code=2).err
    tensor = ["--set", "parallel.engine=megatron", "--set", "parallel.tensor=4"]
    assert "megatron dp1 tp4 " in dmt("plan", TINY, "--cluster", "4xcpu", *tensor).out
