"""Policies are plug-ins: outside their own files nothing names a policy or reads a control variable by its name."""

import ast
from pathlib import Path

import pytest

from xcore.policies import TRAITS
from xcore.policies.control import kinds

ROOT = Path(__file__).parent.parent
OWN = ("xcore/policies", "xsimulator/steady", "xscheduler/spaces", "exegpt/reproduction")
"""Folders of the policies, their steady states and their spaces, and of the papers' evaluations."""
POLICIES = set(TRAITS)
VARIABLES = {name for traits in TRAITS.values() for name in kinds(traits.control)}
BY_ENGINE = {"max_num_seqs", "max_num_batched_tokens"}
EXEMPT = {
    "xcore/specs/schedule_versions.py": (VARIABLES, "the variables that files of version 1 have"),
    "xscheduler/engine_settings.py": ({"chunked"} | BY_ENGINE, "an engine's default policy, and its default limits"),
    "xscheduler/launch_command.py": ({"chunked"} | BY_ENGINE, "the flags of other engines, and what these run"),
    "xscheduler/candidates.py": ({"decode_batch"}, "a figure of a steady state, which has this name"),
    "xscheduler/prefill_decode_search.py": (BY_ENGINE, "the limits of the engines of both sides"),
    "xmulti/plans/planning.py": ({"orca", "chunked"}, "the default policies of a plan's methods"),
    "xmulti/stages/stage_planning.py": ({"chunked"} | BY_ENGINE, "the policy of the engines of a plan's stages"),
    "xmulti/applications/llm_backend.py": ({"max_num_seqs"}, "a policy of its own, with this attribute"),
}
"""File → what it may name, and why."""
PACKAGES = "exegpt kernels xcore xmulti xprofiler xrunner xscheduler xserver xsimulator".split()
FILES = [
    path.relative_to(ROOT).as_posix()
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
    if not path.relative_to(ROOT).as_posix().startswith(OWN)
]


def names_in(text: str) -> set[str]:
    """The policies that a program names, and the control variables that it reads, by attribute or by name."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in POLICIES | VARIABLES:
            found.add(node.value)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node.attr in VARIABLES:
            found.add(node.attr)
    return found


@pytest.mark.parametrize("file", FILES)
def test_only_policies_name_policies_and_their_variables(file):
    allowed = EXEMPT.get(file, (set(), ""))[0]
    assert names_in((ROOT / file).read_text(encoding="utf-8")) == allowed


def test_names_and_reads_are_found():
    text = 'x = s.control.max_num_seqs\nif p == "orca": y = c["encode_batch"]\nControl(decode_iterations=3)'
    assert names_in(text) == {"max_num_seqs", "orca", "encode_batch"}
