"""Set before anything heavy is imported: one thread, no hub, and kernels for GPUs interpreted where there is none."""

import gc
import os
import shutil
import tempfile
from collections import Counter

import pytest
from hypothesis import settings

from tests.sharing import shared_by
from tests.thinned import LONG, THINNED

gc.disable()  # while tests are collected, millions of objects come and stay: to look through them takes as long again

EXAMPLES = 100 if os.environ.get("EXEGPT_TESTS") == "all" else 50
"""Examples of a property test that sets no number. Each run draws other examples."""
settings.register_profile("exegpt", deadline=None, max_examples=EXAMPLES)  # a busy machine is no failure
settings.load_profile("exegpt")
HELD = "_hypothesis_internal_use_settings"
"""Attribute of a property test that has its settings."""

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("EXEGPT_WARM_UP", "0")  # dozens of engines start, whose speed doesn't matter
if "PYTEST_XDIST_WORKER" not in os.environ:  # whose workers share what one of them has measured
    os.environ["EXEGPT_CACHE"] = tempfile.mkdtemp(prefix="exegpt-tests-")  # profiles of the user's are not read
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_finish() -> None:
    """Collect garbage again, but for what there is now."""
    gc.freeze()
    gc.unfreeze = lambda: (
        None
    )  # what is frozen here stays so: engines and load tests of these processes unfreeze theirs
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Deal files to processes in their order, and those that share a server or a plan to one process."""
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False  # by their numbers of tests, which don't take the same time
    scheduler = LoadFileScheduling(config, log)
    scheduler._split_scope = shared_by
    return scheduler


def halve_examples(test: object) -> None:
    """Let a property test that sets a number of examples draw half as many, but no fewer than EXAMPLES."""
    own = getattr(test, HELD, None)
    if own is not None and own.max_examples > EXAMPLES:
        setattr(test, HELD, settings(own, max_examples=max(EXAMPLES, own.max_examples // 2)))


@pytest.hookimpl(tryfirst=True)  # before `-m "not slow"` is applied
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `make test` leaves out as slow: long tests, and cases of others. Put what takes longest first.

    Files are dealt to several processes in their order: at the end, short ones are left. test_openapi.py ends a server
    that test_rescheduling.py needs, too.
    """
    if os.environ.get("EXEGPT_TESTS") != "all":
        for test in {item.obj for item in items if isinstance(item, pytest.Function)}:
            halve_examples(test)
    long = ("tests/xserver", "tests/xrunner")
    items.sort(key=lambda item: (not item.nodeid.startswith(long), "test_openapi" in item.nodeid))
    seen: Counter[str] = Counter()
    for item in items:
        name = item.nodeid.partition("[")[0].removeprefix("tests/")
        if name in LONG:
            item.add_marker("slow")
        if every := THINNED.get(name):
            if seen[name] % every:
                item.add_marker("slow")
            seen[name] += 1
