"""Clusters: the short form, the usual links, a user's file, and clear errors."""

from pathlib import Path

import pytest

from toolkit.errors import PlanError, RecipeError
from toolkit.plan.hardware.catalogue import GPUS, link
from toolkit.plan.hardware.cluster import default_cluster, parse_cluster
from toolkit.plan.hardware.cluster_file import find_cluster, load_cluster


def test_the_short_form_names_nodes_accelerators_and_their_model() -> None:
    cluster = parse_cluster("4x8xH100-80GB")
    assert (cluster.nodes, cluster.gpus_per_node, cluster.gpus) == (4, 8, 32)
    assert cluster.gpu is GPUS["h100-80gb"]
    assert cluster.name == "4x8xh100-80gb"
    assert parse_cluster("2xcpu").gpus == parse_cluster("1x2xcpu").gpus == 2


@pytest.mark.parametrize(
    "text",
    [
        "", "1x8xa100-80gb+1x8xh100-80gb", "h100-80gb", "0x8xh100-80gb", "4x0xh100-80gb",
        "4x8x", "4x-8xh200", "00x8xh200", "٣x8xh200", "\n2xcpu",
    ],
)  # fmt: skip
def test_what_is_no_short_form_is_an_error_with_an_example(text: str) -> None:
    with pytest.raises(PlanError, match="4x8xh100-80gb"):
        parse_cluster(text)


def test_nvlink_reaches_across_the_trays_of_a_rack() -> None:
    assert parse_cluster("18x4xgb200").island == 72
    assert parse_cluster("18x8xb200").island == 8


def write(folder: Path, text: str) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_changes_what_it_states_and_nothing_else(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "name: mine\nnodes: 16\ngpus_per_node: 8\ngpu: h100-80gb\n"
        "network: {kind: roce, gigabits_per_s: 200}\nprice_per_gpu_hour: 2.5\n",
    )
    cluster, usual = find_cluster(str(path)), default_cluster(16, 8, "h100-80gb")
    assert cluster.name == "mine"
    assert cluster.network == link("roce", 25)
    assert cluster.price_per_gpu_hour == 2.5
    assert (cluster.gpu, cluster.node_link) == (usual.gpu, usual.node_link)
    assert cluster.host_memory_gib == usual.host_memory_gib


def test_an_accelerator_of_ones_own(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "nodes: 1\ngpus_per_node: 4\n"
        "gpu: {like: a100-80gb, name: a800, memory_gib: 79, tflops: {bf16: 300}}\n"
        "node_link: {gigabytes_per_s: 200}\n",
    )
    cluster = load_cluster(path)
    assert (cluster.gpu.name, cluster.gpu.like) == ("a800", "a100-80gb")
    assert (cluster.gpu.memory_gib, cluster.gpu.bf16) == (79, 300e12)
    assert cluster.gpu.fp16 == GPUS["a100-80gb"].fp16
    assert cluster.node_link.bytes_per_s == 200e9


def test_measured_speeds_are_kept_apart_from_peaks(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "nodes: 1\ngpus_per_node: 2\ngpu: cpu\n"
        "measured: {tflops: {fp32: 0.25}, memory_gigabytes_per_s: 12, "
        "node_link_gigabytes_per_s: 1.5}\n",
    )
    cluster = load_cluster(path)
    assert cluster.gpu.measured is not None
    assert cluster.gpu.measured.fp32 == 0.25e12
    assert cluster.gpu.fp32 is None
    assert cluster.node_link.measured_bytes_per_s == 1.5e9
    assert cluster.network.measured_bytes_per_s is None


@pytest.mark.parametrize(
    ("gpu", "key", "fix"),
    [
        ("{memory_gib: 3}", "gpu.like", "add `like:`"),
        ("{like: rtx40990}", "gpu.like", "did you mean `rtx4090`?"),
        ("{like: a10g, tflops: {bf61: 1}}", "gpu.tflops.bf61", "did you mean `bf16`?"),
        ("{like: a10g, memory_gib: 0}", "gpu.memory_gib", "write a number > 0"),
    ],
)
def test_a_mistake_in_an_accelerator(gpu: str, key: str, fix: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as raised:
        load_cluster(write(tmp_path, f"nodes: 1\ngpus_per_node: 2\ngpu: {gpu}\n"))
    (problem,) = raised.value.problems
    assert (problem.key, problem.line) == (key, 3) and problem.fix.startswith(fix)


def test_every_mistake_of_a_file_is_reported_with_its_line(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "nodes: 0\ngpu_per_node: 8\ngpu: h100-80g\n"
        "network: {kind: myrinet, gigabits_per_s: fast, lanes: 2}\n"
        "nvme_gigabytes_per_s: -1\nnode_link: {gigabytes_per_s: 1, gigabits_per_s: 8}\n",
    )
    with pytest.raises(RecipeError) as raised:
        load_cluster(path)
    found = {problem.key: problem for problem in raised.value.problems}
    assert set(found) == {
        "nodes", "gpu_per_node", "gpu", "network.kind", "network.gigabits_per_s",
        "network.lanes", "nvme_gigabytes_per_s", "node_link",
    }  # fmt: skip
    assert found["gpu_per_node"].fix == "did you mean `gpus_per_node`?"
    assert found["gpu"].line == 3
    assert found["gpu"].fix.startswith("did you mean `h100-80gb`? or describe yours")
    assert "infiniband" in found["network.kind"].allowed
    assert found["nodes"].found == "0"


def test_mistakes_of_one_key_are_all_named(tmp_path: Path) -> None:
    text = "1: 2\nnull: 3\nnodes: 1\ngpus_per_node: 2\ngpu: h100-80gb\nnetwork: [1]\n"
    with pytest.raises(RecipeError) as raised:
        load_cluster(write(tmp_path, text))
    assert [problem.line for problem in raised.value.problems] == [1, 2, 6]
    assert raised.value.problems[2].fix.startswith("write a map of kind")


@pytest.mark.parametrize(
    "text", ["", "- 1\n", "nodes: [1]\n", "gpu: {name: x}\n", "gpu: null\n"]
)
def test_a_file_of_another_shape_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(RecipeError) as raised:
        load_cluster(write(tmp_path, text))
    assert all(problem.line and problem.fix for problem in raised.value.problems)
