"""What importing the kernels costs where there is no GPU."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_cpus_kernels_do_not_import_triton():
    names = [path.stem for path in sorted((ROOT / "kernels").glob("*.py")) if not path.stem.endswith("gpu")]
    assert len(names) > 10
    code = (
        "import gc, sys\ngc.disable()  # imports take a fifth of their time for it\n"
        + "".join(f"import exegpt.kernels.{name}\n" for name in names)
        + "assert 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=110)
