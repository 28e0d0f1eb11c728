"""A search in a process of its own: it answers what it was asked, and ends with whoever asked."""

import json
import os
import subprocess
import sys

import pytest

from tests.xcore import nouns
from xcore import document

ANSWERING = """
from xcore.searching import read_question, write_answer
from xcore.specs.workload import Workload
write_answer(read_question(Workload))
"""
ENDLESS = """
import subprocess, sys, time
from xcore.searching import read_question
from xcore.specs.workload import Workload
read_question(Workload)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("searching", flush=True)
time.sleep(600)
"""


def begun(program, **how):
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **how
    )
    question = document.to_dict(nouns.schedule().workload)
    process.stdin.write(json.dumps(question) + "\n")
    process.stdin.flush()
    return process, question


def test_the_answer_is_a_document():
    process, question = begun(ANSWERING)
    assert json.loads(process.stdout.read()) == question and process.wait(20) == 0


@pytest.mark.timeout(60)
def test_a_search_ends_with_whoever_asked_and_with_what_it_has_started():
    """In a session of its own: its output ends when all processes have that could write to it."""
    process, _ = begun(ENDLESS, start_new_session=True)
    assert process.stdout.readline() == "searching\n" and os.getpgid(process.pid) == process.pid
    process.stdin.close()
    assert process.stdout.read() == ""
    assert process.wait(20) < 0
