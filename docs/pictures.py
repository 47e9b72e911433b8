"""The pictures of README and docs/, from the product itself.

    python docs/pictures.py diagrams mermaid.min.js    # of every mermaid block in docs/
    python docs/pictures.py terminal NAME WORDS …      # what `dmt WORDS` prints, as SVG
    python docs/pictures.py page NAME FILE.html        # an HTML page in Chromium, as PNG

They are written to docs/pictures/. mermaid.min.js is in the package `mermaid` of the npm
registry (`npm pack mermaid`); the committed pictures are version 11.16's. Diagrams and pages
need Chromium, pages also pillow.
"""

import argparse
import io
import json
import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from tempfile import TemporaryDirectory

from hooks import DIAGRAM, picture_of

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
COLUMNS = 96
"""Of the terminal."""
PAGE = (1200, 860)
"""Width and height of the part of a page that is shown."""
COLOURS = 96
"""Of a PNG, which is a drawing and no photograph."""
MERMAID = {
    "startOnLoad": "false",
    "theme": "'neutral'",
    "htmlLabels": "false",
    "flowchart": "{htmlLabels: false}",
    "themeCSS": "'.edgeLabel rect { opacity: 1; fill: #fff }'",
    "fontFamily": "'system-ui, sans-serif'",
}


def chromium(page: Path, *switches: str) -> str:
    """What headless Chromium prints for a page."""
    command = [
        "chromium",
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
    ]
    command += ["--virtual-time-budget=10000", *switches, page.resolve().as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def draw_diagrams(mermaid: Path) -> None:
    """A picture of every diagram; pictures of diagrams that are no more are removed."""
    pages = (ROOT / "docs").rglob("*.md")
    diagrams = {
        picture_of(text): text
        for page in pages
        for text in DIAGRAM.findall(page.read_text(encoding="utf-8"))
    }
    for file in PICTURES.glob("diagram-*.svg"):
        if file.name not in diagrams:
            file.unlink()
    settings = ", ".join(f"{key}: {value}" for key, value in MERMAID.items())
    with TemporaryDirectory() as folder:
        page = Path(folder, "page.html")
        for name, text in diagrams.items():
            drawing = f"mermaid.render('diagram', {json.dumps(text)})"
            page.write_text(
                f'<meta charset=utf-8><script src="{mermaid.resolve().as_uri()}"></script>'
                f"<body><script>mermaid.initialize({{{settings}}}); {drawing}"
                ".then((drawn) => { document.body.textContent = drawn.svg })</script>"
            )
            shown = chromium(page, "--dump-dom").partition("<body>")[2]
            svg = unescape(shown.partition("</body>")[0])
            if not svg.startswith("<svg"):
                sys.exit(f"{name}: {svg}")
            (PICTURES / name).write_text(svg.replace("<br>", "<br/>") + "\n", encoding="utf-8")


def draw_terminal(name: str, words: list[str], lines: int | None) -> None:
    """Run `dmt` and draw what it prints, with the command above it."""
    from rich.console import Console
    from rich.terminal_theme import MONOKAI
    from rich.text import Text

    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(COLUMNS)}
    program = Path(sys.executable).with_name("dmt")
    done = subprocess.run([program, *words], env=environment, stdout=subprocess.PIPE, text=True)
    printed = done.stdout.rstrip().splitlines()[:lines]
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), color_system="truecolor")
    console.print(Text("$ dmt " + " ".join(words), style="bold"))
    console.print(Text.from_ansi("\n".join(printed)))
    svg = console.export_svg(title="dmt", theme=MONOKAI, unique_id=name)
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # of another server
    svg = svg.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace")
    text = "\n".join(line.rstrip() for line in svg.splitlines() if line.strip())
    (PICTURES / f"{name}.svg").write_text(text + "\n", encoding="utf-8")


def draw_page(name: str, file: Path) -> None:
    """The part of a page that a reader sees first."""
    from PIL import Image

    with TemporaryDirectory() as folder:
        shot = Path(folder, "page.png")
        chromium(file, f"--screenshot={shot}", "--window-size={},{}".format(*PAGE))
        image = Image.open(shot).convert("RGB")
    image.quantize(COLOURS).save(PICTURES / f"{name}.png", optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    kinds.add_parser("diagrams").add_argument("mermaid", type=Path)
    terminal = kinds.add_parser("terminal")
    terminal.add_argument("name")
    terminal.add_argument("--lines", type=int, help="only the first ones")
    terminal.add_argument("words", nargs=argparse.REMAINDER)
    page = kinds.add_parser("page")
    page.add_argument("name")
    page.add_argument("file", type=Path)
    arguments = parser.parse_args()
    if arguments.kind == "diagrams":
        draw_diagrams(arguments.mermaid)
    elif arguments.kind == "terminal":
        draw_terminal(arguments.name, arguments.words, arguments.lines)
    else:
        draw_page(arguments.name, arguments.file)


if __name__ == "__main__":
    main()
