"""Count the product's lines of code: without docstrings, comments, blank lines and imports.

python docs/code_lines.py [COMMIT]     the working tree, or a commit
"""

import ast
import io
import subprocess
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = "exegpt xcore xsimulator xscheduler xprofiler xrunner kernels xserver xmulti".split()
IGNORED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def code_lines(source: str) -> int:
    """Count the lines of a module that hold code."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {line for token in tokens if token.type not in IGNORED for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(source)):
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if text or isinstance(node, (ast.Import, ast.ImportFrom)):
            lines.difference_update(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def sources(commit: str | None) -> dict[str, str]:
    """Return the text of each Python file of the product, reproductions of papers excepted."""
    listing = ["git", "ls-tree", "-r", "--name-only", commit] if commit else ["git", "ls-files"]
    names = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    product = [name for name in names if name.endswith(".py") and name.split("/")[0] in PACKAGES]
    product = [name for name in product if "/reproduction/" not in name and (commit or (ROOT / name).is_file())]
    if commit is None:
        return {name: (ROOT / name).read_text(encoding="utf-8") for name in product}
    shown = (
        subprocess.run(["git", "show", f"{commit}:{name}"], cwd=ROOT, check=True, capture_output=True)
        for name in product
    )
    return {name: result.stdout.decode() for name, result in zip(product, shown, strict=True)}


if __name__ == "__main__":
    counted = {name: code_lines(text) for name, text in sources(sys.argv[1] if sys.argv[1:] else None).items()}
    for package in PACKAGES:
        print(f"{package:12}{sum(n for name, n in counted.items() if name.split('/')[0] == package):8,}")
    print(f"{'total':12}{sum(counted.values()):8,}")
