"""Base of all specs: documents with unknown keys are refused."""

from typing import ClassVar


class Spec:
    """Base of the frozen dataclasses that are exchanged as JSON (see xcore/document.py)."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}
