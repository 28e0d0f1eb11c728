"""A frozen heap: older objects are out of collections' reach inside the block, and back behind it."""

import subprocess
import sys

PROGRAM = """
import gc, weakref
from xcore.frozen_heap import frozen_heap

class Node:
    pass

def cycle():
    node = Node()
    node.itself = node
    return weakref.ref(node)

gc.disable()
older = cycle()
with frozen_heap():
    newer = cycle()
    gc.collect()
    assert older() is not None and newer() is None
gc.collect()
assert older() is None
print("done")
"""


def test_older_garbage_is_collected_only_behind_the_block():
    """In a process of its own: the tests' processes keep their heaps frozen (conftest.py)."""
    assert subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True).stdout == "done\n"
