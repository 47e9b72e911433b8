"""Reading a user's JSON: every mistake placed, nothing unbounded."""

from pathlib import Path

import pytest

from toolkit.engines.deepspeed.json_file import JsonFile, read_json
from toolkit.errors import RecipeError


def read(tmp_path: Path, content: str | bytes) -> JsonFile:
    path = tmp_path / "a.json"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_json(path)


def test_lines_of_nested_keys(tmp_path: Path) -> None:
    text = '{"a": 1,\n "b": {"c":\n [1, {"no": 2}],\n\n "a\\"{": {}},\n "d": "x: {"}'
    path = tmp_path / "a.json"
    path.write_text(text)
    file = read_json(path)
    lines = {"a": 1, "b": 2, "b.c": 2, 'b.a"{': 5, "d": 6}
    assert file.lines.items() >= lines.items()
    assert str(file.problem("b.c", file.values["b"], "x")).startswith(
        f"{path}:2: b.c: found {{"
    )


def test_an_emoji_that_is_escaped_as_two_surrogates(tmp_path: Path) -> None:
    """As `json.dumps` writes it; one surrogate alone cannot be stored."""
    assert read(tmp_path, '{"group": "\\ud83d\\ude80"}').values == {"group": "🚀"}
    with pytest.raises(RecipeError, match="group: found the character"):
        read(tmp_path, '{"group": "\\ud83d"}')


def test_a_repeated_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        read(tmp_path, '{"bf16": {"enabled": true},\n"x": 1,\n"bf16": {"enabled": false}}')
    assert [(p.key, p.line) for p in caught.value.problems] == [("bf16", 3)]
    assert "already stated on line 1" in caught.value.problems[0].found


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
        (b" " * 300_000, "more than 262144 bytes"),
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
