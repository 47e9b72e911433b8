"""`dmt estimate --cases` as a user reads it."""

import json
from pathlib import Path

import pytest

from tests.dmt import Dmt

CASES = [
    {
        "id": "counted",
        "model": {"name": "7.5B", "params": 7.5e9},
        "hardware": {"gpu": "V100-32GB", "n_gpus": 64},
        "layout": {"dp": 64, "zero_stage": 2},
    },
    {
        "id": "unknown",
        "model": {"name": "no shape"},
        "hardware": {"gpu": "A100", "n_gpus": 8},
        "layout": {},
    },
]


def test_cases_become_results(tmp_path: Path, dmt: Dmt) -> None:
    cases, out = tmp_path / "cases.json", tmp_path / "results.json"
    cases.write_text(json.dumps(CASES))
    printed = dmt("estimate", "--cases", cases, "--out", out).err
    assert printed == f"1 of 2 cases answered in {out}\n"
    counted, unknown = json.loads(out.read_text())
    assert counted["id"] == "counted" and counted["unsupported"] is None
    # ZeRO's figure 1: 16.6 GB.
    assert counted["memory_gib"]["model_states"] * 2**30 / 1e9 == pytest.approx(16.6, abs=0.05)
    assert unknown["unsupported"] and unknown["memory_gib"] == {}
    fields = {"id", "step_time_s", "tokens_per_s_per_gpu", "mfu", "memory_gib", "fits"}
    assert set(unknown) == fields | {"unsupported"}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--cases", "missing.json", "--out", "x"), "missing.json is not a list of cases"),
        (("--cases", "text.json", "--out", "x"), "text.json is not a list of cases"),
        (("--cases", "map.json", "--out", "x"), "map.json is not a list of cases"),
        (("--cases", "odd.json", "--out", "x"), "odd.json is not a list of cases"),
        (("--cases", "cases.json", "--out", "no/x"), "cannot write no/x"),
        (("--cases", "cases.json", "--out", "x", "--set", "name=a"), "--set: changes a recipe"),
    ],
)
def test_mistakes_are_explained(
    arguments: tuple[str, ...],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dmt: Dmt,
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {"cases.json": CASES, "map.json": {"id": 1}, "odd.json": [{"id": "no model"}]}
    for name, content in files.items():
        Path(name).write_text(json.dumps(content))
    Path("text.json").write_text("not JSON")
    error = dmt("estimate", *arguments, code=2).err
    assert complaint in error and "fix: " in error
    assert not Path("x").exists()
