"""Heaps by keys that are replaced, beside sorted lists."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from xcore.batching.keyed_heap import GroupedHeap, KeyedHeap

OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 12), st.integers(0, 3), st.sampled_from("abc")),
        st.tuples(st.just("discard"), st.integers(0, 12)),
        st.tuples(st.just("raise"), st.sampled_from("abc"), st.integers(1, 3)),
        st.tuples(st.just("rekey"), st.integers(0, 6)),
    ),
    max_size=60,
)


@given(OPERATIONS)
def test_items_come_by_key_then_by_name(operations):
    heap, keys = KeyedHeap(), {}
    for kind, *rest in operations:
        if kind == "put":
            name, keys[name], _ = rest
            heap.put(name, keys[name], str(name))
        elif kind == "discard":
            keys.pop(rest[0], None)
            heap.discard(rest[0])
        elif kind == "rekey":
            keys = {name: (name * 7 + rest[0]) % 5 for name in keys}
            heap.rekey(lambda item, by=rest[0]: (int(item) * 7 + by) % 5)
        entries = sorted((key, name, str(name)) for name, key in keys.items())
        assert heap.first() == (entries[0] if entries else None)
        assert heap.entries(3) == entries[:3] and heap.smallest(20) == [item for *_, item in entries]
        assert len(heap) == len(keys) and sorted(heap) == sorted(map(str, keys))
        assert all((name in heap) == (name in keys) for name in range(13))


@given(OPERATIONS)
def test_sequences_come_by_their_groups_key_then_by_their_own(operations):
    """A group's key rises while the group waits."""
    group_keys = dict.fromkeys("abc", 0)
    order = SimpleNamespace(group=lambda sequence: sequence.group, group_key=group_keys.__getitem__)
    heap, keys = GroupedHeap(order), {}
    for kind, *rest in operations:
        if kind == "put":
            name, key, group = rest
            sequence = SimpleNamespace(index=name, group=group)
            keys[name] = key, sequence
            heap.put(name, key, sequence)
        elif kind == "discard":
            keys.pop(rest[0], None)
            heap.discard(rest[0])
        elif kind == "raise":
            group_keys[rest[0]] += rest[1]
        else:
            keys = {name: ((name * 7 + rest[0]) % 5, sequence) for name, (_, sequence) in keys.items()}
            heap.rekey(lambda sequence, by=rest[0]: (sequence.index * 7 + by) % 5)
        ranked = sorted(keys, key=lambda name: (group_keys[keys[name][1].group], keys[name][0], name))
        first = heap.first()
        assert (first and first[:2]) == ((keys[ranked[0]][0], ranked[0]) if ranked else None)
        assert [sequence.index for sequence in heap.smallest(5)] == ranked[:5]
        assert len(heap) == len(keys) and sorted(s.index for s in heap) == sorted(keys)
        assert all((name in heap) == (name in keys) for name in range(13))
