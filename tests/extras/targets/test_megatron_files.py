"""What a script that starts Megatron-LM says."""

import shlex
from pathlib import Path

import pytest

from tests.processes import ROOT
from tests.targets.conftest import Planned
from tests.targets.reading import read, told
from toolkit.errors import RecipeError
from toolkit.extras.targets import pretrain_gpt as megatron_lm

RECIPES = sorted((ROOT / "recipes").glob("*/*.yaml"))
SCRIPT = """\
#!/bin/bash
# Don't forget to set the data path
export TP=2
PP=${TP}
ARGS=(
  --tensor-model-parallel-size $TP
  --pipeline_model_parallel_size ${PP}
  --num-layers 8 --num-layers-per-virtual-pipeline-stage 2
  --lr=3e-3 --optimizer adam --clip-grad 0
  --seq-length $SEQ
  --sequence-parallel
  --global-batch-siz 16
)
torchrun --nproc_per_node 2 pretrain_gpt.py "${ARGS[@]}" \\
  --train-iters 200 --lr-warmup-iters 20 --weight-decay 0.1 | tee log.txt
"""


def test_a_script_that_starts_megatron(tiny: Planned, tmp_path: Path) -> None:
    report = read(tiny, tmp_path, SCRIPT, "train.sh")
    assert told(report) == {
        "--tensor-model-parallel-size": ("parallel.tensor", "disagrees", "6"),
        "--pipeline_model_parallel_size": ("parallel.pipeline", "disagrees", "7"),
        "--num-layers": ("megatron.num_layers", "disagrees", "8"),
        "--num-layers-per-virtual-pipeline-stage": (
            "parallel.virtual_pipeline",
            "disagrees",
            "8",
        ),
        "--lr": ("optimizer.learning_rate", "agrees", "9"),
        "--optimizer": ("optimizer.name", "agrees", "9"),
        "--clip-grad": ("optimizer.clip_grad_norm", "disagrees", "9"),
        "--seq-length": ("training.sequence_length", "open", "10"),
        "--sequence-parallel": ("parallel.sequence", "disagrees", "11"),
        "--nproc_per_node": ("cluster.gpus_per_node", "agrees", "14"),
        "--train-iters": ("training.steps", "agrees", "15"),
        "--lr-warmup-iters": ("schedule.warmup_steps", "agrees", "15"),
        "--weight-decay": ("optimizer.weight_decay", "agrees", "15"),
    }
    (typo,) = report.source.unknown
    assert typo.hint == "did you mean `--global-batch-size`?"
    (switch,) = [row for row in report.conflicts if row.name == "--sequence-parallel"]
    assert (switch.recipe, switch.other) == ("false", "given")
    assert switch.advice.startswith("remove `--sequence-parallel` at ")
    assert report.source.only_there == []


def test_a_flag_by_another_tools_name(tiny: Planned, tmp_path: Path) -> None:
    report = read(tiny, tmp_path, "--tp-size 2\n--eod-mask-loss\n", "args.txt")
    (other,) = report.source.unknown
    assert "parallel.tensor" in other.hint
    assert report.source.only_there == ["--eod-mask-loss"]


def test_the_shape_of_a_wsd_decay_is_compared(tiny: Planned, tmp_path: Path) -> None:
    flags = "--lr-decay-style WSD --lr-wsd-decay-style minus_sqrt\n"
    found = told(read(tiny, tmp_path, flags, "args.txt"))
    assert found["--lr-wsd-decay-style"] == ("schedule.decay", "disagrees", "1")
    assert found["--lr-decay-style"] == ("schedule.name", "disagrees", "1")


def test_a_quotation_without_an_end(tiny: Planned, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="does not end"):
        read(tiny, tmp_path, "--lr 'never ends\n", "a.txt")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_what_is_rendered_agrees(path: Path, tmp_path: Path) -> None:
    planned = Planned.of(path)
    if planned.plan.engine != "megatron":
        return
    file = tmp_path / "args.txt"
    try:
        file.write_text(megatron_lm.render(planned.recipe, planned.plan).text)
    except RecipeError:
        return
    report = planned.against(file)
    wrong = [row for row in report.compared if row.verdict != "agrees"]
    assert (wrong, report.source.unknown) == ([], [])
    assert len(report.compared) >= 40


def test_each_changed_number_of_megatron_arguments_is_found(tmp_path: Path) -> None:
    planned = Planned.of(ROOT / "recipes/llama/llama-3.1-405b-pretrain.yaml")
    arguments = megatron_lm.render(planned.recipe, planned.plan).arguments
    file = tmp_path / "args.txt"
    tried = 0
    for index, (flag, *values) in enumerate(arguments):
        if len(values) != 1 or not values[0].replace(".", "").replace("e-", "").isdigit():
            continue
        changed = [*arguments]
        changed[index] = (flag, str(float(values[0]) * 3 + 5).removesuffix(".0"))
        file.write_text("\n".join(shlex.join(argument) for argument in changed))
        report = planned.against(file)
        if flag in report.source.only_there:
            continue
        parts = {
            "--lr-warmup-init": "--lr-warmup-iters",
            "--recompute-num-layers": "--recompute-granularity",
        }
        told_by = parts.get(flag, flag)
        assert told_by in {row.name for row in report.conflicts}, flag
        tried += 1
    assert tried >= 35
