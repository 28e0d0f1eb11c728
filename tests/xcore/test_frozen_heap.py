"""A frozen heap: older objects are out of collections' reach inside the block, and back behind it."""

import gc
import weakref

from xcore.frozen_heap import frozen_heap


class Node:
    pass


def cycle():
    node = Node()
    node.itself = node
    return weakref.ref(node)


def test_older_garbage_is_collected_only_behind_the_block():
    gc.collect()
    gc.disable()
    try:
        older = cycle()
        with frozen_heap():
            newer = cycle()
            gc.collect()
            assert older() is not None and newer() is None
        gc.collect()
        assert older() is None
    finally:
        gc.enable()
