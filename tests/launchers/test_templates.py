"""The jobs in `launch/` are what the launchers write today."""

import pytest

from toolkit.launchers.templates import FILES, ROOT, text_of


@pytest.mark.parametrize("launcher", FILES)
def test_the_file_is_current(launcher: str) -> None:
    name, _ = FILES[launcher]
    assert (ROOT / name).read_text() == text_of(launcher), (
        "python -m toolkit.launchers.templates"
    )
    assert str(ROOT) not in text_of(launcher)
