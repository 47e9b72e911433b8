"""What every rank of test_import.py does: train with DeepSpeed alone, save, and train on.

Nothing of DMT's engines takes part: the batches are those of the recipe, everything else is
transformers', torch's and DeepSpeed's.
"""

import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from shutil import rmtree
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from toolkit.accelerate.samples import TrainingSamples
from toolkit.engines.deepspeed.models import import_deepspeed
from toolkit.engines.distributed import Ranks, join, leave
from toolkit.intake.load import load_recipe
from toolkit.models.huggingface import build_config

SAVED_AT = 2
FURTHER = 5


class Saved(NamedTuple):
    """A configuration of DeepSpeed."""

    stage: int
    precision: str = "fp32"
    grouped: bool = True
    """Whether norms are a group without weight decay; otherwise nothing has a decay."""

    @property
    def overrides(self) -> list[str]:
        """Those of the recipe that continues."""
        changes: dict[str, object] = {"training.precision": self.precision}
        if not self.grouped:
            changes["optimizer.weight_decay"] = 0.0
        return [f"{key}={value}" for key, value in changes.items()]


def save_all(project: Path, cases: Mapping[str, Saved], out: Path) -> dict[str, list[float]]:
    """Save every case after `SAVED_AT` steps; the losses of the steps after that."""
    os.chdir(project)
    ranks = join()
    deepspeed = import_deepspeed()
    losses = {}
    for name, case in cases.items():
        recipe = load_recipe(Path("recipe.yaml"), case.overrides)
        samples = TrainingSamples(recipe)
        torch.manual_seed(3)
        model = _model(recipe)
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(_groups(model, recipe, case)),
            config=_config(recipe, case),
            dist_init_required=False,
        )
        _steps(engine, samples, 0, SAVED_AT, ranks)
        engine.save_checkpoint(str(out / name))
        _save_truth(engine, out / f"{name}.truth.pt", ranks.rank)
        losses[name] = _steps(engine, samples, SAVED_AT, SAVED_AT + FURTHER, ranks)
        if ranks.rank == 0:
            _make_universal(out / name)
        engine.destroy()
    leave()
    return losses


def _model(recipe: Any) -> Any:
    config = build_config(recipe.model)
    return AutoModelForCausalLM.from_config(config).float()


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


def _groups(model: Any, recipe: Any, case: Saved) -> list[dict[str, Any]]:
    section = recipe.optimizer
    parameters = [p for p in model.parameters() if p.requires_grad]
    common = {"lr": section.learning_rate, "betas": section.betas, "eps": section.eps}
    if not case.grouped:
        return [{"params": parameters, "weight_decay": 0.0, **common}]
    decayed = [p for p in parameters if p.dim() > 1]
    rest = [p for p in parameters if p.dim() == 1]
    return [
        {"params": decayed, "weight_decay": section.weight_decay, **common},
        {"params": rest, "weight_decay": 0.0, **common},
    ]


def _config(recipe: Any, case: Saved) -> dict[str, Any]:
    batch = recipe.training.global_batch_size
    return {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": batch // 2,
        "gradient_clipping": recipe.optimizer.clip_grad_norm,
        "zero_optimization": {"stage": case.stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": case.precision == "bf16"},
        "steps_per_print": 10**9,
    }


def _steps(engine: Any, samples: Any, first: int, last: int, ranks: Ranks) -> list[float]:
    """Train some steps; the mean loss of each over the tokens of all ranks."""
    losses = []
    for step in range(first, last):
        rows = _batch(engine, samples, step)
        mine = rows[ranks.rank :: ranks.world]
        # DeepSpeed takes the mean over ranks, which may have different numbers of labels.
        loss = loss_of(engine, mine) * (_count(mine) * ranks.world / _count(rows))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float()
        dist.all_reduce(mean)
        losses.append(mean.item() / ranks.world)
    return losses


def _batch(engine: Any, samples: Any, step: int) -> list[Any]:
    batch = engine.train_batch_size()
    return [samples[step * batch + number] for number in range(batch)]


def _count(rows: Sequence[Mapping[str, torch.Tensor]]) -> int:
    """Labels on which a loss is taken."""
    return sum(int((row["shift_labels"] != -100).sum()) for row in rows)


def loss_of(model: Any, rows: Sequence[Mapping[str, torch.Tensor]]) -> torch.Tensor:
    """The mean loss of some samples."""
    tokens = torch.stack([row["input_ids"] for row in rows])
    labels = torch.stack([row["shift_labels"] for row in rows])
    logits = model(input_ids=tokens, use_cache=False).logits.float()
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def _save_truth(engine: Any, path: Path, rank: int) -> None:
    """Weights and moments as DeepSpeed itself gathers them."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        # Stages 1 and 2 link the states after the update of the first group alone.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    truth: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            truth[name] = {}
        elif hasattr(parameter, "_hp_mapping") or hasattr(parameter, "ds_id"):
            found = {"weight": safe_get_full_fp32_param(parameter)}
            for moment in ("exp_avg", "exp_avg_sq"):
                found[moment] = safe_get_full_optimizer_state(parameter, moment)
            truth[name] = {key: value.clone() for key, value in found.items()}
    if rank == 0:
        torch.save(truth, path)
