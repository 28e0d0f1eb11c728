"""What all nouns share: a document that holds a key they don't know is refused, not half read."""

from typing import ClassVar


class Noun:
    """Base of the frozen dataclasses that travel as JSON (see exegpt/document.py)."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}
