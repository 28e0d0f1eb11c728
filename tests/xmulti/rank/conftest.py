"""The runner's tiny models."""

from tests.xrunner.conftest import directories

__all__ = ["directories"]
