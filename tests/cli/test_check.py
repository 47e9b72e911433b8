"""`dmt` and `dmt check` as a user meets them."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dmt import Dmt
from tests.recipe.good import GOOD
from toolkit import __version__
from toolkit.cli.main import VERBS, Verb
from toolkit.errors import BackendUnavailable, Stopped
from toolkit.models.families import model_spec
from toolkit.text.units import human


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.yaml"
    path.write_text(GOOD)
    return path


def test_good_and_bad_together(good: Path, tmp_path: Path, dmt: Dmt) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(GOOD.replace("seed: 1", "seed: x"))
    captured = dmt("check", good, bad, code=2)
    assert captured.out.count("\n") == 1
    for part in ("good", "parameters", "51.2k tokens in 100 steps", "batch 8 × 64", "2 × cpu"):
        assert part in captured.out
    line = 1 + GOOD[: GOOD.index("seed: 1")].count("\n")
    assert f"\n  {bad}:{line}  training.seed\n" in captured.err


def test_json_is_alone_on_standard_output(good: Path, tmp_path: Path, dmt: Dmt) -> None:
    missing = tmp_path / "missing.yaml"
    captured = dmt("check", "--json", good, missing, code=2)
    fine, bad = json.loads(captured.out)["recipes"]
    assert fine == {"file": str(good), "ok": True, "problems": [], "note": None}
    assert (bad["file"], bad["ok"]) == (str(missing), False)
    assert bad["problems"][0].keys() == {"key", "found", "allowed", "fix", "file", "line"}
    assert captured.err == ""


def test_overrides(good: Path, dmt: Dmt) -> None:
    assert "in 50 steps" in dmt("check", good, "--set", "training.steps=50").out
    printed = dmt("check", good, "--set", "training.steps=x", code=2).err
    assert "  --set  training.steps\n" in printed


def test_what_may_not_be_meant_is_a_note(good: Path, dmt: Dmt) -> None:
    assert "note" not in dmt("check", good, "--set", "optimizer.learning_rate=1").out
    changes = ("--set", "training.steps=5", "--set", "optimizer.learning_rate=30000")
    note = dmt("check", good, *changes).out
    assert "the run's 5 steps end in a warm-up of 10" in note
    assert "optimizer.learning_rate: 30000 is far above what AdamW uses" in note
    adapter = ("--set", "adapter={rank: 4, alpha: 8}")
    assert "note  adapter: the weights" in dmt("check", good, *adapter).out


def test_what_is_no_recipe(tmp_path: Path, dmt: Dmt) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    assert "a file of rows" in dmt("check", tmp_path / "rows.jsonl", code=2).err
    assert "write --set training.steps=5" in dmt("check", "training.steps=5", code=2).err


def test_mistakes_of_an_own_deepspeed_file(tmp_path: Path, dmt: Dmt) -> None:
    """With the place in it; every mistake is in tests/engines/test_deepspeed_config.py."""
    own, recipe = tmp_path / "own.json", tmp_path / "own.yaml"
    recipe.write_text(GOOD.replace("stage: auto", "stage: auto\n    config: own.json"))

    def problem(*more: str) -> tuple[str, str, int]:
        (found,) = dmt("check", "--json", recipe, *more, code=2).json["recipes"][0]["problems"]
        return found["key"], found["file"], found["line"]

    key, file, line = problem()
    assert (key, file) == ("parallel.zero.config", str(recipe))
    assert "config: own.json" in recipe.read_text().splitlines()[line - 1]
    own.write_text('{\n\n"train_batch_size": 9}')
    assert problem() == ("train_batch_size", str(own), 3)
    own.write_text('{"steps_per_print":\n')
    assert problem() == ("DeepSpeed config", str(own), 2)
    own.write_text('{"zero_optimization":\n{"stage": 2}}')
    assert dmt("check", "--json", recipe).json["recipes"][0]["ok"]
    offload = "parallel.zero.offload_parameters"
    assert problem("--set", f"{offload}=cpu")[:2] == (offload, "--set")


def without_config(tmp_path: Path, hub: str) -> Path:
    """A recipe whose model's shape is not in it."""
    begin, end = GOOD.index("  config:"), GOOD.index("data:")
    path = tmp_path / "hub.yaml"
    path.write_text(f"{GOOD[:begin]}  hub: {hub}\n{GOOD[end:]}")
    return path


def test_shape_only_on_the_hub_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dmt: Dmt
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: pytest.fail("the network was used"))
    path = without_config(tmp_path, "nobody/nothing")
    shown, note = dmt("check", path).out.splitlines()
    assert "nobody/nothing, 51.2k tokens" in shown
    assert "not planned: model.hub: 'nobody/nothing'" in note
    assert "not planned" in dmt("check", "--json", path).json["recipes"][0]["note"]


