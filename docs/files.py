"""Write docs/files.md: every file of the product, with the first sentence of what it says of itself.

python docs/files.py
"""

import ast
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = "exegpt xcore xsimulator xscheduler xprofiler xrunner kernels xserver xmulti".split()
WIDTH = 120


def sentence(path: Path) -> str:
    """Return the first sentence of a module's docstring, on one line."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) (?=[A-Z`])", text)[0]


def lines(folder: Path) -> list[str]:
    """Return a folder's heading, its own sentence, and a line for each of its files."""
    name = folder.relative_to(ROOT)
    init = folder / "__init__.py"
    written = [f"## {name}/", ""]
    if init.is_file():
        written += [textwrap.fill(sentence(init), WIDTH, break_on_hyphens=False), ""]
    for path in sorted(set(folder.glob("*.py")) - {init}):
        item = f"* `{path.name}`: {sentence(path)}"
        written.append(textwrap.fill(item, WIDTH, subsequent_indent="  ", break_on_hyphens=False))
    return [*written, ""]


def index() -> str:
    """Return the index as Markdown."""
    folders = [
        folder for package in PACKAGES for folder in sorted({path.parent for path in (ROOT / package).rglob("*.py")})
    ]
    body = [line for folder in folders for line in lines(folder)]
    title = ["# Files", "", "Written by `python docs/files.py` from what each file says of itself.", ""]
    return "\n".join([*title, *body])


if __name__ == "__main__":
    (ROOT / "docs" / "files.md").write_text(index(), encoding="utf-8")
