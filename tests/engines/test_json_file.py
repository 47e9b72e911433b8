"""Reading a user's JSON: every mistake placed, nothing unbounded."""

import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.engines.deepspeed.json_file import MAX_BYTES, _stated_keys, read_json
from toolkit.errors import RecipeError


def read(tmp_path: Path, content: str | bytes) -> object:
    path = tmp_path / "a.json"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_json(path)


def test_lines_of_nested_keys(tmp_path: Path) -> None:
    text = '{"a": 1,\n "b": {"c":\n [1, {"no": 2}],\n\n "a\\"{": {}},\n "d" \n : "x: {"}'
    path = tmp_path / "a.json"
    path.write_text(text)
    file = read_json(path)
    assert file.lines == {"a": 1, "b": 2, "b.c": 2, 'b.a"{': 5, "d": 7}
    assert str(file.problem("b.c", file.values["b"], "x")).startswith(
        f"{path}:2: b.c: found {{"
    )


def test_a_repeated_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        read(tmp_path, '{"bf16": {"enabled": true},\n"x": 1,\n"bf16": {"enabled": false}}')
    assert [(p.key, p.line) for p in caught.value.problems] == [
        ("bf16", 3),
        ("bf16.enabled", 3),
    ]
    assert "first in line 1" in caught.value.problems[0].found


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ('{\n "a": 1,\n "b" 2}', "a.json:3: "),
        ('{"a": 1, // comment\n}', "a.json:1: "),
        ("", "a.json:1: "),
        ("[1]", "list"),
        ('{"a": NaN}', "NaN is not a JSON number"),
        ('{"a": 1' + "0" * 5000 + "}", "digits"),
        ('{"a": ' + "[" * 200_000, "nested more than 64 levels"),
        (b'{"a": "\xff"}', "utf-8"),
        (b" " * (MAX_BYTES + 1), "more than 1000000 bytes"),
    ],
)
def test_unreadable_files(tmp_path: Path, content: str | bytes, found: str) -> None:
    with pytest.raises(RecipeError) as caught:
        read(tmp_path, content)
    assert found in str(caught.value)


def test_folders_and_strange_paths(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.json", tmp_path / ("x" * 300), Path("a\0.json")):
        with pytest.raises(RecipeError):
            read_json(path)


def test_a_large_file_is_read_quickly(tmp_path: Path) -> None:
    start = time.monotonic()
    read(tmp_path, json.dumps({f"key {n}": "x" * 50 for n in range(10_000)}))
    assert time.monotonic() - start < 30  # 0.02 s; hours where it is quadratic


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), JSON, max_size=4), st.sampled_from([None, 0, 1]))
def test_every_key_outside_lists_is_found(
    values: dict[str, object], indent: int | None
) -> None:
    def keys(value: object, prefix: tuple[str, ...] = ()) -> list[str]:
        if not isinstance(value, dict):
            return []
        return [
            found
            for name, inner in value.items()
            for found in (".".join((*prefix, name)), *keys(inner, (*prefix, name)))
        ]

    text = json.dumps(values, indent=indent)
    stated = list(_stated_keys(text))
    assert [key for key, _ in stated] == keys(values)
    assert all(1 <= line <= text.count("\n") + 1 for _, line in stated)
