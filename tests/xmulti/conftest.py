"""The tiny model, as the commands' tests make it."""

from tests.exegpt.cli.conftest import exegpt, tiny, tiny_profile

__all__ = ["exegpt", "tiny", "tiny_profile"]
