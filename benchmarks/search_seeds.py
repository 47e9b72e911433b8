"""Is `dmt tune --search` better than random search with the same budget?

    python benchmarks/search_seeds.py FOLDER --out benchmarks/results/search-seeds-cpu-DATE.json

For each of five seeds, random search trains TRIALS points of the space to their end. The search
(TPE with ASHA) may use as many optimizer steps in all of its trials. The best final validation
losses are compared. It is the product's own search; only the trial runs in this process, on
plain transformers and torch, because starting processes would take far longer than training.
Takes a few minutes on one core; killed and started again, it continues.
"""

import argparse
import json
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, get_cosine_schedule_with_warmup

from toolkit.extras.tune.search import HyperparameterSearch, SearchRequest
from toolkit.extras.tune.space import load_space
from toolkit.extras.tune.trial import DeviceSlice, Followed, TrialResult
from toolkit.intake.load import load_recipe

SEEDS = range(5)
TRIALS = 30
STEPS, EVERY = 48, 6
RECIPE = Path(__file__).parents[1] / "recipes/tiny/llama-bytes.yaml"
SMALL = (
    "model.config.hidden_size=32", "model.config.intermediate_size=64",
    "model.config.num_hidden_layers=2", "model.config.num_attention_heads=2",
    "model.config.num_key_value_heads=1", "training.sequence_length=64",
    "training.global_batch_size=8", f"training.steps={STEPS}", "schedule.min_learning_rate=0",
    f"evaluation.every_steps={EVERY}", "cluster.gpus_per_node=1", "parallel.engine=ddp",
)  # fmt: skip
"""What the tiny recipe is shrunk by."""
SPACE = """\
optimizer.learning_rate: {low: 1.0e-4, high: 1.0, log: true}
optimizer.weight_decay: {low: 1.0e-3, high: 1.0, log: true}
optimizer.clip_grad_norm: {low: 0.05, high: 10.0, log: true}
optimizer.betas: [[0.9, 0.95], [0.9, 0.99], [0.8, 0.9], [0.95, 0.999]]
schedule.warmup_steps: {low: 0, high: 12}
"""
_VALIDATION_ROWS = 64


def text_rows(length: int) -> torch.Tensor:
    """Bytes of Python's json package, [rows, length]."""
    files = sorted(Path(sysconfig.get_path("stdlib"), "json").glob("*.py"))
    data = torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, files))), dtype=torch.uint8)
    rows = len(data) // length
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    return data[: rows * length].view(rows, length).long()[order]


def run_trial(
    overrides: Sequence[str],
    folder: Path,
    devices: DeviceSlice,
    on_progress: Callable[[Followed], bool],
    *,
    interrupted: Callable[[], bool],
) -> TrialResult:
    """Train the recipe with a plain loop, see `toolkit.extras.tune.trial.run_trial`."""
    del folder, devices
    recipe = load_recipe(RECIPE, overrides)
    optimizer_settings, training = recipe.optimizer, recipe.training
    torch.manual_seed(training.seed)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**(recipe.model.config or {})))
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=optimizer_settings.learning_rate,
        betas=optimizer_settings.betas,
        eps=optimizer_settings.eps,
        weight_decay=optimizer_settings.weight_decay,
    )
    schedule = get_cosine_schedule_with_warmup(optimizer, recipe.schedule.warmup_steps, STEPS)
    rows, batch = text_rows(training.sequence_length), training.global_batch_size
    held_out, rows = rows[:_VALIDATION_ROWS], rows[_VALIDATION_ROWS:]
    followed = Followed()
    for step in range(1, STEPS + 1):
        inputs = rows[((step - 1) * batch + torch.arange(batch)) % len(rows)]
        model(input_ids=inputs, labels=inputs).loss.backward()
        largest = optimizer_settings.clip_grad_norm
        if largest is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), largest)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % EVERY == 0:
            with torch.no_grad():
                loss = model(input_ids=held_out, labels=held_out).loss.item()
            followed.events.append({"kind": "evaluation", "step": step, "loss": loss})
            if on_progress(followed):
                return TrialResult("stopped", step=step)
            if interrupted():
                return TrialResult("interrupted", step=step)
    return TrialResult("done", step=STEPS)


def searched(request: SearchRequest, steps: int) -> dict[str, Any]:
    """The best trial of a search that ends once its trials have done so many steps."""
    search = HyperparameterSearch(request, run_trial)
    while True:
        results = [one.user_attrs.get("result", {}) for one in search.study.get_trials()]
        used = sum(one.get("steps", 0) for one in results)
        if used >= steps:
            break
        # Half as many as whole runs would use up, one at least.
        more = max(1, (steps - used) // STEPS // 2)
        search.request = replace(request, trials=len(results) + more)
        if not search.run():
            raise SystemExit("interrupted: start it again to continue")
    best = search.study.best_trial
    tried = [one.get("ending") for one in results]
    endings = {ending: tried.count(ending) for ending in dict.fromkeys(tried)}
    return {"loss": best.value, "settings": best.params, "steps": used, "trials": endings}


def main() -> None:
    """Compare, print, and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="the studies; continued if they are there")
    parser.add_argument("--out", type=Path)
    words = parser.parse_args()
    torch.set_num_threads(1)
    with NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(SPACE)
        file.flush()
        space = load_space(Path(file.name), RECIPE, SMALL)
    devices, found = [DeviceSlice(0)], []
    for seed in SEEDS:
        request = SearchRequest(RECIPE, SMALL, space, words.folder, TRIALS, devices, seed)
        folders = {name: words.folder / f"{name}-{seed}" for name in ("random", "tpe")}
        # Another stream of random numbers than that of TPE's first points.
        random = replace(
            request, folder=folders["random"], seed=1000 + seed, sampler="random", prune=False
        )
        one = {
            "seed": seed,
            "random": searched(random, STEPS * TRIALS),
            "search": searched(replace(request, folder=folders["tpe"]), STEPS * TRIALS),
        }
        found.append(one)
        print(f"seed {seed}: random {one['random']['loss']:.4f} "
              f"{one['random']['trials']}, search {one['search']['loss']:.4f} "
              f"{one['search']['trials']}", flush=True)  # fmt: skip
    better = sum(one["search"]["loss"] < one["random"]["loss"] for one in found)
    print(f"better in {better} of {len(found)}")
    if words.out:
        facts = {"space": [asdict(one) for one in space.parameters], "changes": SMALL}
        data = {"better": better, "torch": torch.__version__, **facts, "seeds": found}
        words.out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
