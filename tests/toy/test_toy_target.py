"""A foreign format of another package, written and read by its entry point alone."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.product import Ended, succeeded

pytestmark = pytest.mark.slow


@pytest.mark.quick
def test_what_is_rendered_agrees_and_a_changed_value_does_not(
    with_toys: Callable[..., Ended], tmp_path: Path
) -> None:
    rendered = with_toys({}, "render", "--to", "toy-json", "--out", "toy.json")
    succeeded(rendered)
    assert "# toys have no schedule" in rendered.err
    file = tmp_path / "toy.json"
    assert json.loads(file.read_text()).keys() == {"toy_steps", "toy_rate_per_mille"}
    same = with_toys({}, "check", "--against", "toy.json")
    assert "toy settings: 2 settings stated in both places, 0 disagree" in succeeded(same)
    file.write_text(json.dumps({**json.loads(file.read_text()), "toy_steps": 99999}))
    changed = with_toys({}, "check", "--against", "toy.json")
    assert changed.code == 2
    assert "--set training.steps=99999, or change toy_steps at" in changed.out
