"""Checkpoints of DeepSpeed and of FSDP2, imported to the bit and continued in another layout.

Nothing of DMT's engines takes part in what is saved: the batches are those of the recipe,
everything else is transformers', torch's, DeepSpeed's and Accelerate's.
"""

import os
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from shutil import rmtree
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM

from launch.examples.recipe_samples import RecipeSamples
from tests.dmt import Dmt
from tests.e2e.conftest import Project, write_project
from tests.e2e.product import curve
from tests.forked import run_ranks
from toolkit.checkpoint.manifest import Manifest
from toolkit.checkpoint.saved_state import SavedState
from toolkit.checkpoint.shards import whole_quantity
from toolkit.checkpoint.verify import verify
from toolkit.engines.deepspeed.models import import_deepspeed
from toolkit.engines.distributed import Ranks, join, leave
from toolkit.intake.load import load_recipe
from toolkit.models.huggingface import build_config

pytestmark = pytest.mark.slow

SAVED_AT = 2
FURTHER = 5
BATCH = 8


class Saved(NamedTuple):
    """A configuration of DeepSpeed."""

    stage: int
    precision: str = "fp32"
    grouped: bool = True
    """Whether norms are a group without weight decay; otherwise nothing has a decay."""

    @property
    def overrides(self) -> list[str]:
        """Those of the recipe that continues."""
        decay = [] if self.grouped else ["optimizer.weight_decay=0.0"]
        return [f"training.precision={self.precision}", *decay]


def new_model(recipe: Any) -> Any:
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(build_config(recipe.model)).float()


def adamw(parameters: Sequence[torch.nn.Parameter], section: Any, decay: float) -> Any:
    """torch's, with weight decay of matrices alone."""
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": decay},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=section.learning_rate, betas=section.betas, eps=section.eps
    )


def loss_of(model: Any, rows: Sequence[Mapping[str, torch.Tensor]]) -> torch.Tensor:
    """The mean loss of some samples."""
    tokens = torch.stack([row["input_ids"] for row in rows])
    labels = torch.stack([row["shift_labels"] for row in rows])
    logits = model(input_ids=tokens, use_cache=False).logits.float()
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def train(
    model: Any, samples: Any, ranks: Ranks, steps: range, update: Callable[[Any], None]
) -> list[float]:
    """Train some steps; the mean loss of each over the tokens of all ranks."""
    losses = []
    for step in steps:
        rows = [samples[step * BATCH + number] for number in range(BATCH)]
        mine = rows[ranks.rank :: ranks.world]
        # The mean over ranks is taken, which may have different numbers of labels.
        loss = loss_of(model, mine) * (_count(mine) * ranks.world / _count(rows))
        update(loss)
        mean = loss.detach().float()
        dist.all_reduce(mean)
        losses.append(mean.item() / ranks.world)
    return losses


def _count(rows: Sequence[Mapping[str, torch.Tensor]]) -> int:
    """Labels on which a loss is taken."""
    return sum(int((row["shift_labels"] != -100).sum()) for row in rows)


def save_deepspeed(project: Path, cases: Mapping[str, Saved], out: Path) -> list[float]:
    """Save every case after `SAVED_AT` steps; how the last one goes on."""
    os.chdir(project)
    ranks = join()
    deepspeed = import_deepspeed()
    losses: list[float] = []
    for name, case in cases.items():
        recipe = load_recipe(Path("recipe.yaml"), case.overrides)
        samples, model = RecipeSamples(recipe), new_model(recipe)
        section = recipe.optimizer
        optimizer = adamw(list(model.parameters()), section, section.weight_decay)
        if not case.grouped:
            optimizer = adamw(list(model.parameters()), section, 0.0)
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            config=_config(recipe, case),
            dist_init_required=False,
        )

        def update(loss: Any, engine: Any = engine) -> None:
            engine.backward(loss)
            engine.step()

        train(engine, samples, ranks, range(SAVED_AT), update)
        engine.save_checkpoint(str(out / name))
        _save_truth(engine, out / f"{name}.truth.pt", ranks.rank)
        if name == [*cases][-1]:
            further = range(SAVED_AT, SAVED_AT + FURTHER)
            losses = train(engine, samples, ranks, further, update)
        if ranks.rank == 0:
            _make_universal(out / name)
        engine.destroy()
    leave()
    return losses