def test_shape_in_a_folder_is_read(tmp_path: Path, dmt: Dmt) -> None:
    path = without_config(tmp_path, "./weights")
    (problem,) = dmt("check", "--json", path, code=2).json["recipes"][0]["problems"]
    assert (problem["key"], problem["file"]) == ("model.hub", str(path))
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights/config.json").write_text('{"model_type": "llama"}')
    parameters = human(model_spec({"model_type": "llama"}).parameters.total)
    shown = dmt("check", path).out
    assert f"weights, {parameters} parameters, 51.2k tokens" in shown


def test_sequences_above_the_positions_of_a_loaded_model(tmp_path: Path, dmt: Dmt) -> None:
    path = without_config(tmp_path, "./weights")
    (tmp_path / "weights").mkdir()
    config = tmp_path / "weights/config.json"
    small = {"model_type": "llama", "max_position_embeddings": 32, "num_hidden_layers": 1}
    config.write_text(json.dumps(small))
    note = "sequence_length 64 is above the model's max_position_embeddings 32"
    assert note in dmt("check", "--json", path).json["recipes"][0]["note"]
    assert note in " ".join(dmt("plan", path).out.split())
    config.write_text('{"model_type": "gpt2", "n_positions": 32}')
    (problem,) = dmt("check", "--json", path, code=2).json["recipes"][0]["problems"]
    assert (problem["key"], problem["allowed"]) == (
        "training.sequence_length",
        "at most 32, the model's positions",
    )


def test_keys_that_transformers_ignores_are_named(tmp_path: Path, dmt: Dmt) -> None:
    """Every tool and release leaves some; a base class's own are no news."""
    path = without_config(tmp_path, "./weights")
    (tmp_path / "weights").mkdir()
    config = {
        "model_type": "llama", "unsloth_fixed": True, "tokenizer_class": "X",
        "_attn_implementation_autoset": True, "chunk_size_feed_forward": 0,
    }  # fmt: skip
    (tmp_path / "weights/config.json").write_text(json.dumps(config))
    note = dmt("check", "--json", path).json["recipes"][0]["note"]
    assert note.endswith(
        "does not read unsloth_fixed, tokenizer_class, _attn_implementation_autoset"
    )


HIDDEN = {"schema"}


def test_version_and_help(dmt: Dmt) -> None:
    assert dmt("--version").out == f"dmt {__version__}\n"
    shown = dmt("--help").out
    listed = {line.split()[1] for line in shown.splitlines() if line.startswith("│ ")}
    assert listed >= VERBS.keys() - HIDDEN and not listed & HIDDEN
    verbs = [[verb] for verb in VERBS.keys() - {"data"}]
    of_files = {
        "checkpoint": ("list", "verify", "export", "import"),
        "data": ("prepare", "show"),
    }
    verbs += [[verb, sub] for verb, subs in of_files.items() for sub in subs]
    for words in verbs:
        assert f"Example: dmt {' '.join(words)}" in dmt(*words, "--help").out
    assert "--set" in dmt("check", "--help").out


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("dmt ", VERBS.keys() - HIDDEN),
        ("dmt che", {"check", "checkpoint"}),
        ("dmt plan recipe.yaml --expl", {"--explain"}),
        ("dmt checkpoint ver", {"verify"}),
        ("dmt checkpoint export --mer", {"--merged"}),
        ("dmt init llama-3.1", {"llama-3.1-405b", "llama-3.1-70b", "llama-3.1-8b"}),
        ("dmt init llama-3.1-8b --task ", {"pretrain", "sft", "lora", "dpo"}),
    ],
)
def test_completion(
    words: str, offered: set[str], monkeypatch: pytest.MonkeyPatch,
    dmt: Dmt
) -> None:  # fmt: skip
    """What the shell gets; a verb's own options although verbs are imported late."""
    monkeypatch.setenv("_DMT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
    assert set(dmt().out.split()) == offered


def test_wrong_usage(dmt: Dmt) -> None:
    assert "check" in dmt("chek", code=2).err
    assert "Traceback" not in dmt("check", "--sett", "a=b", code=2).err
    assert "it is empty" in dmt("launch", "recipe.yaml", "--run-dir", "", code=2).err


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
    monkeypatch: pytest.MonkeyPatch, dmt: Dmt, function: str, code: int, message: str
) -> None:
    monkeypatch.setitem(sys.modules, "a_verb", sys.modules[__name__])
    monkeypatch.setitem(VERBS, "try", Verb("Try it.", target=f"a_verb:{function}"))
    captured = dmt("try", code=code)
    assert message in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize("verb", ["check", "launch", "report"])
def test_an_environment_that_is_not_utf8(verb: str, tmp_path: Path) -> None:
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "toolkit.cli.main", verb, tmp_path / "größe"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (3, "")
    assert "encoding of file names is ascii here" in done.stderr
    assert "export PYTHONUTF8=1" in done.stderr and "Traceback" not in done.stderr
