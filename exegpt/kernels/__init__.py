"""The kernels, whose files lie in the repository's `kernels/` folder.

That folder has no `__init__.py` of its own: transformers looks for an unrelated package called `kernels` and must not
find it. A checkout and an editable installation reach it through the path below; a wheel holds the files here.
"""

from pathlib import Path

_beside = Path(__file__).resolve().parents[2] / "kernels"
if (_beside / "linear.py").is_file():
    __path__.append(str(_beside))
