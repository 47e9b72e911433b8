"""Runs on data in an S3 that fails: equal losses, no credential shown."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import s3fs

from tests.data import s3
from tests.data.s3 import KEY, SECRET, Store
from tests.e2e.conftest import Project
from tests.e2e.product import Ended, curve, dmt, run
from toolkit.data.formats.indexed import IndexedWriter

pytestmark = pytest.mark.slow

SHORT: Mapping[str, object] = {
    "training.steps": 4,
    "data.validation_fraction": 0,
    "checkpoint.export": "false",
    "data.cache": "cache-of-s3",
}
PREFIX = "s3://data/tokens/pretrain"


@pytest.fixture(scope="module")
def store(project: Project) -> Iterator[Store]:
    """A bucket with the tokens that `local-tokens` has in the project's folder."""
    rng = np.random.default_rng(0)
    prefix = project.folder / "local-tokens"
    with IndexedWriter(prefix, np.uint16) as writer:
        for _ in range(2000):
            writer.append(rng.integers(0, 256, 400))
            writer.end_document()
        writer.commit()
    with s3.running() as store:
        bucket = s3fs.S3FileSystem(
            key=KEY, secret=SECRET, endpoint_url=store.url, skip_instance_cache=True
        )
        bucket.mkdir("data")
        for ending in (".bin", ".idx"):
            content = prefix.with_name(prefix.name + ending).read_bytes()
            bucket.pipe(f"{PREFIX}{ending}", content)
        yield store


def environment(store: Store, **changes: str) -> dict[str, str]:
    quick = {"config_kwargs": {"read_timeout": 3, "connect_timeout": 3}}
    return {**store.environment, "FSSPEC_S3": json.dumps(quick), **changes}


def source(prefix: str) -> dict[str, object]:
    return {**SHORT, "data.train": json.dumps({"kind": "megatron", "prefix": prefix})}


def assert_no_credential(folder: Path, ended: Ended) -> None:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    for canary in (SECRET, KEY):
        assert not [path for path in files if canary.encode() in path.read_bytes()]
        assert canary not in ended.out + ended.err


def test_the_same_losses_although_reads_fail(project: Project, store: Store) -> None:
    ended = project.launch("local", source("local-tokens"))
    store.slow_s = 4.0
    store.failures.extend(["error", "cut", "", "error", "slow", "", "cut"])
    ended = project.launch("from-s3", source(PREFIX), env=environment(store))
    assert curve(project.folder / "from-s3") == curve(project.folder / "local")
    assert_no_credential(project.folder / "from-s3", ended)
    assert_no_credential(project.folder / "cache-of-s3", ended)


@pytest.mark.parametrize(
    ("changes", "prefix", "message"),
    [
        ({}, "s3://data/tokens/none", "there is no file s3://data/tokens/none.idx"),
        pytest.param(
            {"AWS_ENDPOINT_URL": f"http://user:{SECRET}@127.0.0.1:9"},
            PREFIX,
            f"cannot read {PREFIX}",
            marks=pytest.mark.soak,  # the library tries again for most of a minute
        ),
        ({}, f"s3://{KEY}:{SECRET}@data/tokens", "data.train"),
    ],
    ids=["missing", "login in the endpoint", "login in the URL"],
)
def test_one_error(
    project: Project, store: Store, changes: dict[str, str], prefix: str, message: str
) -> None:
    command = dmt(
        "data", "prepare", project.recipe, "--set", f"data.train={source(prefix)['data.train']}"
    )
    ended = run(command, project.folder, environment(store, **changes), code=2)
    assert message in ended.err
    assert "Traceback" not in ended.err
    assert SECRET not in ended.out + ended.err


def test_check_and_plan_ask_no_network(project: Project, store: Store) -> None:
    store.asked.clear()
    train = source(PREFIX)["data.train"]
    for verb in ("check", "plan"):
        run(
            dmt(verb, project.recipe, "--set", f"data.train={train}"),
            project.folder,
            environment(store),
            code=0,
        )
    assert not store.asked
