"""The user's choices of how a model's prompts are rendered and its outputs are read."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class MessageFormats:
    """Formats of one model's messages."""

    chat_template: Path | None = None
    """A file that replaces the model's own chat template."""
    tool_parser: str | None = None
    """The name of the format of tool calls; None: the one that the chat template teaches."""
    reasoning_parser: str | None = None
    """The name of the marks of reasoning; None: reasoning is a part of the text."""
    json_whitespace: bool = False
    """Whether JSON outputs may have any white space between their elements, not only single spaces."""
