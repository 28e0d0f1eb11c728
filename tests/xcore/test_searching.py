"""A search in a process of its own: it answers what it was asked, and ends with whoever asked."""

import json
import os
import subprocess
import sys

import pytest

from tests.xcore import small_specs
from xcore import document

ANSWERING = """
from xcore.searching import read_problem, write_answer
from xcore.specs.workload import Workload
write_answer(read_problem(Workload))
"""
ENDLESS = """
import subprocess, sys, time
from xcore.searching import read_problem
from xcore.specs.workload import Workload
read_problem(Workload)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("searching", flush=True)
time.sleep(600)
"""


def begun(program, **how):
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **how
    )
    problem = document.to_dict(small_specs.schedule().workload)
    process.stdin.write(json.dumps(problem) + "\n")
    process.stdin.flush()
    return process, problem


def test_the_answer_is_a_document():
    process, problem = begun(ANSWERING)
    assert json.loads(process.stdout.read()) == problem and process.wait(20) == 0


@pytest.mark.timeout(60)
def test_a_search_ends_with_whoever_asked_and_with_what_it_has_started():
    """In a session of its own: its output ends when all processes have that could write to it."""
    process, _ = begun(ENDLESS, start_new_session=True)
    assert process.stdout.readline() == "searching\n" and os.getpgid(process.pid) == process.pid
    process.stdin.close()
    assert process.stdout.read() == ""
    assert process.wait(20) < 0
