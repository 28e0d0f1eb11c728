"""Stop texts: end an output, even if a stop text arrives in several pieces."""

from collections.abc import Sequence


class StopTexts:
    """Passes text on, except for a suffix that may be the beginning of a stop text.

    The stop text that ends first ends the output, and is left out unless `included`.
    """

    def __init__(self, stops: Sequence[str], included: bool = False):
        self._stops, self._included = tuple(stops), included
        self._held = ""

    def __bool__(self) -> bool:
        """Return whether there are any stop texts."""
        return bool(self._stops)

    @property
    def holds(self) -> bool:
        """Whether text is held back."""
        return bool(self._held)

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that can be passed on, and whether a stop text ended it."""
        if not self._stops:
            return text, False
        held = self._held + text
        found = [(place + len(stop), place) for stop in self._stops if (place := held.find(stop)) >= 0]
        if found:
            end, begin = min(found)
            self._held = ""
            return held[: end if self._included else begin], True
        keep = self._may_begin(held)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], False

    def finish(self) -> str:
        """Return the text that was held back."""
        held, self._held = self._held, ""
        return held

    def _may_begin(self, text: str) -> int:
        """Return the length of the longest suffix that begins a stop text."""
        longest = min(len(text), max(map(len, self._stops)) - 1)
        return next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in self._stops)), 0)
