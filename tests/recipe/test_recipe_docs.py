"""The table of foreign names follows the schema."""

from toolkit.recipe.foreign import carried, foreign, foreign_names, foreign_values
from toolkit.recipe.words import settings


def test_foreign_names_lead_to_settings() -> None:
    assert len(foreign_names()) >= 60
    for name, entry in foreign_names().items():
        assert entry.target is None or entry.target in settings(), name
        assert entry.advice, name
    for name, target in carried().items():
        assert target in settings(), name


def test_foreign_names_are_not_our_own() -> None:
    own = {path.rpartition(".")[2] for path in settings()}
    assert not own & foreign_names().keys()


def test_foreign_spelling_does_not_matter() -> None:
    named = foreign("--tensor-model-parallel-size")
    assert named == foreign("tensor_model_parallel_size") and named is not None
    assert named.target == "parallel.tensor"


def test_foreign_values_lead_to_values() -> None:
    for path, words in foreign_values().items():
        for word in words.values():
            assert word in settings()[path].allowed, (path, word)
