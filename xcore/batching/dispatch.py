"""Dispatch: which replica gets which request."""

from collections.abc import Sequence

OUTPUT_TOKEN = 3
"""The cost of decoding a token, in prompt tokens.

It is three as measured on a CPU, and one to six by the data sheets of GPUs that decode 64 to 256 sequences at once.
"""


def deal(lengths: Sequence[tuple[int, int]], replicas: int) -> list[list[int]]:
    """Return the indices of each replica's requests, in order, given every request's (input, output) tokens.

    Of every `replicas` requests in a row, each replica gets one. The longer ones go to the replicas with less work so
    far, so that all end at about the same time, however much lengths differ.
    """
    work = [given + OUTPUT_TOKEN * made for given, made in lengths]
    if work and min(work) == max(work):  # all rows are dealt alike
        return [list(range(first, len(work), replicas)) for first in range(replicas)]
    places: list[list[int]] = [[] for _ in range(replicas)]
    load = [0] * replicas
    for first in range(0, len(work), replicas):
        row = range(first, min(first + replicas, len(work)))
        longest_first = sorted(row, key=work.__getitem__, reverse=True)
        for replica, place in zip(sorted(range(replicas), key=load.__getitem__), longest_first, strict=False):
            places[replica].append(place)
            load[replica] += work[place]
    return places


def fewest_requests(requests: Sequence[int]) -> int:
    """Return the index of the replica with the fewest requests, given every replica's number; of equal ones, the first.

    This is SeaLLM's dispatcher, which chooses when a request arrives.
    """
    return min(range(len(requests)), key=requests.__getitem__)