def _config(recipe: Any, case: Saved) -> dict[str, Any]:
    return {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // 2,
        "gradient_clipping": recipe.optimizer.clip_grad_norm,
        "zero_optimization": {"stage": case.stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": case.precision == "bf16"},
        "steps_per_print": 10**9,
    }


def _make_universal(saved: Path) -> None:
    """Replace a checkpoint by what DeepSpeed's own script makes of it."""
    from deepspeed.checkpoint.ds_to_universal import main

    tag = saved / f"global_step{SAVED_AT}"
    main(
        Namespace(
            input_folder=str(tag),
            output_folder=f"{tag}_universal",
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )
    rmtree(tag)
    (saved / "latest").unlink()


def _save_truth(engine: Any, path: Path, rank: int) -> None:
    """Weights and moments as DeepSpeed itself gathers them."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        # Stages 1 and 2 link the states after the update of the first group alone.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    truth: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in engine.module.named_parameters():
        found = {"weight": safe_get_full_fp32_param(parameter)}
        for moment in ("exp_avg", "exp_avg_sq"):
            found[moment] = safe_get_full_optimizer_state(parameter, moment)
        truth[name] = {key: value.clone() for key, value in found.items()}
    if rank == 0:
        torch.save(truth, path)


def save_fsdp(project: Path, out: Path) -> None:
    """Save with torch, as torchtitan does, and as Accelerate does."""
    from torch.distributed.fsdp import fully_shard

    os.chdir(project)
    ranks = join()
    recipe = load_recipe(Path("recipe.yaml"))
    samples, section = RecipeSamples(recipe), recipe.optimizer
    model = new_model(recipe)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = adamw(list(model.parameters()), section, section.weight_decay)

    def update(loss: Any) -> None:
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), section.clip_grad_norm)
        optimizer.step()

    train(model, samples, ranks, range(SAVED_AT), update)
    _save_states(model, optimizer, out)
    truth = {
        name: {
            quantity: value.full_tensor()
            for quantity, value in {
                "weight": weight.detach(),
                **optimizer.state[weight],
            }.items()
            if quantity != "step"
        }
        for name, weight in model.named_parameters()
    }
    if ranks.rank == 0:
        torch.save(truth, out / "truth.pt")
    leave()


def _save_states(model: Any, optimizer: Any, out: Path) -> None:
    """As torch's get_state_dict returns them, flattened as torchtitan saves them, and as
    Accelerate saves them for the Trainer."""
    import torch.distributed.checkpoint as dcp
    from accelerate import FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=out / "nested")
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, states = get_state_dict(model, optimizer, options=flat)
    train_state = {"train_state": {"step": torch.tensor(SAVED_AT)}}
    dcp.save(weights | {"optimizer": states} | train_state, checkpoint_id=out / "flat")
    folder = out / "checkpoint-2"
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", cpu_offload=False
    )
    PartialState(cpu=True)  # its log asks for the rank
    process = SimpleNamespace(process_index=dist.get_rank(), num_processes=2)
    save_fsdp_model(plugin, process, model, folder)
    save_fsdp_optimizer(plugin, process, optimizer, model, folder)


CASES = {"1": Saved(1), "2-bf16": Saved(2, "bf16", grouped=False), "3": Saved(3)}
"""By ZeRO's stage; made universal by DeepSpeed's own script."""
UNIVERSAL = f"global_step{SAVED_AT}_universal"
SOURCES = {
    **{f"deepspeed/{name}/{UNIVERSAL}": case.overrides for name, case in CASES.items()},
    **dict.fromkeys(("fsdp/nested", "fsdp/flat", "fsdp/checkpoint-2"), ()),
}
"""What the recipe changes, by folder."""
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project with DeepSpeed's and torch's checkpoints."""
    folder = tmp_path_factory.mktemp("foreign")
    write_project(folder)
    run_ranks(save_fsdp, 2, folder, folder / "fsdp")
    return Project(folder)


@pytest.fixture(scope="module")
def of_deepspeed(foreign: Project) -> list[float]:
    """How DeepSpeed went on."""
    return run_ranks(save_deepspeed, 2, foreign.folder, CASES, foreign.folder / "deepspeed")[0]


def imported(foreign: Project, dmt: Dmt, source: str, overrides: Sequence[str]) -> Path:
    run = foreign.folder / f"run-{source.replace('/', '-')}-{len(overrides)}"
    words = [word for one in overrides for word in ("--set", one)]
    source_path = foreign.folder / source
    command = ["checkpoint", "import", foreign.recipe, source_path, "--run-dir", run, *words]
    notes = [line for line in dmt(*command).err.splitlines() if line.startswith("note: ")]
    assert (len(notes) == 1) == source.startswith("deepspeed"), "about the data alone"
    (folder,) = (run / "checkpoints").glob("step-*")
    return folder


def state_of(folder: Path) -> SavedState:
    """The imported state."""
    manifest = Manifest.read(folder)
    assert (manifest.step, manifest.consumed_samples) == (SAVED_AT, BATCH * SAVED_AT)
    assert manifest.optimizer_steps == SAVED_AT
    assert verify(folder).problems == ()
    return SavedState(folder)


def whole(state: SavedState, quantity: str, tensor: str) -> torch.Tensor:
    return state.read(quantity, whole_quantity(quantity, tensor, state.shapes[tensor]))


@pytest.mark.usefixtures("of_deepspeed")
@pytest.mark.parametrize("source", SOURCES)
def test_the_state_to_the_bit(
    source: str, foreign: Project, dmt: Dmt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(foreign.folder)
    state = state_of(imported(foreign, dmt, source, SOURCES[source]))
    tool, name, *_ = source.split("/")
    truth = torch.load(Path(tool, f"{name}.truth.pt" if tool == "deepspeed" else "truth.pt"))
    assert state.shapes.keys() == truth.keys()
    for tensor, quantities in truth.items():
        assert {*state.quantities(tensor)} == {*quantities}
        for quantity, value in quantities.items():
            assert torch.equal(whole(state, quantity, tensor).view(-1), value.view(-1)), tensor


def test_launch_continues_it_in_another_layout(
    foreign: Project, of_deepspeed: list[float], dmt: Dmt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(foreign.folder)
    length = {"training.steps": SAVED_AT + FURTHER}
    changes = {"parallel.engine": "megatron", "parallel.tensor": 2, **length}
    words = [f"{key}={value}" for key, value in changes.items()]
    run = imported(foreign, dmt, f"deepspeed/3/{UNIVERSAL}", words).parents[1]
    ended = foreign.launch(str(run), changes)
    assert f"continuing from step {SAVED_AT} of {SAVED_AT + FURTHER}" in ended.err
    losses = [loss for loss, _ in curve(run).values()]
    assert losses == pytest.approx(of_deepspeed, rel=TOLERANCE)
