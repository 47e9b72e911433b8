"""The model card of an export, and its upload to a hub on this machine."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard, constants
from safetensors.torch import load_file, save_file

from tests.checkpoint import model_hub
from tests.checkpoint.conftest import single_rank  # noqa: F401 - a fixture
from tests.checkpoint.making import saved_run
from tests.checkpoint.model_hub import TOKEN, ModelHub
from toolkit.checkpoint.manifest import Manifest
from toolkit.cli.main import main
from toolkit.models.agreement import huggingface_logits
from toolkit.run import jsonl
from toolkit.run.directory import RunDirectory
from toolkit.run.events import EventLog
from toolkit.run.model_card import write_card
from toolkit.train.exporting import export_last
from toolkit.train.phases import Phases

Captured = pytest.CaptureFixture[str]
REPO = "me/model"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """With a checkpoint of step 10 of 20, and what it would have logged until now."""
    made = RunDirectory(saved_run(tmp_path, 10))
    for step in (1, 10, 20):
        jsonl.append(made.metrics, {"step": step, "loss": 5.0 - step / 10})
    for step in (5, 10, 20):
        EventLog(made.events).write("evaluation", step=step, loss=6.0 - step / 10)
    return made.path


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelHub]:
    """What HF_ENDPOINT sets in a process of its own."""
    with model_hub.running() as found:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        files = found.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield found


def export(capsys: Captured, *words: object) -> tuple[int, str, str]:
    code = main(["checkpoint", "export", *map(str, words), "--no-verify"])
    return code, *capsys.readouterr()


def test_the_card_is_of_the_run_and_a_users_card_stays(run: Path) -> None:
    """Neither a card nor an edit of it makes a finished run export again."""
    made = RunDirectory(run)
    export_last(made, 10, Phases(1))
    card = ModelCard.load(run / "export" / "README.md")
    assert card.data.library_name == "transformers"
    for line in (
        "| steps | 10 |", "| 1 | 4.9000 |  |", "| 10 | 4.0000 | 5.0000 |",
        "| *.txt | text |  |", "  learning_rate: 0.001", "| torch | 2.13.0 |",
    ):  # fmt: skip
        assert line in card.content
    assert "| 20 |" not in card.content, "a later step"
    assert str(run.parent) not in card.content, "a path of this machine"
    checkpoint = run / "checkpoints" / "step-00000010"
    _train_from(run.parent / "base", checkpoint)
    write_card(run / "export", checkpoint)
    metadata = ModelCard.load(run / "export" / "README.md").data
    assert (metadata.base_model, metadata.license) == ("meta/llama", "llama3")
    path = run / "export" / "README.md"
    edited = card.content.replace("DMT", "patience")
    path.write_text(edited)
    weights = run / "export" / "model.safetensors"
    written = weights.stat().st_mtime_ns
    export_last(made, 10, Phases(1))
    assert weights.stat().st_mtime_ns == written
    weights.unlink()
    export_last(made, 10, Phases(1))
    assert weights.exists() and path.read_text() == edited


def _train_from(base: Path, checkpoint: Path) -> None:
    """As if the run had begun with the weights in a folder that has a card."""
    base.mkdir()
    (base / "README.md").write_text("---\nlicense: llama3\nbase_model: meta/llama\n---\n")
    manifest = Manifest.read(checkpoint)
    model = manifest.recipe["model"] | {"hub": str(base), "init": "pretrained"}
    replace(manifest, recipe=manifest.recipe | {"model": model}).write(checkpoint)


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of the hub's client
@pytest.mark.parametrize("xet", [True, False])
def test_upload(
    run: Path, hub: ModelHub, capsys: Captured, monkeypatch: pytest.MonkeyPatch, xet: bool
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", not xet)
    first, again = run.parent / "first", run.parent / "again"
    code, out, err = export(capsys, run, first, "--push-to-hub", REPO, "--private")
    assert code == 0, err
    assert f"uploaded: {hub.url}/{REPO}/commit/" in out
    assert hub.private == {REPO} and hub.commits == ["Step 10 of small"]
    files = hub.repositories[REPO]
    assert files.keys() == {path.name for path in first.iterdir()}
    weights = (first / "model.safetensors").read_bytes()
    if xet:
        assert files["model.safetensors"].decode() == hashlib.sha256(weights).hexdigest()
        stored = sum(size for path, size in hub.xet if path.startswith("/v1/xorbs/"))
        assert stored > 0.8 * len(weights)
    else:
        assert files["model.safetensors"] == weights
    # Another split and a card that its owner edited.
    files |= {"README.md": b"mine", "notes.txt": b"mine"}
    words = run, again, "--push-to-hub", REPO, "--shard-size", "100KB", "--json"
    code, out, _ = export(capsys, *words)
    assert code == 0 and json.loads(out)["commit"].startswith(hub.url)
    assert files.keys() == {path.name for path in again.iterdir()} | {"notes.txt"}
    assert "model.safetensors" not in files and files["README.md"] == b"mine"


def test_an_upload_that_cannot_be_made_is_one_error_before_anything_is_written(
    run: Path, hub: ModelHub, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories["me/public"] = {}
    dst = run.parent / "out"
    for token, repo, problem, fix in (
        ("hf_wrong", "me/public", "401 Invalid username or password.", "HF_TOKEN"),
        ("hf_wrong", "me/new", "401 Invalid username or password.", "hf auth login"),
        (TOKEN, "you/model", "403 You don't have the rights", "HF_TOKEN"),
        (TOKEN, "a/b/c", "Repo id must be in the form", "NAMESPACE/NAME"),
        (TOKEN, "me/public", "--private: me/public exists and is public", "another repository"),
    ):
        monkeypatch.setenv("HF_TOKEN", token)
        code, _, err = export(capsys, run, dst, "--push-to-hub", repo, "--private")
        assert code == 2 and err.count("dmt: ") == 1
        assert problem in err and fix in err and token not in err
        assert not dst.exists()
    assert "add --push-to-hub" in export(capsys, run, dst, "--private")[2]
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    code, _, err = export(capsys, run, dst, "--push-to-hub", REPO)
    assert code == 2 and "Connection refused" in err and "HF_ENDPOINT" in err


class TransformersAsVllm:
    """vLLM's interface: log-probabilities of the most likely tokens, and of each next token."""

    def __init__(self, model: str, **settings: Any) -> None:
        assert settings["dtype"] == "float32"
        self.model = Path(model)

    def generate(self, prompts: list[dict[str, list[int]]], sampling: Any, **_: Any) -> Any:
        tokens = torch.tensor([prompt["prompt_token_ids"] for prompt in prompts])
        for row, scores in zip(
            tokens, huggingface_logits(self.model, tokens).log_softmax(-1), strict=True
        ):
            entries: list[dict[int, Any] | None] = [None]
            for following, score in zip(row[1:].tolist(), scores[:-1], strict=True):
                likely = [*score.topk(sampling.prompt_logprobs).indices.tolist(), following]
                entries.append(
                    {token: SimpleNamespace(logprob=score[token].item()) for token in likely}
                )
            yield SimpleNamespace(prompt_logprobs=entries)


def test_logits_are_compared_with_those_of_another_program(
    run: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    dst = run.parent / "out"
    code, _, err = export(capsys, run, dst, "--compare-logits", "vllm")
    assert code == 3 and "vLLM is not installed" in err and " vllm, or" in err
    assert not dst.exists()
    assert export(capsys, run, dst, "--compare-logits", "transformers")[0] == 0
    from toolkit.checkpoint.logits import compare
    from toolkit.errors import RunFailed

    stand_in = SimpleNamespace(LLM=TransformersAsVllm, SamplingParams=SimpleNamespace)
    monkeypatch.setitem(__import__("sys").modules, "vllm", stand_in)
    checkpoint = run / "checkpoints" / "step-00000010"
    assert compare(checkpoint, dst, "vllm").max_abs_difference < 1e-5
    weights = load_file(dst / "model.safetensors")
    weights["model.norm.weight"] *= 1.1
    save_file(weights, dst / "model.safetensors", {"format": "pt"})
    with pytest.raises(RunFailed, match="its logits differ"):
        compare(checkpoint, dst, "vllm")
