"""The kernels, whose files are in the repository's `kernels/` folder.

That folder has no `__init__.py`: transformers looks for an unrelated package called `kernels` and must not find it. A
checkout and an editable installation use the path below; in a wheel, the files are in this folder.
"""

from pathlib import Path

_beside = Path(__file__).resolve().parents[2] / "kernels"
if (_beside / "linear.py").is_file():
    __path__.append(str(_beside))
