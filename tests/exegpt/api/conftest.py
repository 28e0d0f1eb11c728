"""The tiny model, as the commands' tests make it."""

from tests.exegpt.cli.conftest import short_warm_ups, tiny, tiny_profile

__all__ = ["short_warm_ups", "tiny", "tiny_profile"]
