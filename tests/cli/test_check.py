"""`dmt` and `dmt check` as a user meets them."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.recipe.good import GOOD
from toolkit import __version__
from toolkit.cli.check import human
from toolkit.cli.main import VERBS, Verb, main
from toolkit.errors import BackendUnavailable, Stopped


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.yaml"
    path.write_text(GOOD)
    return path


def test_good_and_bad_together(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(GOOD.replace("seed: 1", "seed: x"))
    assert main(["check", str(good), str(bad)]) == 2
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1
    for part in ("good", "parameters", "51.2k tokens in 100 steps", "batch 8 × 64", "2 × cpu"):
        assert part in captured.out
    line = 1 + GOOD[: GOOD.index("seed: 1")].count("\n")
    assert f"\n  {bad}:{line}  training.seed\n" in captured.err


def test_json_is_alone_on_standard_output(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "missing.yaml"
    assert main(["check", "--json", str(good), str(missing)]) == 2
    captured = capsys.readouterr()
    fine, bad = json.loads(captured.out)["recipes"]
    assert fine == {"file": str(good), "ok": True, "problems": []}
    assert (bad["file"], bad["ok"]) == (str(missing), False)
    assert bad["problems"][0].keys() == {"key", "found", "allowed", "fix", "file", "line"}
    assert captured.err == ""


def test_overrides(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(good), "--set", "training.steps=50"]) == 0
    assert "in 50 steps" in capsys.readouterr().out
    assert main(["check", str(good), "--set", "training.steps=x"]) == 2
    assert "  --set  training.steps\n" in capsys.readouterr().err


def test_twenty_recipes_are_quick(good: Path, tmp_path: Path) -> None:
    files = []
    for index in range(20):
        files.append(tmp_path / f"{index}.yaml")
        files[-1].write_text(GOOD)
    begin = time.monotonic()
    command = [
        sys.executable,
        "-c",
        "from toolkit.cli.main import main; raise SystemExit(main())",
    ]
    subprocess.run([*command, "check", *files, good], check=True, capture_output=True)
    # 0.4 s on an idle machine; the limit leaves room for a busy one.
    assert time.monotonic() - begin < 5


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"dmt {__version__}\n"
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in VERBS)
    assert main(["check", "--help"]) == 0
    assert "--set" in capsys.readouterr().out


def test_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chek"]) == 2
    assert "check" in capsys.readouterr().err
    assert main(["check", "--sett", "a=b"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def _unavailable() -> None:
    raise BackendUnavailable("no compiler", fix="install gcc")


def _stopped() -> None:
    raise Stopped("saved step 3")


def _interrupted() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("function", "code", "message"),
    [
        ("_unavailable", 3, "dmt: no compiler\n  fix: install gcc"),
        ("_stopped", 75, "dmt: saved step 3"),
        ("_interrupted", 130, ""),
    ],
)
def test_exit_codes(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    function: str,
    code: int,
    message: str,
) -> None:
    monkeypatch.setitem(sys.modules, "a_verb", sys.modules[__name__])
    monkeypatch.setitem(VERBS, "try", Verb(f"a_verb:{function}", "Try it."))
    assert main(["try"]) == code
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err


def test_human_numbers() -> None:
    assert [human(n) for n in (7, 1234, 1.5e6, 8.03e9, 2e12)] == [
        "7", "1.23k", "1.5M", "8.03B", "2T",
    ]  # fmt: skip
