"""A machine that lacks something, by real means: a bare PATH, packages that are not there."""

import shutil
from pathlib import Path

from tests.processes import ROOT

_HIDER = """
import sys

class Hider:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hider())
"""


def hiding(folder: Path, *names: str) -> dict[str, str]:
    """The environment in which Python and its children find no package of these names."""
    place = folder / "hidden"
    place.mkdir()
    (place / "sitecustomize.py").write_text(_HIDER.format(names=set(names)))
    return {"PYTHONPATH": f"{place}:{ROOT}"}


def bare_path(folder: Path, *programs: str) -> dict[str, str]:
    """The environment in which these are the only programs there are."""
    place = folder / "bin"
    place.mkdir()
    for program in programs:
        found = shutil.which(program)
        assert found is not None, program
        (place / program).symlink_to(found)
    return {"PATH": str(place)}
