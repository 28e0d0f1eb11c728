"""Which replica gets which request."""

from collections.abc import Sequence


def deal(tokens: Sequence[int], replicas: int) -> list[list[int]]:
    """The places of each replica's requests, in order, given every request's tokens, prompt and output together.

    Of every so many requests in a row each replica gets one: the longer ones go to those that have fewer tokens so far,
    so that all end at about the same time, however long the requests are.
    """
    places: list[list[int]] = [[] for _ in range(replicas)]
    had = [0] * replicas
    for first in range(0, len(tokens), replicas):
        row = range(first, min(first + replicas, len(tokens)))
        longest_first = sorted(row, key=lambda place: -tokens[place])
        for replica, place in zip(sorted(range(replicas), key=had.__getitem__), longest_first, strict=False):
            places[replica].append(place)
            had[replica] += tokens[place]
    return places
