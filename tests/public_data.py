"""Where public measurements lie, for tests that hold against them; they are skipped where the data are absent."""

import os
from pathlib import Path

import pytest

DATA = Path(os.environ.get("EXEGPT_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))


def needs_data(*parts: str) -> Path:
    """A path under the data folder; skips the test that asks where there is nothing there."""
    path = DATA.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"public data are not here: {path}")
    return path
