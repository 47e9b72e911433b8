"""Seeded, spoilt recipes: only RecipeError, in bounded time and memory, no code run."""

import importlib
import random
import resource
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from toolkit.errors import RecipeError
from toolkit.intake.load import load_recipe

GOOD = """\
name: good
model:
  config: {model_type: gpt2, n_embd: 64, n_head: 4}
data:
  train:
    kind: text
    files: ["{stdlib}/*.py"]
  tokenizer: bytes
training:
  steps: 100
  sequence_length: 64
  global_batch_size: 8
optimizer:
  learning_rate: 3e-4
  betas: [0.9, 0.95]
schedule:
  name: cosine
  warmup_steps: 10
parallel:
  zero: {stage: 2}
"""
"""Short, because most of a case's time goes into reading it."""
CASES = 2_000
LIMIT_S = 600
"""Processor time of so many; 20 s on a quiet machine."""
CASE_LIMIT_S = 30.0
MEMORY_LIMIT_BYTES = 200 * 2**20

TOKENS = [
    "!!python/object/apply:os.system [touch {canary}]",
    "!!python/object/new:subprocess.Popen [[touch, {canary}]]",
    "!!python/name:os.system",
    "!!python/module:os",
    "!<tag:yaml.org,2002:python/object/apply:os.system> ['touch {canary}']",
    "!!set {a, b}", "!!binary aGVsbG8=", "!!timestamp 2026-01-01", "!!omap [a: 1]",
    "&a [*a]", "*undefined", "&x", "*x", "<<: {a: 1}", "<<: *x", "? [complex]", "? {a: b}",
    ".nan", ".inf", "-.inf", "1e999", "9" * 400, "9" * 5000, "0x" + "f" * 300, "-0", "0o8",
    "1_000", "1:30", "true", "yes", "null", "~", "''", '"\\ud800"', '"\\0"', '"\\x"', "'",
    '"', "[" * 40, "{" * 40, "]" * 5, "}" * 5, "- " * 60, "[" * 300, "---", "...", "%YAML 1.1",
    "%TAG ! tag:x,2000:", "|", ">", "|9", ">-", "@", "`", "\t", "\0", "\x07", "\x85", "\u2028",
    "\ufeff", "日本語", "🚀", "\u202e", "é" * 100, "#", ": ", "a: b: c", "extends: recipe.yaml",
    "extends: missing.yaml", "extends: /dev/zero", "extends: {a: b}", "kind: megatron",
    "model_type: gpt2", "kind: [1]", "  " * 50, "x" * 5000,
]  # fmt: skip


def flip_bytes(text: bytes, rng: random.Random) -> bytes:
    data = bytearray(text)
    for _ in range(rng.randint(1, 8)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def cut(text: bytes, rng: random.Random) -> bytes:
    start, end = sorted(rng.randrange(len(text)) for _ in range(2))
    return text[:start] + text[end:]


def insert_token(text: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(text))
    return text[:at] + rng.choice(TOKENS).encode("utf-8", "surrogatepass") + text[at:]


def replace_value(text: bytes, rng: random.Random) -> bytes:
    lines = text.decode("utf-8", "replace").split("\n")
    index = rng.randrange(len(lines))
    key, _, _ = lines[index].partition(":")
    lines[index] = f"{key}: {rng.choice(TOKENS)}"
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def move_lines(text: bytes, rng: random.Random) -> bytes:
    lines = text.split(b"\n")
    for _ in range(rng.randint(1, 4)):
        line = lines.pop(rng.randrange(len(lines)))
        lines.insert(rng.randrange(len(lines) + 1), b" " * rng.randrange(6) + line.strip())
    return b"\n".join(lines)


def swap_values(text: bytes, rng: random.Random) -> bytes:
    lines = text.split(b"\n")
    one, two = rng.randrange(len(lines)), rng.randrange(len(lines))
    (key_one, _, value_one), (key_two, _, value_two) = (
        line.partition(b":") for line in (lines[one], lines[two])
    )
    lines[one], lines[two] = key_one + b":" + value_two, key_two + b":" + value_one
    return b"\n".join(lines)


def laughs(text: bytes, rng: random.Random) -> bytes:
    depth, width = rng.randint(2, 12), rng.randint(2, 12)
    rows = ["l0: &l0 [x]"]
    rows += [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * width)}]" for i in range(1, depth)]
    return "\n".join(rows).encode() + b"\n" + text


MUTATIONS: list[Callable[[bytes, random.Random], bytes]] = [
    flip_bytes, cut, insert_token, insert_token, replace_value, replace_value, move_lines,
    swap_values, laughs,
]  # fmt: skip


def _peak_memory_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.slow
def test_spoilt_recipes(tmp_path: Path) -> None:
    load_spoilt(tmp_path, seed=20_240_607, cases=400)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
def test_many_more_spoilt_recipes(tmp_path: Path, seed: int) -> None:
    load_spoilt(tmp_path, seed)


def load_spoilt(tmp_path: Path, seed: int, cases: int = CASES) -> None:
    """Load mutations of a good recipe: RecipeError or a Recipe, nothing else."""
    rng = random.Random(seed)
    path, canary = tmp_path / "recipe.yaml", tmp_path / "canary"
    good = 0
    importlib.import_module("transformers.modeling_utils")  # for families that DMT lacks
    memory = _peak_memory_bytes()
    begin = time.process_time()
    for case in range(cases):
        text = GOOD.encode()
        for _ in range(rng.randint(1, 3)):
            text = rng.choice(MUTATIONS)(text or b"\n", rng)
        path.write_bytes(text.replace(b"{canary}", str(canary).encode()))
        case_begin = time.process_time()
        try:
            load_recipe(path)
            good += 1
        except RecipeError as error:
            assert error.problems, case
            assert all(problem.fix and problem.key for problem in error.problems), case
            assert "Traceback" not in str(error)
        assert time.process_time() - case_begin < CASE_LIMIT_S, case
    assert not canary.exists()
    assert _peak_memory_bytes() - memory < MEMORY_LIMIT_BYTES
    assert time.process_time() - begin < LIMIT_S
    assert 0 < good < cases / 2, "the mutations are too mild or too wild"


def test_spoilt_overrides(tmp_path: Path) -> None:
    rng = random.Random(7)
    path, canary = tmp_path / "recipe.yaml", tmp_path / "canary"
    path.write_text(GOOD)
    keys = [
        "training.steps",
        "data.train",
        "parallel.zero",
        "name",
        "",
        "a.b.c.d",
        "model.config",
    ]
    for _ in range(150):
        value = rng.choice(TOKENS).replace("{canary}", str(canary))
        try:
            load_recipe(path, [f"{rng.choice(keys)}={value}", value])
        except RecipeError as error:
            assert error.problems
    assert not canary.exists()
