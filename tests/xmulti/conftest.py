"""The tiny model, as the commands' tests make it."""

from tests.exegpt.cli.conftest import exegpt, short_warm_ups, tiny, tiny_profile

__all__ = ["exegpt", "short_warm_ups", "tiny", "tiny_profile"]
