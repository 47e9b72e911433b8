"""`kernels.compile: layers`: the numbers of plain transformers, by kernels that torch makes."""

import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from tests.engines.pairs import Inductor, graph_of_kernels
from tests.engines.small import ACTIVATIONS, batch, saved_bytes, small_model
from tests.models.configs import CONFIGS
from toolkit.errors import BackendUnavailable, PlanError
from toolkit.layout import Layout
from toolkit.models import compiled
from toolkit.models import huggingface as hf
from toolkit.models.families import model_spec
from toolkit.plan.cost.layer import layer_activations
from toolkit.plan.cost.workload import Workload
from toolkit.system import compilers

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated"),
]

FAMILIES = ("llama", "gpt2", "gemma2", "gemma3_text")
"""Layers of one kind, transposed weights, and layers of two kinds."""


@pytest.fixture
def without_inductor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs are found and differentiated, but run by torch's own kernels."""
    monkeypatch.setattr(Inductor, "__call__", graph_of_kernels)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    gc.collect()


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.usefixtures("without_inductor")
def test_families(name: str) -> None:
    """Each layer is one graph; those of a kind share theirs."""
    plain, model = small_model(name), small_model(name)
    compiled.compile_layers(model, "layers")
    assert [one for one, _ in hf.named_parameters(model)] == [
        one for one, _ in hf.named_parameters(plain)
    ]
    assert [*model.state_dict()] == [*plain.state_dict()]
    for one in (plain, model):
        torch.autograd.backward(hf.log_probs(one, batch()).sum())
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad)
    assert graphs() in (1, 2)


@pytest.mark.usefixtures("without_inductor")
def test_one_graph_for_each_shape() -> None:
    """Training, evaluation, another length: none is compiled twice, none for all shapes."""
    model = small_model("llama").train()
    compiled.compile_layers(model, "layers")
    for _ in range(2):
        for length in (16, 24):
            torch.autograd.backward(hf.log_probs(model, batch(length=length)).sum())
            with hf.evaluating(model):
                hf.log_probs(model, batch(length=length))
    assert graphs() == 4
    with compiled.eager():
        hf.log_probs(model, batch(length=8))
    assert graphs() == 4


@pytest.mark.usefixtures("without_inductor")
def test_what_no_graph_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("llama")
    attend = type(hf.decoder_layers(model)[0]).forward

    def breaks(self: Any, *arguments: Any, **options: Any) -> Any:
        torch._dynamo.graph_break()
        return attend(self, *arguments, **options)

    monkeypatch.setattr(type(hf.decoder_layers(model)[0]), "forward", breaks)
    compiled.compile_layers(model, "layers")
    with pytest.raises(PlanError, match=r"kernels\.compile: torch cannot compile the layers"):
        compiled.explain_failures("compile")(hf.log_probs)(model, batch())


def test_no_layers() -> None:
    with pytest.raises(PlanError, match="Linear has no decoder layers"):
        compiled.compile_layers(nn.Linear(2, 2), "layers")


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_memory(recompute: Any) -> None:
    """What the planner says a compiled layer keeps is what inductor's graph keeps."""
    spec = model_spec({"model_type": "llama", **CONFIGS["llama"], **ACTIVATIONS})
    for parts in ("none", "layers"):
        workload = Workload(spec, 512, "bf16", "ddp", fused_elementwise=parts == "layers")
        planned = layer_activations(workload, Layout(recompute=recompute)).total
        kept = (saved_bytes(3, parts, recompute) - saved_bytes(1, parts, recompute)) / 2
        assert kept == pytest.approx(planned, rel=0.02), parts


def test_the_first_layers_are_recomputed() -> None:
    """Each saves what a layer keeps, less its input."""
    none, one, two, full = (saved_bytes(3, "none", way) for way in ("none", 1, 2, "full"))
    assert 0 < none - one == pytest.approx(one - two, rel=0.05)
    assert one - two == pytest.approx(two - full, rel=0.05)


# Where it is compiled


def test_a_folder_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in a home that all nodes share, nor where another user may write."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = compilers.private_folder("inductor")
    assert folder == home / ".cache" / "dmt" / "inductor"
    assert folder.stat().st_mode & 0o777 == 0o700
    mounts = [SimpleNamespace(mountpoint=str(home), fstype="nfs4")]
    monkeypatch.setattr("psutil.disk_partitions", lambda **_: mounts)
    folder = compilers.private_folder("inductor")
    assert folder == tmp_path / f"dmt-{os.getuid()}" / "inductor"
    for shared in (folder.parent, folder):
        shared.chmod(0o770)
        with pytest.raises(BackendUnavailable, match="others may write to it"):
            compilers.private_folder("inductor")
        shared.chmod(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    assert compilers.private_folder("inductor") == home / "dmt" / "inductor"


@pytest.mark.parametrize(
    ("on_gpu", "variable", "named"),
    [(False, "CXX", "C++ compiler"), (True, "CC", "C compiler")],
)
def test_without_a_compiler(
    on_gpu: bool, variable: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not compilers.missing_for_torch_compile(on_gpu=on_gpu)
    monkeypatch.setenv(variable, "/no/such/compiler")
    (missing,) = compilers.missing_for_torch_compile(on_gpu=on_gpu)
    assert missing.name == named
    assert f"named by {variable}" in missing.what
    monkeypatch.delenv(variable)
    monkeypatch.setenv("PATH", "")
    (missing,) = compilers.missing_for_torch_compile(on_gpu=on_gpu)
    assert missing.what == f"there is no {named}"
