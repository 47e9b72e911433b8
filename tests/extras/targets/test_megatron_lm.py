"""The arguments for Megatron-LM's script: its own names, our values, nothing dropped.

`DMT_UPDATE_GOLDEN=1 pytest tests/extras/targets/test_megatron_lm.py` rewrites the golden files.
"""

import argparse
import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from toolkit.errors import RecipeError
from toolkit.extras.targets import pretrain_gpt as megatron_lm
from toolkit.extras.targets.megatron_lm import OPTIONS
from toolkit.extras.targets.pretrain_gpt import ArgumentList
from toolkit.extras.targets.pretrain_gpt_run import schedule_arguments
from toolkit.intake.load import load_recipe
from toolkit.plan.planner import plan_recipe
from toolkit.recipe.schema import OptimizerSection, Recipe, ScheduleSection
from toolkit.train.schedule import learning_rate

ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "recipes"
GOLDEN = ROOT / "tests" / "golden" / "megatron-lm"
MEGATRON = "parallel.engine=megatron"
TINY = RECIPES / "tiny" / "llama-bytes.yaml"

CASES = {
    "llama-3.1-8b-tp2-pp2-vpp4": (
        "llama/llama-3.1-8b-pretrain.yaml",
        MEGATRON,
        "parallel.tensor=2",
        "parallel.pipeline=2",
        "parallel.virtual_pipeline=4",
        "training.micro_batch_size=1",
    ),
    "llama-3.1-8b-pp4-vpp2": (
        "llama/llama-3.1-8b-pretrain.yaml",
        MEGATRON,
        "parallel.tensor=1",
        "parallel.pipeline=4",
        "parallel.virtual_pipeline=2",
        "parallel.recompute=full",
    ),
    "llama-3.1-405b": ("llama/llama-3.1-405b-pretrain.yaml", "parallel.virtual_pipeline=1"),
    "mixtral-8x7b-ep8": (
        "mistral/mixtral-8x7b-pretrain.yaml",
        MEGATRON,
        "model.balance=null",
        "parallel.expert=8",
        "parallel.tensor=1",
        "parallel.pipeline=1",
    ),
    "llama-3.1-8b-cp4": (
        "llama/llama-3.1-8b-pretrain.yaml",
        MEGATRON,
        "parallel.tensor=4",
        "parallel.context=4",
        "kernels.context=ulysses_ring",
    ),
    "qwen3-8b-selective": (
        "qwen/qwen3-8b-pretrain.yaml",
        MEGATRON,
        "parallel.recompute=selective",
    ),
    "gpt2-fp16": (
        "gpt2/gpt2-124m-pretrain.yaml",
        MEGATRON,
        "training.precision=fp16",
        "training.micro_batch_size=8",
        "parallel.zero.stage=1",
    ),
    "mistral-7b-window": (
        "mistral/mistral-7b-pretrain.yaml",
        MEGATRON,
        "model.config.sliding_window=4096",
        "parallel.tensor=1",
        "parallel.recompute=full",
        "training.micro_batch_size=1",
    ),
}


def rendered(path: Path, *overrides: str) -> ArgumentList:
    recipe = load_recipe(path, overrides)
    return megatron_lm.render(recipe, plan_recipe(recipe))


def case(name: str) -> ArgumentList:
    path, *overrides = CASES[name]
    return rendered(RECIPES / path, *overrides)


def tiny(*overrides: str) -> ArgumentList:
    return rendered(TINY, MEGATRON, "parallel.zero.stage=auto", *overrides)


