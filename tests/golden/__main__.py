"""Rewrite the golden files: `python -m tests.golden`."""

from tests.golden.cases import replays, write
from tests.golden.commands import answers

write("replays.json", replays())
write("answers.json", answers())
