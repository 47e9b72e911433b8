"""Files for people and tools around the code: they parse, agree with it and lead somewhere."""

import re
import tomllib
from typing import Any
from urllib.parse import urlparse

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from ruamel.yaml import YAML

import toolkit
from tests.processes import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DOCKERFILE = ROOT / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """Of the Dockerfile: name and arguments, continued lines joined."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    split = (line.partition(" ") for line in lines if line.strip())
    return [(name, " ".join(rest.split())) for name, _, rest in split]


def test_the_image() -> None:
    """An official image whose torch we support, no root, `dmt doctor`."""
    steps = instructions()
    names = [name for name, _ in steps]
    assert {*names} <= {"ARG", "FROM", "RUN", "COPY", "ENV", "USER", "WORKDIR", "CMD"}
    assert steps[1] == ("FROM", "${BASE}") and steps[-1] == ("CMD", '["dmt", "doctor"]')
    (torch,) = re.findall(r"^BASE=pytorch/pytorch:([\d.]+)-cuda", steps[0][1])
    (bound,) = (one for one in map(Requirement, PROJECT["dependencies"]) if one.name == "torch")
    assert torch in bound.specifier
    user = next(rest for name, rest in reversed(steps) if name == "USER")
    assert user.isdecimal() and int(user) > 0 and names.index("USER") > names.index("COPY")


def test_the_lock() -> None:
    """From PyPI alone, at versions within our bounds."""
    text = (ROOT / "uv.lock").read_text(encoding="utf-8")
    hosts = {urlparse(url).netloc for url in re.findall(r'"(https?://[^"]+)"', text)}
    assert hosts == {"pypi.org", "files.pythonhosted.org"}
    packages: dict[str, list[str]] = {}
    for one in tomllib.loads(text)["package"]:
        packages.setdefault(one["name"], []).append(one.get("version", ""))
    assert PROJECT["name"] in packages
    extras = (
        lines
        for name, lines in PROJECT["optional-dependencies"].items()
        if name not in ("dev", "docs")
    )
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in extra)]
    for requirement in map(Requirement, lines):
        locked = packages[canonicalize_name(requirement.name)]
        assert all(version in requirement.specifier for version in locked), requirement


def read(path: str) -> Any:
    return YAML(typ="safe", pure=True).load((ROOT / path).read_text(encoding="utf-8"))


def test_templates_and_citation() -> None:
    citation = read("CITATION.cff")
    assert citation["version"] == toolkit.__version__ and citation["license"] == "Apache-2.0"
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    assert len(forms) == 4
    for form in forms:
        if form.name != "config.yml":
            fields = read(str(form.relative_to(ROOT)))
            assert {"name", "description", "body"} == {*fields}
            kinds = {one["type"] for one in fields["body"]}
            assert kinds <= {"input", "textarea", "dropdown", "checkboxes", "markdown"}
