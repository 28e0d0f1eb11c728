"""Rewrite the golden files: `python -m tests.golden`."""

from tests.golden.cases import replays, write

write("replays.json", replays())
