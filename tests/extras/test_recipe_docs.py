"""The generated documentation lists the settings of the extras, too."""

from toolkit.recipe import docs


def test_document_is_current() -> None:
    current = docs.DOCUMENT.read_text(encoding="utf-8")
    assert current == docs.render(), "run python -m toolkit.recipe.docs"
