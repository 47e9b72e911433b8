"""The pictures of README and docs/, from the product itself.

    python docs/pictures.py diagrams mermaid.min.js    # of every mermaid block in docs/
    python docs/pictures.py terminal NAME WORDS …      # what `dmt WORDS` prints, as SVG
    python docs/pictures.py page NAME FILE.html        # an HTML page in Chromium, as PNG

They are written to docs/pictures/. mermaid.min.js is in the package `mermaid` of the npm
registry (`npm pack mermaid`); the committed pictures are version 11.16's. Diagrams and pages
need Chromium, its driver and selenium, pages also pillow.
"""

import argparse
import base64
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from hooks import DIAGRAM, picture_of

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

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


@contextmanager
def chromium() -> Iterator["Chrome"]:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    for switch in ("headless=new", "no-sandbox", "disable-gpu", "hide-scrollbars"):
        options.add_argument(f"--{switch}")
    options.add_argument("--force-device-scale-factor=1")
    options.add_argument("--window-size={},{}".format(*PAGE))
    options.binary_location = str(which("chromium"))
    service = webdriver.ChromeService(which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    try:
        yield driver
    finally:
        driver.quit()


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
    with TemporaryDirectory() as folder, chromium() as driver:
        page = Path(folder, "page.html")
        page.write_text(
            f'<meta charset=utf-8><script src="{mermaid.resolve().as_uri()}"></script>'
        )
        driver.get(page.as_uri())
        for name, text in diagrams.items():
            svg = driver.execute_async_script(
                f"""const [text, done] = arguments; mermaid.initialize({{{settings}}});
                mermaid.render('diagram', text).then(
                    (drawn) => done(drawn.svg), (error) => done('' + error));""",
                text,
            )
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


def draw_page(name: str, file: Path, top: int) -> None:
    """The part of a page that a reader sees first, or `top` pixels below that."""
    from PIL import Image

    with chromium() as driver:
        driver.get(file.resolve().as_uri())
        size = {"width": PAGE[0], "height": PAGE[1], "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        driver.execute_async_script(
            """const [top, done] = arguments; scrollTo(0, top);
            requestAnimationFrame(() => requestAnimationFrame(done));""",
            top,
        )
        shot = base64.b64decode(driver.get_screenshot_as_base64())
    image = Image.open(io.BytesIO(shot)).convert("RGB")
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
    page.add_argument("--top", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.kind == "diagrams":
        draw_diagrams(arguments.mermaid)
    elif arguments.kind == "terminal":
        draw_terminal(arguments.name, arguments.words, arguments.lines)
    else:
        draw_page(arguments.name, arguments.file, arguments.top)


if __name__ == "__main__":
    main()
