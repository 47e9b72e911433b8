"""Whatever lies where a file of ours should be, no code of it runs.

DeepSpeed's `.pt` files, Megatron's `.metadata` and torch's `.distcp` ran code in it.
"""

import ast
import io
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoint.making import MODEL, saved_run, write_recipe
from tests.checkpoint.payloads import Canary, check_refused, nested, pickled, zipped
from tests.models.small import filled
from toolkit.checkpoint.export import export
from toolkit.checkpoint.manifest import Manifest
from toolkit.checkpoint.saved_state import SavedState
from toolkit.checkpoint.verify import verify
from toolkit.cli.main import main
from toolkit.data.indexed import write_indexed
from toolkit.data.tokenized import prepare
from toolkit.data.tokenizers import byte_tokenizer, load_tokenizer
from toolkit.errors import DataError, PlanError
from toolkit.intake.load import load_recipe
from toolkit.models import huggingface as hf
from toolkit.models.families.tensors import Block
from toolkit.models.hub import model_config as plan_model_config
from toolkit.recipe.schema import MegatronSource, ModelSection
from toolkit.run import jsonl
from toolkit.run.assignment import decide, read_assignment, write
from toolkit.run.trackers import Posted

TOOLKIT = Path(verify.__code__.co_filename).parents[1]


@pytest.fixture(params=[pickled, zipped])
def payload(request: pytest.FixtureRequest, tmp_path: Path) -> bytes:
    """A malicious file."""
    return bytes(request.param(Canary(tmp_path / "canary")))


def test_the_canary_is_one(payload: bytes, tmp_path: Path) -> None:
    """What these tests look for does happen to those who unpickle."""
    try:
        pickle.loads(payload)
    except pickle.UnpicklingError:
        torch.load(io.BytesIO(payload), weights_only=False)
    assert (tmp_path / "canary").exists()


# --- every kind of file, through what opens it --------------------------------------------


CHECKPOINT = "run/checkpoints/step-00000005"
Load = Callable[[], Any]


def a_checkpoint(folder: Path) -> Path:
    return saved_run(folder, 5) / "checkpoints" / "step-00000005"


def a_state(folder: Path) -> Load:
    checkpoint = a_checkpoint(folder)
    norm = Block("model.norm.weight", (0, 64), None, False)
    return lambda: SavedState(checkpoint).read("weight", norm)


def a_manifest(folder: Path) -> Load:
    checkpoint = a_checkpoint(folder)
    return lambda: Manifest.read(checkpoint)


def an_export(folder: Path) -> Load:
    checkpoint = a_checkpoint(folder)
    return lambda: export(checkpoint, folder / "out")


def a_tokenizer(folder: Path) -> Load:
    checkpoint = a_checkpoint(folder)
    return lambda: load_tokenizer(str(checkpoint / "hf"))


def a_model(folder: Path) -> Load:
    """A Hugging Face folder, and what reads its weights."""
    filled(MODEL).save_pretrained(folder / "model")
    section = ModelSection(hub=str(folder / "model"), init="pretrained")

    def load() -> Any:
        return hf.weight_source(section, hf.build_config(section), seed=1)

    load()  # before it is tampered with
    return load


def without_safetensors(folder: Path) -> Load:
    load = a_model(folder)
    (folder / "model" / "model.safetensors").unlink()
    return load


def indexed(folder: Path) -> Load:
    write_indexed(folder / "data", np.int32, [[1, 2, 3]])
    source = MegatronSource(kind="megatron", prefix=str(folder / "data"))
    return lambda: prepare(source, byte_tokenizer(), cache=folder / "cache")


def a_run(folder: Path) -> Load:
    path = write_recipe(folder)
    changes = ["parallel.engine=deepspeed", "parallel.zero.stage=1"]
    write(decide(load_recipe(path, changes), folder / "run"), ["dmt"])
    return lambda: read_assignment(folder / "run", 1)


def users_deepspeed_file(folder: Path) -> Load:
    own = folder / "own.json"
    shutil.copy(TOOLKIT / "ds_configs" / "zero1.json", own)
    changes = ["parallel.engine=deepspeed", f"parallel.zero.config={own}"]
    return lambda: decide(load_recipe(write_recipe(folder), changes), folder / "run")


