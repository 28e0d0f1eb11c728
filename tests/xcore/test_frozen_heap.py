"""A frozen heap: older objects are out of collections' reach inside the block, and back behind it.

Imports come without collections, which go on behind them, without what was imported.
"""

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


IMPORTING = """
import gc
from xcore.frozen_heap import imports

made = None
for collects in (False, True):
    made = (gc.enable if collects else gc.disable)()
    frozen = gc.get_freeze_count()
    with imports():
        assert not gc.isenabled()
        made = [[] for _ in range(5000)]
    assert gc.isenabled() == collects and gc.get_freeze_count() >= frozen + 5000
try:
    with imports():
        raise ImportError
except ImportError:
    assert gc.isenabled()
print("done")
"""


def test_imports_come_without_collections_which_go_on_as_before():
    assert subprocess.run([sys.executable, "-c", IMPORTING], capture_output=True, text=True).stdout == "done\n"


def test_older_garbage_is_collected_only_behind_the_block():
    """In a process of its own: the tests' processes keep their heaps frozen (conftest.py)."""
    assert subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True).stdout == "done\n"
