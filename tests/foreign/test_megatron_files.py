"""What a script that starts Megatron-LM says."""

from pathlib import Path

import pytest

from tests.foreign.conftest import Planned
from tests.foreign.reading import read, told
from tests.processes import ROOT
from toolkit.errors import PlanError, RecipeError
from toolkit.foreign.megatron_flags import layout_flags

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


def test_the_layout_of_a_plan(tmp_path: Path) -> None:
    planned = Planned.of(ROOT / "recipes/llama/llama-3.1-405b-pretrain.yaml")
    flags = layout_flags(planned.recipe, planned.plan)
    report = read(planned, tmp_path, flags, "args.txt")
    found = told(report)
    names = ("tensor-model-parallel-size", "pipeline-model-parallel-size", "sequence-parallel",
             "global-batch-size", "use-distributed-optimizer", "bf16")  # fmt: skip
    assert {f"--{name}" for name in names} <= found.keys()
    assert {verdict for _, verdict, _ in found.values()} == {"agrees"}
    assert report.source.unknown == []
    with pytest.raises(PlanError, match="engine deepspeed"):
        tiny = Planned.of(ROOT / "recipes/tiny/llama-bytes.yaml")
        layout_flags(tiny.recipe, tiny.plan)