REFUSED: dict[str, Callable[[Path], Load]] = {
    f"{CHECKPOINT}/state-00000.safetensors": a_state,
    f"{CHECKPOINT}/index.json": a_state,
    f"{CHECKPOINT}/manifest.json": a_manifest,
    f"{CHECKPOINT}/hf/config.json": an_export,
    f"{CHECKPOINT}/hf/tokenizer.json": a_tokenizer,
    f"{CHECKPOINT}/hf/tokenizer_config.json": a_tokenizer,
    "model/model.safetensors": a_model,
    "model/model.safetensors.index.json": a_model,
    "model/config.json": a_model,
    "model/pytorch_model.bin": without_safetensors,
    "data.idx": indexed,
    "data.bin": indexed,
    "run/plan.json": a_run,
    "run/deepspeed.json": a_run,
    "run/recipe.yaml": a_run,
    "own.json": users_deepspeed_file,
}
"""By file: what writes it, and returns what opens it."""


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, payload: bytes, tmp_path: Path) -> None:
    load = REFUSED[name](tmp_path)
    if REFUSED[name] is not without_safetensors:
        load()  # what is refused afterwards is the payload
    check_refused(tmp_path / name, load, payload)
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("name", REFUSED)
def test_deeply_nested_json_is_refused(name: str, tmp_path: Path) -> None:
    """The JSON reader of Python raises RecursionError, which is no ValueError."""
    check_refused(tmp_path / name, REFUSED[name](tmp_path), nested(100_000).encode())


def test_nesting_that_a_reader_can_bear_is_refused_too(tmp_path: Path) -> None:
    """Copying it would exhaust the stack later."""
    load, file = a_model(tmp_path), tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"id2label": json.loads(nested(300))}))
    with pytest.raises(DataError, match="nested more than 64 levels deep"):
        load()
    with pytest.raises(PlanError, match="nested more than 64 levels deep"):
        plan_model_config(ModelSection(hub=str(file.parent)))
    (tmp_path / "a.jsonl").write_text(f'{nested(100_000)}\n{{"kind": "save"}}\n')
    assert jsonl.read(tmp_path / "a.jsonl") == [{"kind": "save"}]


def test_logs_are_lines_of_json_or_nothing(payload: bytes, tmp_path: Path) -> None:
    """A torn line is passed over, and so is anything that is no JSON."""
    (tmp_path / "events.jsonl").write_bytes(payload + b'\n{"kind": "save"}\n')
    assert jsonl.read(tmp_path / "events.jsonl") == [{"kind": "save"}]
    (tmp_path / "wandb.json").write_bytes(payload)
    assert Posted.load(tmp_path / "wandb.json") is None
    assert not (tmp_path / "canary").exists()


def test_yaml_makes_no_objects(tmp_path: Path) -> None:
    path = write_recipe(tmp_path)
    attack = f'!!python/object/apply:os.system ["touch {tmp_path}/canary"]'
    path.write_text(path.read_text().replace("name: small", f"name: {attack}"))
    assert main(["check", str(path)]) == 2
    assert not (tmp_path / "canary").exists()


# --- repositories with code ---------------------------------------------------------------


def test_a_model_with_code_of_its_own_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would ask on the terminal whether to run it."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asks"))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')\n")
    auto_map = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    config = {"model_type": "own", "auto_map": auto_map}
    (tmp_path / "config.json").write_text(json.dumps(config))
    told = "does not run code that comes with a model"
    with pytest.raises(DataError, match=told):
        hf.build_config(ModelSection(hub=str(tmp_path), init="pretrained"))
    tokenizer = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.T", "own.T"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    with pytest.raises(DataError, match=told):
        load_tokenizer(str(tmp_path))
    assert not (tmp_path / "canary").exists()


# --- the source ---------------------------------------------------------------------------


def calls(tree: ast.AST) -> list[tuple[str, dict[str, str]]]:
    """Every call as `object.method`, with its keyword arguments."""
    return [
        (ast.unparse(node.func), {str(k.arg): ast.unparse(k.value) for k in node.keywords})
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    ]


def test_nothing_here_unpickles() -> None:
    for path in sorted(TOOLKIT.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imported = {
            name.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in node.names
        }
        imported |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        if path.name != "torch_dist.py":
            assert not imported & {"pickle", "dill", "cloudpickle", "marshal", "shelve"}, path
        for function, keywords in calls(tree):
            assert function not in ("pickle.load", "pickle.loads"), path
            if function == "torch.load":
                assert keywords["weights_only"] == "True", path
            if function in ("np.load", "numpy.load"):
                assert keywords.get("allow_pickle", "False") == "False", path
            if function.endswith(("from_pretrained", ".from_config")) and "Auto" in function:
                assert keywords["trust_remote_code"] == "False", path
