"""Pictures: what they show is the plan's own numbers, and all of it can be read."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from toolkit.errors import EXIT_UNAVAILABLE, BackendUnavailable, PlanError
from toolkit.hardware.cluster import parse_cluster
from toolkit.intake.load import load_recipe
from toolkit.layout import EngineName, Layout, Pair
from toolkit.models.families import model_spec
from toolkit.plan.cost.memory import peak_memory
from toolkit.plan.cost.time import step_time
from toolkit.plan.cost.workload import planned_workload
from toolkit.plan.plot.bars import (
    STYLE,
    PlottedLayout,
    draw,
    memory_parts,
    name_of,
    step_parts,
    write_plot,
)
from toolkit.plan.plot.timetable import timetable
from toolkit.units import GIB, seconds

RECIPES = Path(__file__).parents[2] / "recipes"


def candidate(where: str, engine: EngineName, recipe: str, layout: Layout) -> PlottedLayout:
    cluster = parse_cluster(where)
    loaded = load_recipe(RECIPES / recipe)
    config = loaded.model.config
    assert config is not None
    pair = Pair(engine, "megatron" if engine == "megatron" else "hf")
    workload = planned_workload(model_spec(config), loaded.training, pair)
    memory = peak_memory(workload, layout)
    time = step_time(workload, layout, cluster)
    return PlottedLayout(engine, layout, memory, time, cluster.gpu.memory_gib)


def llama_8b(engine: EngineName, **layout: object) -> PlottedLayout:
    return candidate(
        "1x8xh100-80gb", engine, "llama/llama-3.1-8b-pretrain.yaml", Layout(**layout)  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.fixture(scope="module")
def some() -> list[PlottedLayout]:
    """A pipeline, ZeRO-3 with recompute, and one that does not fit."""
    return [
        llama_8b("megatron", dp=2, pp=4, vpp=2, zero_stage=1, gradient_accumulation=64),
        llama_8b("fsdp", dp=8, zero_stage=3, recompute="full", gradient_accumulation=16),
        llama_8b("megatron", dp=8, zero_stage=1, gradient_accumulation=16),
    ]


@pytest.fixture(scope="module")
def large() -> list[PlottedLayout]:
    """405B on 2,048: sixteen ranks, many thin passes."""
    layout = Layout(dp=16, tp=8, pp=16, vpp=4, sequence_parallel=True, zero_stage=1,
                    gradient_accumulation=64)  # fmt: skip
    recipe = "llama/llama-3.1-405b-pretrain.yaml"
    return [candidate("256x8xh100-80gb", "megatron", recipe, layout)]


@pytest.fixture(scope="module")
def tiny() -> list[PlottedLayout]:
    """Two processes of a CPU: no limit, a few MiB, no pipeline."""
    layout = Layout(dp=2, zero_stage=2, micro_batch=8)
    return [candidate("1x2xcpu", "deepspeed", "tiny/llama-bytes.yaml", layout)]


def test_parts_add_up(some: list[PlottedLayout]) -> None:
    for one in some:
        assert one.time is not None
        parts = sum(part.size for part in memory_parts(one.memory))
        assert parts * GIB == pytest.approx(one.memory.total)
        assert sum(part.size for part in step_parts(one.time)) == pytest.approx(
            one.time.total_s
        )


@pytest.fixture(scope="module")
def wordy() -> list[PlottedLayout]:
    """The longest names that there are, the chosen one's in bold."""
    layout = Layout(dp=2, pp=4, vpp=8, recompute="selective", offload_optimizer="nvme",
                    zero_stage=1, micro_batch=16, gradient_accumulation=64)  # fmt: skip
    recipe = "llama/llama-3.1-8b-pretrain.yaml"
    one = candidate("1x8xh100-80gb", "megatron", recipe, layout)
    return [replace(one, label="deepspeed/megatron"), one]


def test_name_says_what_differs() -> None:
    one = llama_8b("megatron", dp=2, pp=4, vpp=2, micro_batch=2, offload_optimizer="cpu")
    expected = "megatron · pp 4 · vpp 2 · dp 2\nzero 0 · micro batch 2 · offload to cpu"
    assert name_of(one) == expected
    assert name_of(replace(one, label="megatron/megatron")) == expected


@pytest.mark.parametrize("what", ["some", "large", "tiny", "wordy"])
def test_texts_do_not_overlap(what: str, request: pytest.FixtureRequest) -> None:
    """No text lies over another or leaves the picture."""
    figure = drawn(request.getfixturevalue(what))
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts(figure)]
    for text, box in boxes:
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1, text
        assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1, text
    for (one, box), (other, other_box) in combinations(boxes, 2):
        assert not box.padded(-1).overlaps(other_box), (one, other)


