"""Stop texts end an output where a search of the whole text would, however it is cut into pieces."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xserver.text.stop_texts import StopTexts

LETTERS = st.text("ab🙂", max_size=12)


def ended(text: str, stops, included: bool) -> tuple[str, bool]:
    """The whole text up to the stop text that ends first; of those that end together the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end if included else end - max(map(len, ending))], True
    return text, False


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(LETTERS, max_size=8),
    stops=st.lists(st.text("ab🙂", min_size=1, max_size=5), max_size=4),
    included=...,
)
def test_pieces_end_where_the_whole_text_does(pieces: list[str], stops: list[str], included: bool):
    searched, text, stopped = StopTexts(stops, included), "", False
    for piece in pieces:
        more, stopped = searched.push(piece)
        text += more
        if stopped:
            break
    text += searched.finish()
    assert (text, stopped) == ended("".join(pieces), stops, included)


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(LETTERS, max_size=8),
    stops=st.lists(st.text("ab🙂", min_size=1, max_size=5), min_size=1, max_size=4),
)
def test_no_more_is_held_than_may_begin_a_stop_text(pieces, stops):
    searched, text, whole = StopTexts(stops), "", ""
    for piece in pieces:
        more, stopped = searched.push(piece)
        if stopped:
            return
        text, whole = text + more, whole + piece
        begins = [whole[len(whole) - n :] for stop in stops for n in range(len(stop)) if whole.endswith(stop[:n])]
        assert len(whole) - len(text) == max(map(len, begins), default=0)


@pytest.mark.parametrize("included", [False, True])
def test_without_stop_texts_everything_passes(included):
    assert StopTexts([], included).push("text") == ("text", False)
