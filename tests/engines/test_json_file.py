"""Reading a user's JSON: every mistake placed, nothing unbounded."""

import json
from pathlib import Path

import pytest

from toolkit.engines.deepspeed.json_file import JsonFile, read_json
from toolkit.errors import RecipeError
from toolkit.recipe.yaml_text import MAX_BYTES


def read(tmp_path: Path, content: str | bytes) -> JsonFile:
    path = tmp_path / "a.json"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_json(path)


def test_lines_of_nested_keys(tmp_path: Path) -> None:
    text = '{"a": 1,\n\t"b": {"c":\n [1, {"no": 2}],\n\n "a\\"{": {}},\n "d": "x: {\\u00e9"}'
    file = read(tmp_path, text)
    expected = {"a": 1, "b": 2, "b.c": 2, 'b.a"{': 5, "d": 6}
    assert file.lines.items() >= expected.items()
    assert file.values == json.loads(text)
    problem = str(file.problem("b.c", file.values["b"], "x"))
    assert problem.startswith(f"{file.path}:2: b.c: found {{")
    compact = read(tmp_path, json.dumps(file.values, separators=(",", ":")))
    assert (compact.values, set(compact.lines)) == (file.values, set(file.lines))


def test_a_repeated_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        read(tmp_path, '{"bf16": {"enabled": true},\n"x": 1,\n"bf16": {"enabled": false}}')
    (problem,) = caught.value.problems
    assert (problem.key, problem.line) == ("bf16", 3)
    assert "already stated on line 1" in problem.found


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
        (b" " * (MAX_BYTES + 1), "more than 262144 bytes"),
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
