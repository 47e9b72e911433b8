"""`dmt plan` as a user and as a program reads it."""

import json
from pathlib import Path

import pytest

from toolkit.cli.main import main

RECIPES = Path(__file__).parents[2] / "recipes"
LLAMA_8B = str(RECIPES / "llama/llama-3.1-8b-pretrain.yaml")
TINY = str(RECIPES / "tiny/llama-bytes.yaml")


def test_table_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", LLAMA_8B]) == 0
    assert capsys.readouterr().out == (
        """\
llama-3.1-8b-pretrain  8.03B parameters
  engine          deepspeed
  model           hf
  ranks           256 = 32 nodes × 8 h100-80gb
  data parallel   256
  ZeRO stage      2
  offload         none
  global batch    1 micro batch × 4 accumulation × 256 dp = 1,024 sequences
  recompute       full
  model states    15.4 GiB of 80 GiB per GPU

  why
  - engine deepspeed with model hf: auto; preferred to ddp, megatron
  - zero 2: auto; model states take 15.4 of 80 GiB per GPU
  - micro batch 1: 8,192 tokens per forward pass, 4 times a step
  - recompute full: 34.0 GiB of activations per micro batch do not fit in 32 GiB

  ledger, against one fp32 process
  exact         initial weights: drawn from the seed and each parameter's name and indices
  exact         data order: global batch k follows from the seed and k, under any world size
  exact         token-mean loss: the mean over the unmasked tokens of the whole batch, """
        """not of its 1,024 parts
  exact         clipping: at 1 of the norm over all parameters
  exact         weight decay: 0.1, not for norms and biases
  exact         optimizer states: AdamW with fp32 weights and moments
  exact         recompute: the backward pass repeats the forward pass with the same numbers
  approximated  bf16: computed in bf16, weights updated in fp32
  approximated  order of sums: gradients over 4 micro batches and 256 data-parallel ranks: """
        """the same terms, other last digits
  approximated  gradient reduction: gradients are summed over 256 data-parallel ranks in bf16
  refused       tensor, pipeline, virtual pipeline, context, expert above 1: not in engine """
        """deepspeed with model hf
  refused       selective recompute: not in engine deepspeed with model hf
  refused       fp8: no engine of this release trains in it
"""
    )


def test_degrees_of_a_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(RECIPES / "llama/llama-3.1-405b-pretrain.yaml")]) == 0
    shown = capsys.readouterr().out
    assert "\n  tensor          8\n  pipeline        16\n" in shown
    assert "\n  sequence        split inside the tensor group\n" in shown
    assert "\n  ZeRO stage      1 (distributed optimizer)\n" in shown
    assert "\n  - pipeline 16: asked for; 7 + 14 × 8 + 7 layers\n" in shown


MIXTRAL = str(RECIPES / "tiny/mixtral-bytes.yaml")


@pytest.mark.parametrize(
    ("settings", "pair"),
    [
        ([], ("deepspeed", "hf")),
        (["parallel.engine=ddp", "parallel.zero.stage=auto"], ("ddp", "hf")),
        (
            ["parallel.engine=megatron", "parallel.zero.stage=1", "parallel.expert=2"],
            ("megatron", "megatron"),
        ),
    ],
)
def test_the_tiny_mixture_of_experts_by_engine(
    settings: list[str], pair: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    changes = [word for one in settings for word in ("--set", one)]
    assert main(["check", MIXTRAL, *changes]) == 0
    capsys.readouterr()
    assert main(["plan", MIXTRAL, "--json", *changes]) == 0
    (plan,) = json.loads(capsys.readouterr().out)["plans"]
    assert (plan["engine"], plan["model"]) == pair
    assert plan["layout"]["ep"] == (2 if pair[0] == "megatron" else 1)


def test_launch_says_what_is_exact_before_it_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", TINY, "--dry-run", "--run-dir", str(tmp_path / "run")]) == 0
    told = capsys.readouterr().err.splitlines()
    exact, approximated, refused = told[-3:]
    assert exact.startswith("exact: initial weights, data order, token-mean loss")
    assert approximated == "approximated: order of sums"
    assert refused.startswith("refused: ")


def test_offload_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["parallel.zero.stage=3", "parallel.zero.offload_optimizer=cpu"]
    assert main(["plan", TINY, *(word for one in settings for word in ("--set", one))]) == 0
    shown = capsys.readouterr().out
    assert "\n  offload         optimizer to cpu\n" in shown
    assert "\n  ranks           2 = 1 node × 2 cpu\n" in shown
    assert " MiB per process\n" in shown


def test_json_is_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", LLAMA_8B, "--json"]) == 0
    captured = capsys.readouterr()
    output = json.loads(captured.out)
    assert captured.err == ""
    assert (output["considered"], output["rejected"]) == (1, {})
    (plan,) = output["plans"]
    assert (plan["engine"], plan["model"]) == ("deepspeed", "hf")
    assert plan["layout"] == {
        "dp": 256, "tp": 1, "pp": 1, "vpp": 1, "cp": 1, "ep": 1, "sequence_parallel": False,
        "zero_stage": 2, "offload_optimizer": "none", "offload_parameters": "none",
        "recompute": "full", "micro_batch": 1, "gradient_accumulation": 4,
    }  # fmt: skip
    states = 8_030_261_248 * (2 + 16 / 256) / 2**30
    assert plan["memory_gib"].pop("model_states") == pytest.approx(states)
    assert set(plan["memory_gib"].values()) == {None}
    assert "total" in plan["memory_gib"]
    assert {entry["kind"] for entry in plan["ledger"]} == {"exact", "approximated", "refused"}
    assert all(set(entry) == {"kind", "what", "why"} for entry in plan["ledger"])
    for unknown in ("step_time_s", "tokens_per_s_per_gpu", "mfu", "fits"):
        assert plan[unknown] is None


def test_too_large_model_states_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    one = ["--set", "cluster.nodes=1", "--set", "cluster.gpus_per_node=1"]
    assert main(["plan", LLAMA_8B, "--json", *one]) == 0
    (plan,) = json.loads(capsys.readouterr().out)["plans"]
    assert plan["fits"] is False
    assert any("WARNING" in reason for reason in plan["reasons"])


@pytest.mark.parametrize("launcher", ["local", "torchrun", "deepspeed"])
def test_more_nodes_can_be_planned_but_not_launched_from_here(
    launcher: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    assert main(["check", LLAMA_8B, "--set", f"launch.launcher={launcher}"]) == 0
    arguments = ["launch", LLAMA_8B, "--launcher", launcher, "--run-dir", str(run_dir)]
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert f"launch.launcher: {launcher} starts" in message
    assert "cluster.nodes is 32\n  fix: " in message
    assert not run_dir.exists()


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("plan recipes/gpt2/gpt2-124m", "check recipes/*/*.yaml"):
        assert main([command.split()[0], "--help"]) == 0
        assert f"Example: dmt {command}" in capsys.readouterr().out
