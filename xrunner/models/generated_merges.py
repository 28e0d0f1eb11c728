"""Merges of a byte-level BPE without training: short English words first, then pairs of tokens, as many as needed."""

from collections.abc import Iterator
from itertools import count, islice, pairwise

SPACE = "Ġ"
"""A space, in the alphabet of byte-level tokenizers."""
_PAIRS = """
th he in er an re on at en nd ti es or te of ed is it al ar st to nt ng se ha as ou io le ve co me de hi ri ro ic ne ea
ra ce li ch ll be ma si om ur
""".split()
"""The most frequent pairs of letters."""
_WORDS = """
the of and to in is it that was for on are as with his they at be this have from or had by not but what all were we
when your can said there use an each which she do how their if will up other about out many then them these so some her
would make like him into time has look two more write go see number no way could people my than first water been call
who its now find long down day did get come made may part over new sound take only little work know place year live me
back give most very after thing our just name good sentence man think say great where help through much before line
right too mean old any same tell boy follow came want show also around form three small set put end does another well
large must big even such because turn here why ask went men read need land different home us move try kind hand picture
again change off play spell air away animal house point page letter mother answer found study still learn should world
""".split()
"""Frequent English words."""
_LETTERS = "etaoinshrdlcumwfgypbvkjxqz"
"""The letters, by how frequent they are."""


def generated_merges(number: int) -> list[tuple[str, str]]:
    """Return this many merges, each of two tokens that exist before it, and each with a new token as its result."""
    return list(islice(_merges(), number))


def _merges() -> Iterator[tuple[str, str]]:
    """Yield merges without end."""
    ranks: dict[tuple[str, str], int] = {}
    tokens = dict.fromkeys([*_LETTERS, SPACE])
    for text in (*_PAIRS, *(prefix + word for word in _WORDS for prefix in ("", SPACE))):
        left, *rest = _encoded(text, ranks)
        for right in rest:
            if left + right not in tokens:
                ranks[left, right] = len(ranks)
                tokens[left + right] = None
                yield left, right
            left += right
    # Tokens with a space only begin words.
    firsts, seconds = list(tokens), [token for token in tokens if SPACE not in token]
    for places in count():
        for place in range(places + 1):
            if place < len(firsts) and places - place < len(seconds):
                left, right = firsts[place], seconds[places - place]
                if left + right not in tokens:
                    tokens[left + right] = None
                    yield left, right
                    firsts.append(left + right)
                    if SPACE not in left:
                        seconds.append(left + right)


def _encoded(text: str, ranks: dict[tuple[str, str], int]) -> list[str]:
    """Return the tokens of a text under these merges."""
    tokens = list(text)
    while len(tokens) > 1:
        left, right = min(pairwise(tokens), key=lambda pair: ranks.get(pair, len(ranks)))
        if (left, right) not in ranks:
            break
        place = list(pairwise(tokens)).index((left, right))
        tokens[place : place + 2] = [left + right]
    return tokens