@pytest.mark.parametrize("free_gib", [0.05, 1.0, 3.0, 40.0])
def test_labels_keep_off_the_limit_line(free_gib: float, some: list[PlottedLayout]) -> None:
    """Also those of bars that end just before it."""
    near = max(some[:2], key=lambda one: one.memory.total).memory.total / GIB + free_gib
    figure = drawn([replace(one, capacity_gib=near) for one in some])
    memory = figure.axes[0]
    (line,) = memory.lines
    at = line.get_window_extent().x0
    labels = [text for text in memory.texts if not text.get_text().startswith("limit")]
    assert len(labels) == len(some)
    for label in labels:
        box = label.get_window_extent()
        assert not box.x0 - 1 <= at <= box.x1 + 1, label.get_text()


@pytest.mark.parametrize("what", ["some", "large", "tiny"])
def test_timeline_is_the_pipeline(what: str, request: pytest.FixtureRequest) -> None:
    """Rows are stages; what follows the last pass takes no room, but is stated."""
    one = request.getfixturevalue(what)[0]
    figure = drawn([one])
    panels = figure.axes[2:]
    table = timetable(one.time.stages, one.layout.gradient_accumulation, one.layout.vpp)
    assert panels[0].get_xlim()[0] == 0
    assert panels[-1].get_xlim()[1] == pytest.approx(table.total_s)
    rows = [label.get_text() for label in panels[0].get_yticklabels()]
    assert rows == ([f"stage {stage}" for stage in range(one.layout.pp)]
                    if one.layout.pp > 1 else ["every rank"])  # fmt: skip
    shown = [text.get_text() for text in texts(figure)]
    assert any(f"host, stragglers {seconds(one.time.overhead_s)}" in text for text in shown)


def test_short_times_are_milliseconds(tiny: list[PlottedLayout]) -> None:
    time = tiny[0].time
    assert time is not None and 0.1 < time.total_s < 0.2
    shown = {text.get_text() for text in texts(drawn(tiny))}
    assert f"{time.total_s * 1e3:.0f} ms" in {text.strip() for text in shown}
    assert {"100", "milliseconds", "milliseconds since the step began"} <= shown


def drawn(candidates: list[PlottedLayout]) -> Figure:
    with rc_context(STYLE):
        figure = draw("a plan", candidates)
    FigureCanvasAgg(figure).draw()
    return figure


def texts(figure: Figure) -> Iterator[Text]:
    """Every text that is drawn: labels of ticks beyond an axis are not."""
    hidden = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in axis.get_major_ticks():
                if not low <= tick.get_loc() <= high:
                    hidden |= {id(tick.label1), id(tick.label2)}
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        if text.get_text() and text.get_visible() and id(text) not in hidden:
            yield text


def test_picture_shows_the_numbers(some: list[PlottedLayout], tmp_path: Path) -> None:
    file = tmp_path / "plan.svg"
    write_plot(file, "8B on 8 H100", some)
    svg = file.read_text(encoding="utf-8")
    for one in some:
        assert one.time is not None
        assert f"{one.memory.total / GIB:.1f}" in svg
        assert f"{seconds(one.time.total_s)}, MFU" in svg
    assert svg.count("does not fit") == 2
    words = ("8B on 8 H100", "limit 79.1", "stage 3", "bubble", "left out", "full recompute")
    for word in words:
        assert word in svg


def test_same_plan_same_file(some: list[PlottedLayout], tmp_path: Path) -> None:
    files = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for file in files:
        write_plot(file, "again", some)
    assert files[0].read_bytes() == files[1].read_bytes()


def test_png_and_unknown_speed(some: list[PlottedLayout], tmp_path: Path) -> None:
    file = tmp_path / "plan.PNG"
    write_plot(file, "no speed", [replace(one, time=None) for one in some])
    assert file.read_bytes().startswith(b"\x89PNG")


def test_other_suffix_and_lost_folder_are_refused(
    some: list[PlottedLayout], tmp_path: Path
) -> None:
    with pytest.raises(PlanError, match=r"\.svg and \.png"):
        write_plot(tmp_path / "plan.pdf", "no", some)
    with pytest.raises(PlanError, match="cannot write"):
        write_plot(tmp_path / "none" / "plan.svg", "no", some)


def test_without_matplotlib_the_extra_is_named(
    some: list[PlottedLayout], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BackendUnavailable, match=r"pip install 'matplotlib") as caught:
        write_plot(tmp_path / "plan.svg", "no", some)
    assert caught.value.exit_code == EXIT_UNAVAILABLE
