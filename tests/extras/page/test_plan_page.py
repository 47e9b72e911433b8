"""The page of a plan: what it shows are the plan's own numbers, and all of it can be read."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.browser import Tab, browser
from tests.processes import ROOT
from toolkit.cli.main import main
from toolkit.extras.page.plan import (
    memory_stacks,
    name_of,
    step_parts,
    step_stacks,
    timelines,
    windows,
)
from toolkit.extras.page.timetable import timetable
from toolkit.hardware.cluster import parse_cluster
from toolkit.intake.load import load_recipe
from toolkit.layout import EngineName, Layout, Pair
from toolkit.models.families import model_spec
from toolkit.plan.cost.workload import planned_workload
from toolkit.plan.estimate import Estimate, Setup, estimate
from toolkit.text.units import GIB, seconds

TINY = str(ROOT / "recipes/tiny/llama-bytes.yaml")
LLAMA_70B = str(ROOT / "recipes/llama/llama-3.1-70b-pretrain.yaml")


def estimated(where: str, engine: EngineName, recipe: str, layout: Layout) -> Estimate:
    loaded = load_recipe(ROOT / "recipes" / recipe)
    assert loaded.model.config is not None
    pair = Pair(engine, "megatron" if engine == "megatron" else "hf")
    workload = planned_workload(model_spec(loaded.model.config), loaded.training, pair)
    return estimate(Setup(workload, layout, parse_cluster(where)))


def llama_8b(engine: EngineName, **layout: Any) -> Estimate:
    recipe = "llama/llama-3.1-8b-pretrain.yaml"
    return estimated("1x8xh100-80gb", engine, recipe, Layout(**layout))


@pytest.fixture(scope="module")
def some() -> list[Estimate]:
    """A pipeline, ZeRO-3 with recompute, and one that does not fit."""
    return [
        llama_8b("megatron", dp=2, pp=4, vpp=2, zero_stage=1, gradient_accumulation=64),
        llama_8b("fsdp", dp=8, zero_stage=3, recompute="full", gradient_accumulation=16),
        llama_8b("megatron", dp=8, zero_stage=1, gradient_accumulation=16),
    ]


@pytest.fixture(scope="module")
def large() -> list[Estimate]:
    """405B on 2,048: sixteen ranks, many thin passes."""
    layout = Layout(dp=16, tp=8, pp=16, vpp=4, sequence_parallel=True, zero_stage=1,
                    gradient_accumulation=64)  # fmt: skip
    recipe = "llama/llama-3.1-405b-pretrain.yaml"
    return [estimated("256x8xh100-80gb", "megatron", recipe, layout)]


@pytest.fixture(scope="module")
def tiny() -> list[Estimate]:
    """Two processes of a CPU: no limit, a few MiB, no pipeline."""
    layout = Layout(dp=2, zero_stage=2, micro_batch=8)
    return [estimated("1x2xcpu", "deepspeed", "tiny/llama-bytes.yaml", layout)]


def test_parts_add_up(some: list[Estimate]) -> None:
    names = ["a", "b", "c"]
    memory, step = memory_stacks(names, some), step_stacks(names, some)
    for one, held, spent in zip(some, memory["rows"], step["rows"], strict=True):
        assert sum(step_parts(one.time).values()) == pytest.approx(one.time.total_s)
        assert sum(spent[3]) == pytest.approx(one.time.total_s)
        assert len(spent[3]) == len(step["parts"]) <= 9, "colours of the page"
        assert sum(held[3]) * GIB == pytest.approx(one.memory.total)
        assert len(held[3]) == len(memory["parts"]) <= 9
        assert spent[1].startswith(f"{seconds(one.time.total_s)}, MFU ")
        assert held[1].startswith(f"{one.memory.total / GIB:.2f} GiB")
        assert held[1].endswith(", does not fit") == held[2]
    assert [row[2] for row in memory["rows"]] == [True, False, True]
    assert memory["limit"] == [pytest.approx(79.1, abs=0.05), "limit 79.1 GiB"]


def test_a_processor_has_no_limit(tiny: list[Estimate]) -> None:
    memory = memory_stacks(["one"], tiny)
    assert memory["limit"] is None and memory["rows"][0][1].endswith(" MiB")


def test_name_says_what_differs() -> None:
    layout = Layout(dp=2, pp=4, vpp=2, micro_batch=2, offload_optimizer="cpu")
    expected = "megatron · pp 4 · vpp 2 · dp 2\nzero 0 · micro batch 2 · offload to cpu"
    assert name_of("megatron", layout) == expected
    assert name_of("fsdp", replace(layout, recompute="full")).endswith(
        "micro batch 2 · full recompute · offload to cpu"
    )


@pytest.mark.parametrize("what", ["some", "large", "tiny"])
def test_timeline_is_the_pipeline(what: str, request: pytest.FixtureRequest) -> None:
    """What follows the last pass takes no room, but is stated; nothing else is left out."""
    one = request.getfixturevalue(what)[0]
    layout = one.setup.layout
    parts = [*timelines(layout, one.time)]
    table = timetable(
        one.time.passes, layout.gradient_accumulation, layout.vpp, one.time.message_s
    )
    assert parts[0]["window"][0] == 0
    assert parts[-1]["window"][1] == pytest.approx(table.total_s)
    assert len(parts) == {"some": 2, "large": 2, "tiny": 1}[what]
    every = {(slot.rank, slot.direction, slot.micro_batch, slot.chunk, slot.start_s)
             for slots in table.slots for slot in slots}  # fmt: skip
    drawn = {tuple(slot[:5]) for part in parts for slot in part["slots"]}
    assert drawn <= every and {slot[0] for slot in drawn} == set(range(layout.pp))
    if len(parts) == 1:
        assert drawn == every
    else:
        (_, until), (since, _) = windows(table)
        assert drawn >= {slot for slot in every if slot[4] < until or slot[4] > since}
        assert f"{seconds(since - until)} of the same are left out" in parts[1]["title"]
    assert f"host, stragglers {seconds(one.time.overhead_s)}" in parts[0]["note"]
    assert ("pipeline" in parts[0]["note"].partition(";")[0]) or layout.pp == 1


def written(file: Path, *arguments: str) -> dict[str, Any]:
    """The data of a page that is written here."""
    assert main(["plan", *arguments, "--html", str(file)]) == 0
    found = re.search(r'id="data">(.*?)</script>', file.read_text(encoding="utf-8"))
    assert found is not None
    data = json.loads(found[1])
    assert isinstance(data, dict)
    return data


def test_the_page_has_the_numbers_of_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = ["--cluster", "8x8xh100-80gb"]
    data = written(tmp_path / "plan.html", LLAMA_70B, *cluster, "--json", "--top", "8")
    captured = capsys.readouterr()
    assert captured.err == f"{tmp_path / 'plan.html'} written\n"
    plans = json.loads(captured.out)["plans"]
    (run,) = data["runs"]
    assert run["name"] == "llama-3.1-70b-pretrain on 8x8xh100-80gb"
    memory, step, alternatives, layout, why = run["sections"]
    for plan, held, spent in zip(
        plans, memory["stacks"]["rows"], step["stacks"]["rows"], strict=True
    ):
        assert sum(held[3]) == pytest.approx(plan["memory_gib"]["total"])
        assert sum(spent[3]) == pytest.approx(plan["step_time_s"])
    assert len(alternatives["table"]) == 1 + len(plans)
    assert ["engine", plans[0]["engine"]] in layout["facts"]
    assert why["items"] == plans[0]["reasons"]
    again = written(tmp_path / "again.html", LLAMA_70B, *cluster)
    assert again == data, "the same plan, the same page"


@pytest.mark.parametrize("file", ["no/such/folder/plan.html", "notes.txt"])
def test_a_page_that_cannot_be_written_is_refused_first(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("mine")
    assert main(["plan", TINY, "--json", "--html", file]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and f"--html: {file} " in captured.err
    assert Path("notes.txt").read_text() == "mine"


def test_a_page_of_several_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", TINY, TINY, "--html", "both.html"]) == 2
    assert "--html: one recipe on one cluster" in capsys.readouterr().err


@pytest.fixture(scope="module", params=["light", "dark"])
def tab(request: pytest.FixtureRequest) -> Iterator[Tab]:
    dark = request.param == "dark"
    with browser(dark=dark, width=420 if dark else 1400) as tab:
        yield tab


COLOURS = """(() => {
    const canvas = document.querySelector('figure canvas'), ctx = canvas.getContext('2d');
    const { data } = ctx.getImageData(0, 0, canvas.width, canvas.height), found = new Set();
    for (let at = 0; at < data.length; at += 4) if (data[at + 3] === 255)
        found.add(`rgb(${data[at]}, ${data[at + 1]}, ${data[at + 2]})`);
    return ['forward', 'backward', 'message', 'bubble'].filter((kind) => {
        const probe = document.body.appendChild(document.createElement('i'));
        probe.style.color = `var(--${kind})`;
        return found.has(getComputedStyle(probe).color);
    });
})()"""


def test_in_a_browser(tab: Tab, tmp_path: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    file = tmp_path / "plan.html"
    settings = ["--set", "parallel.engine=megatron", "--set", "parallel.pipeline=4"]
    data = written(file, LLAMA_70B, "--cluster", "8x8xh100-80gb", *settings)
    tab.open(f"file://{file}")
    assert tab.errors() == [] and tab.inaccessible() == []
    assert len(tab.requests()) == 1, "the page itself"
    assert not tab.run("document.documentElement.scrollWidth > innerWidth")
    assert tab.run("document.title") == f"{data['runs'][0]['name']} – DMT plan"
    assert tab.run(COLOURS) == ["forward", "backward", "message", "bubble"]
    figure = tab.driver.find_element("css selector", "figure[data-chart=timeline]")
    figure.send_keys(Keys.HOME)
    spoken = "document.getElementById('announce').textContent"
    assert tab.run(spoken).startswith("0 s, stage 0: forward 1, stage 1: idle, ")
    for _ in range(400):
        figure.send_keys(Keys.ARROW_RIGHT)
        if "stage 3: backward 1" in tab.run(spoken):
            break
    else:
        pytest.fail("the last stage never went backward")
    bars = tab.run("""[...document.querySelectorAll('.stacks')].map((table) =>
        [...table.querySelectorAll('.scale')].map((scale) => [
            scale.querySelector('.stack').getBoundingClientRect().width,
            scale.getBoundingClientRect().width,
            (scale.querySelector('.limit')?.getBoundingClientRect().left ?? 0)
                - scale.getBoundingClientRect().left]))""")
    for section, rows in zip(data["runs"][0]["sections"], bars, strict=False):
        stacks = section["stacks"]
        sums = [sum(sizes) for _, _, _, sizes in stacks["rows"]]
        limit = stacks["limit"][0] if stacks["limit"] else 0.0
        for total, (width, whole, line) in zip(sums, rows, strict=True):
            assert width / whole == pytest.approx(total / max(limit, *sums), abs=0.01)
            assert not limit or line / whole == pytest.approx(
                limit / max(limit, *sums), abs=0.01
            )