def megatron_lm_parser() -> argparse.ArgumentParser:
    """A parser of Megatron-LM's options, from the list of their names and values."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    listed = OPTIONS.read_text().splitlines()
    for line in listed[1:]:
        name, _, form = line.partition(" ")
        if not form:
            parser.add_argument(name, action="store_true")
            continue
        options: dict[str, Any] = {"nargs": form[-1]} if form[-1] in "+*" else {}
        value = form.rstrip("+*")
        if value.startswith("{"):
            options["choices"] = value.strip("{}").split(",")
        elif value in ("int", "float"):
            options["type"] = {"int": int, "float": float}[value]
        parser.add_argument(name, **options)
    return parser


def parsed(rendered: ArgumentList) -> dict[str, Any]:
    """What Megatron-LM understands, by its names; only what was given."""
    words = shlex.split(rendered.text)
    given = vars(megatron_lm_parser().parse_args(words))
    flags = [word for word in words if word.startswith("--")]
    assert len(flags) == len(set(flags)), "an argument is given twice"
    return {
        name: value for name, value in given.items() if value is not None and value is not False
    }


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str) -> None:
    text, file = case(name).text + "\n", GOLDEN / f"{name}.txt"
    if os.environ.get("DMT_UPDATE_GOLDEN"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert text == file.read_text()


@pytest.mark.parametrize("name", CASES)
def test_megatron_lm_knows_every_argument(name: str) -> None:
    given = parsed(case(name))
    assert given["calculate_per_token_loss"] is True
    assert given["no_gradient_accumulation_fusion"] is True


def test_an_unknown_argument_would_be_seen() -> None:
    with pytest.raises((argparse.ArgumentError, SystemExit)):
        parsed(ArgumentList((("--no-such-flag",),), ()))
    with pytest.raises(argparse.ArgumentError, match="invalid choice"):
        parsed(ArgumentList((("--lr-decay-style", "wsd"),), ()))


@pytest.mark.usefixtures("megatron_core")
def test_uneven_stages_are_written_out() -> None:
    layout = parsed(case("llama-3.1-405b"))["pipeline_model_parallel_layout"]
    assert layout == "Et*7|" + "t*8|" * 14 + "t*7L"
    from megatron.core.transformer.pipeline_parallel_layer_layout import (
        PipelineParallelLayerLayout,
    )

    stages = PipelineParallelLayerLayout.parse_str_to_list(layout)
    assert [len(stage) for stage in stages] == [8] * 16
    assert sum(part.name == "decoder" for stage in stages for part in stage) == 126


def test_even_chunks_are_counted() -> None:
    given = parsed(case("llama-3.1-8b-tp2-pp2-vpp4"))
    assert given["num_layers_per_virtual_pipeline_stage"] == 4
    assert "pipeline_model_parallel_layout" not in given
    assert "no_overlap_p2p_communication" not in given


def test_tanh_gelu_is_megatron_lms_fused_one() -> None:
    given = parsed(case("gpt2-fp16"))
    assert "no_bias_gelu_fusion" not in given and "swiglu" not in given
    assert given["fp16"] and given["initial_loss_scale"] == 65536 * given["min_loss_scale"]
    assert given["fp16"] and given["position_embedding_type"] == "learned_absolute"
    assert "untie_embeddings_and_output_weights" not in given


SCHEDULES = [
    (name, warmup, steps)
    for name in ("cosine", "linear", "constant", "wsd linear", "wsd cosine", "wsd 1-sqrt")
    for warmup, steps in ((0, 10), (1, 10), (4, 10), (9, 10), (10, 10), (0, 1), (1, 1), (1, 2))
]


@pytest.mark.usefixtures("megatron_core")
@pytest.mark.parametrize(("name", "warmup", "steps"), SCHEDULES)
def test_megatron_cores_scheduler_has_our_learning_rates(
    name: Any, warmup: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    monkeypatch.setenv("RANK", "0")  # megatron-core 0.19 warns without it
    shape, _, decay = name.partition(" ")
    schedule = ScheduleSection(
        name=shape,
        warmup_steps=warmup,
        min_learning_rate=1e-5,
        decay_steps=3 if decay else None,
        decay=decay or "linear",
    )
    optimizer = OptimizerSection(learning_rate=1e-3)
    given = {
        argument[0]: argument[1] for argument in schedule_arguments(schedule, optimizer, steps)
    }
    group: dict[str, Any] = {}
    batch, decay_steps = 8, given.get("--lr-wsd-decay-iters")
    # As get_optimizer_param_scheduler of Megatron-LM builds it: in samples.
    scheduler = OptimizerParamScheduler(
        type("Optimizer", (), {"param_groups": [group]})(),
        init_lr=float(given.get("--lr-warmup-init", 0.0)),
        max_lr=optimizer.learning_rate,
        min_lr=float(given["--min-lr"]),
        lr_warmup_steps=int(given["--lr-warmup-iters"]) * batch,
        lr_decay_steps=int(given["--lr-decay-iters"]) * batch,
        lr_decay_style=given["--lr-decay-style"],
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=steps * batch,
        wd_incr_style="constant",
        wsd_decay_steps=None if decay_steps is None else int(decay_steps) * batch,
        lr_wsd_decay_style=given.get("--lr-wsd-decay-style"),
    )
    for step in range(steps):
        ours = learning_rate(step, steps, optimizer.learning_rate, schedule)
        assert group["lr"] == pytest.approx(ours, rel=1e-9), f"step {step}"
        scheduler.step(batch)


def problems(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        rendered(path, MEGATRON, *overrides)
    return [str(problem) for problem in caught.value.problems]


def test_what_megatron_lm_cannot_express_is_refused() -> None:
    (parallel,) = problems(RECIPES / "pythia" / "pythia-1.4b-pretrain.yaml")
    assert "parallel residual" in parallel and "dmt launch" in parallel
    (rope,) = problems(RECIPES / "llama" / "llama-3.2-1b-pretrain.yaml")
    assert "llama3 with factor: 32" in rope
    auto = "parallel.zero.stage=auto"
    (gated,) = problems(TINY, auto, "model.config.hidden_act=gelu")
    assert "a gated MLP with gelu" in gated
    theta, epochs = problems(
        TINY, auto, "model.config.rope_theta=1.5", "training.steps=null", "training.epochs=1"
    )
    assert "rope_theta 1.5" in theta and epochs.startswith("training.epochs: found 1")
    (isolated,) = problems(TINY, auto, "data.isolate_documents=true")
    assert isolated.startswith("data.isolate_documents: found true")
    on_three = ("cluster.gpus_per_node=3", "parallel.context=3", "training.sequence_length=96")
    on_three += ("model.config.num_attention_heads=6", "model.config.hidden_size=96")
    batch = ("training.global_batch_size=15", "training.micro_batch_size=1")
    (heads,) = problems(TINY, auto, *on_three, *batch, "kernels.context=ulysses")
    assert "all_gather or ring, where parallel.context does not divide" in heads
    window = ("model.config.model_type=mistral", "model.config.sliding_window=8")
    (exchange,) = problems(TINY, auto, "parallel.context=2", "kernels.context=ring", *window)
    assert exchange.startswith("kernels.context: found ring") and "a window" in exchange
    (balance,) = problems(RECIPES / "mistral" / "mixtral-8x7b-pretrain.yaml")
    assert balance.startswith("model.balance: found sequence_loss")
    (muon,) = problems(TINY, auto, "optimizer.name=muon")
    assert muon.startswith("optimizer.name: found muon; allowed: in Megatron-LM's")
    (adapters,) = problems(TINY, auto, "adapter={rank: 4, alpha: 8}")
    assert adapters.startswith("adapter: found lora; allowed: in Megatron-LM's pretrain_gpt.py")
    (groups,) = problems(TINY, auto, "optimizer.groups=[{parameters: [model.*], wd_mult: 0}]")
    assert groups.startswith("optimizer.groups: found 1 of them")


def test_a_field_without_an_argument_is_refused() -> None:
    gpt2 = RECIPES / "gpt2" / "gpt2-124m-pretrain.yaml"
    (scale,) = problems(gpt2, "model.config.scale_attn_weights=false")
    assert "megatron-core's softmax_scale" in scale


def test_indexed_data_is_passed_on(tmp_path: Path) -> None:
    source = f"{{kind: megatron, prefix: {tmp_path}/it's}}"
    given = parsed(tiny(f"data.train={source}", "data.validation_fraction=0.1"))
    assert given["data_path"] == [f"{tmp_path}/it's"]
    assert given["split"] == "0.9,0.1,0" and given["eval_iters"] > 0
    both = parsed(
        tiny(
            f"data.train={source}",
            f"data.validation={source}",
            "data.validation_fraction=0",
        )
    )
    assert both["train_data_path"] == both["valid_data_path"] == given["data_path"]
    unseen = ("data.validation_fraction=0", "evaluation.every_steps=null")
    assert parsed(tiny(f"data.train={source}", *unseen))["eval_iters"] == 0


def test_what_is_left_open_is_said() -> None:
    two_ranks = ("parallel.tensor=2", "cluster.gpus_per_node=2")
    notes = "\n".join(tiny(*two_ranks, "model.config.vocab_size=259").notes)
    for said in ("--data-path PREFIX", "--nproc-per-node 2", "--save DIR", "checkpoint.keep",
                 "CUDA_DEVICE_MAX_CONNECTIONS", "needs GPUs", "initial weights",
                 "that pad the vocabulary"):  # fmt: skip
        assert said in notes, said
    given = parsed(tiny())
    assert given["tokenizer_type"] == "NullTokenizer" and given["vocab_size"] == 256


def test_pretrained_weights_are_to_be_converted() -> None:
    path = RECIPES / "llama" / "llama-3.1-8b-pretrain.yaml"
    two_ranks = ("parallel.tensor=2", "cluster.nodes=1", "model.init=pretrained")
    notes = "\n".join(rendered(path, MEGATRON, *two_ranks).notes)
    assert "DIR --to megatron, where FOLDER is that of meta-llama/Llama-3.1-8B" in notes


@pytest.mark.slow
def test_every_shipped_recipe_is_rendered_or_refused() -> None:
    refused = []
    for path in sorted(RECIPES.glob("*/*.yaml")):
        recipe: Recipe = load_recipe(path, (MEGATRON, "parallel.zero.stage=auto"))
        try:
            parsed(megatron_lm.render(recipe, plan_recipe(recipe)))
        except RecipeError as error:
            refused.append((path.stem, str(error)))
    assert refused, "pythia is refused"
    assert all("in Megatron-LM" in error for _, error in refused), refused
