"""What the site changes in the pages, which are written for reading in the repository, too.

- A mermaid diagram becomes the picture that `python docs/pictures.py diagrams` drew of
  it, so that the site needs no script of another server. One without a picture is a warning.
- The Markdown of each page stays next to it: llms.txt names it, for agents.
- A link to a file outside of docs/ becomes that file's name: the site does not have it.
"""

import logging
import re
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

LOG = logging.getLogger("mkdocs.hooks.pictures")
DIAGRAM = re.compile(r"^```mermaid\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LABEL = re.compile(r'\["([^"]+)"\]')
OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+([^)\s]+)\)")
CODE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)


def picture_of(diagram: str) -> str:
    """The name of the picture of a diagram, which changes with it."""
    return f"diagram-{sha256(diagram.encode()).hexdigest()[:8]}.svg"


def on_page_markdown(markdown: str, *, page: Any, files: Any, **_: Any) -> str:
    def picture(found: re.Match[str]) -> str:
        name = f"pictures/{picture_of(found[1])}"
        if files.get_file_from_path(name) is None:
            LOG.warning("%s: no %s; python docs/pictures.py diagrams", page.file.src_uri, name)
        up = "../" * page.file.src_uri.count("/")
        labels = ", ".join(re.sub("<br>", " ", one) for one in LABEL.findall(found[1]))
        return f"![Diagram of {labels}]({up}{name})"

    def named(found: re.Match[str]) -> str:
        text, path = found[1], found[2]
        return f"`{path}`" if path in text else f"{text} (`{path}` in the repository)"

    parts = CODE.split(DIAGRAM.sub(picture, markdown))
    depth = page.file.src_uri.count("/")
    if depth == 0:
        parts[::2] = [OUTSIDE.sub(named, part) for part in parts[::2]]
    return "".join(parts)


def on_post_page(output: str, **_: Any) -> str:
    """Name the theme's search, which a screen reader would not announce without."""
    return output.replace('role="dialog"', 'role="dialog" aria-label="Search"')


def on_post_build(config: Any) -> None:
    """Copy the Markdown of the pages."""
    docs, site = Path(config.docs_dir), Path(config.site_dir)
    for page in docs.rglob("*.md"):
        shutil.copyfile(page, site / page.relative_to(docs))
