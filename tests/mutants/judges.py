"""Which tests judge the mutants of a module."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Path of modules (the longest that fits counts): tests that should notice, quickest first.
TESTS = {
    "xcore/batching": "golden xcore/batching xcore/policies xsimulator/replay",
    "xcore/policies": "golden xcore/policies xcore/batching xscheduler/test_ties.py xsimulator/replay",
    "xcore/policies/plugins": "exegpt/cli/test_plugins.py",
    "xsimulator/replay": "golden xsimulator/replay xcore/batching/test_prefix_pool.py "
    "xsimulator/steady/test_occupancy.py xsimulator/test_estimates.py xmulti/sharing/test_call_replay.py "
    "xscheduler/test_agent_search.py xscheduler/test_prefill_decode_search.py",
    "xsimulator/cost": "xsimulator/cost xsimulator/steady",
    "xsimulator/steady": "xsimulator/steady xsimulator/test_estimates.py",
    "xscheduler": " ".join(
        f"xscheduler/test_{name}.py"
        for name in (
            "ties allocation policy_spaces cache advice search ceilings tune open_tune admission families".split()
        )
    )
    + " xscheduler",
    "xmulti/sharing": "xmulti/sharing/test_placement.py xmulti/sharing/test_mixtures.py "
    "xmulti/sharing/test_plan_replicas.py xmulti/sharing/test_plan_replay.py xmulti/sharing/test_groups.py "
    "xmulti/sharing xmulti/applications/test_expected_calls.py xmulti/plans",
    **dict.fromkeys(
        ("xmulti/sharing/plan_replay", "xmulti/sharing/plan_engines", "xmulti/sharing/unit_loads"),
        "xmulti/sharing/test_plan_replicas.py xmulti/sharing/test_plan_replay.py xmulti/sharing/test_call_replay.py "
        "xmulti/plans/test_plan_run.py xmulti/plans/test_simulate_plan.py xmulti/sharing/test_shared_devices.py",
    ),
    **dict.fromkeys(
        ("xcore/policies/sharing", "xcore/policies/priority_sharing", "xcore/policies/one_phase"),
        " ".join(f"xmulti/sharing/test_{name}.py" for name in ("simulated_unit", "priority", "cluster_replay")),
    ),
    **dict.fromkeys(
        ("xscheduler/goodput", "xscheduler/open_"),
        " ".join(
            f"xscheduler/test_{name}.py"
            for name in "open_search highest_goodput rate_sample setting_at_rates open_tune rates goodput".split()
        ),
    ),
}
# Left out of their folders, since they take as long as all others together: they run for the module of their name.
LONG = ("tests/xscheduler/test_device_search.py", "tests/xscheduler/test_expert_divisions.py")


def tests_of(path: str, root: Path = ROOT) -> tuple[list[str], list[str]]:
    """Files of tests in a tree for the mutants of a module: those of its own name, and those listed, in their order.

    Folders are listed file by file: of a folder and its files, pytest would run the folder alone, by the alphabet.
    """
    listed = TESTS[max((start for start in TESTS if path.startswith(start)), key=len)]
    files = sorted((root / "tests" / path).parent.glob(f"test_{Path(path).stem}.py"))
    others = [file for name in listed.split() for file in files_of(root / "tests" / name)]
    own, all_listed = ([str(file.relative_to(root)) for file in some] for some in (files, others))
    return own, [name for name in dict.fromkeys(all_listed) if name not in LONG]


def files_of(path: Path) -> list[Path]:
    """The test file of that path, or those of that folder."""
    return sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
