"""`dmt plan --mtbf` as a user and as a program reads it."""

import re
from pathlib import Path

import pytest

from tests.dmt import Dmt

RECIPES = Path(__file__).parents[3] / "recipes"
LLAMA_405B = str(RECIPES / "llama/llama-3.1-405b-pretrain.yaml")
TINY = str(RECIPES / "tiny/llama-bytes.yaml")
SECTION = "  failures: how often to save, and what is left for training\n"


def section(dmt: Dmt, *arguments: str) -> str:
    return dmt("plan", *arguments).out.partition(SECTION)[2]


def test_the_table_and_what_it_assumes(dmt: Dmt) -> None:
    table, rest = section(dmt, LLAMA_405B, "--mtbf", "50000").split("\n\n")
    header, *lines = (line.split() for line in table.splitlines())
    assert " ".join(header) == (
        "GPUs job MTBF save every steps goodput saving replay restart if sync"
    )
    assert [line[0] for line in lines][-3:] == ["16,384", "32,768", "100,000"]
    for line in lines:
        kept, saving, replay, restart = (float(cell.strip("%")) for cell in line[-5:-1])
        assert kept + saving + replay + restart == pytest.approx(100, abs=0.25)
    (own,) = (line for line in lines if line[5] != "-")
    assert own[0] == "16,384"
    advice, assumed, *stated = rest.splitlines()
    assert re.match(
        r"  this recipe on 16,384: checkpoint\.every_steps is 25 \(\d\.\d min\): "
        rf"goodput \d\d\.\d%; {re.escape(own[6])} with "
        rf"--set checkpoint\.every_steps={own[5]}$",
        advice,
    )
    assert assumed == "  assumed"
    for text in (
        "--mtbf 50,000: hours between failures of one GPU with its share of",
        "12 bytes per parameter",
        "--checkpoint-gbps 1: ",
        "--restart-minutes 10: ",
        "saves are asynchronous",
        "other sizes than 16,384: the same model state spread evenly",
    ):
        assert any(text in line for line in stated), text


def test_the_table_fits_80_columns(dmt: Dmt) -> None:
    for recipe in (LLAMA_405B, TINY):
        table = section(dmt, recipe, "--mtbf", "50000").split("\n\n")[0]
        assert max(map(len, table.splitlines())) < 80


def test_for_programs(dmt: Dmt) -> None:
    options = ("--mtbf", "50000", "--checkpoint-gbps", "0.5", "--restart-minutes", "3")
    found = dmt("plan", LLAMA_405B, *options, "--json").json["goodput"]
    assert found["assumptions"] == {
        "mtbf_hours": 50_000, "checkpoint_gbps": 0.5, "restart_minutes": 3,
    }  # fmt: skip
    assert found["recipe"]["every_steps"] == 25
    own = next(job for job in found["jobs"] if job["gpus"] == 16_384)
    assert 0 < found["recipe"]["goodput"] < own["goodput"] < 1
    assert own["goodput"] + sum(own["lost"].values()) == pytest.approx(1)
    assert set(own["lost"]) == {"saving", "replay", "restart"}
    assert own["mtbf_hours"] == pytest.approx(50_000 / 16_384)
    bytes_per_node = found["checkpoint_bytes"] / 2048
    assert own["restart_s"] == pytest.approx(3 * 60 + bytes_per_node / 0.5e9)


def test_without_the_option_nothing_is_said(dmt: Dmt) -> None:
    assert section(dmt, TINY) == ""
    assert "goodput" not in dmt("plan", TINY, "--json").json


def test_a_recipe_that_saves_at_its_end_only(dmt: Dmt) -> None:
    setting = "checkpoint.every_steps=null"
    out = section(dmt, LLAMA_405B, "--mtbf", "50000", "--set", setting)
    assert "every_steps is not set, so a failure undoes everything; 9" in out


def test_a_run_that_is_over_before_it_should_save(dmt: Dmt) -> None:
    out = section(dmt, TINY, "--mtbf", "50000")
    (advice,) = re.findall(r"this recipe on .*", out)
    assert re.search(r"the whole run \(.*\) is shorter than the best interval$", advice)
    assert "every_steps" not in advice


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--restart-minutes", "5"], "nothing is asked about failures"),
        (["--checkpoint-gbps", "5"], "add --mtbf HOURS"),
        (["--mtbf", "50000", TINY], "--mtbf: one recipe on one cluster"),
        (["--mtbf", "0"], "--mtbf is 0; it is a number from 0.001 to 1,000,000,000"),
        (["--mtbf", "nan"], "--mtbf is nan"),
        (["--mtbf", "inf"], "--mtbf is inf"),
        (["--mtbf", "5", "--checkpoint-gbps", "-1"], "--checkpoint-gbps is -1"),
        (["--mtbf", "5", "--checkpoint-gbps", "1e300"], "--checkpoint-gbps is 1e+300"),
        (["--mtbf", "5", "--restart-minutes", "inf"], "--restart-minutes is inf"),
    ],
)
def test_mistakes(options: list[str], message: str, dmt: Dmt) -> None:
    assert message in dmt("plan", TINY, *options, code=2).err


@pytest.mark.parametrize("mtbf", ["0.001", "1e9"])
@pytest.mark.parametrize(("gbps", "minutes"), [("0.001", "1e5"), ("1e6", "0")])
def test_bounds_are_within_reach(mtbf: str, gbps: str, minutes: str, dmt: Dmt) -> None:
    options = ["--mtbf", mtbf, "--checkpoint-gbps", gbps, "--restart-minutes", minutes]
    assert "nan" not in dmt("plan", TINY, *options).out
