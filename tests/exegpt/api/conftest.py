"""The tiny model, as the commands' tests make it."""

from tests.exegpt.cli.conftest import tiny, tiny_profile

__all__ = ["tiny", "tiny_profile"]
