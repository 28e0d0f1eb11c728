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
# Start of the path of modules: tests of other folders, which alone reach some of their lines.
BESIDE = {
    "xscheduler/advice": "exegpt/cli/test_simulate_memory.py",
    "xscheduler/agent_": "exegpt/cli/test_agents.py",
    "xscheduler/application_runs": "exegpt/cli/test_orders.py",
    "xscheduler/drafts": "exegpt/cli/test_speculation.py",
    "xscheduler/engine_settings": "exegpt/cli/test_simulate_points.py exegpt/cli/test_simulate_memory.py",
    "xscheduler/list_": "exegpt/cli/test_admission.py exegpt/cli/test_lists.py",
    "xscheduler/open_tune": "exegpt/cli/test_rates.py",
    "xscheduler/ordering": "exegpt/cli/test_rank.py exegpt/cli/test_orders.py",
    "xscheduler/rate_sample": "exegpt/cli/test_rates.py",
    "xscheduler/replica": "xscheduler/test_device_search.py exegpt/cli/test_devices.py",
    "xscheduler/search_problem": "exegpt/cli/test_bad_inputs.py",
    "xscheduler/setting": "exegpt/api/test_tuning.py exegpt/cli/test_device.py exegpt/cli/test_lists.py "
    "exegpt/cli/test_replays.py",
    "xscheduler/why_infeasible": "exegpt/cli/test_simulate_points.py",
    "xmulti/sharing/placement": "xmulti/sharing/test_staged_replicas.py",
    "xmulti/sharing/plan_replay": "xmulti/sharing/test_staged_replicas.py",
    "xmulti/sharing/shared_devices": "xmulti/stages/test_beside_stages.py",
    "xmulti/sharing/simulated_unit": "xmulti/applications/test_simulation.py",
    "xmulti/sharing/tenant": "xmulti/applications/test_simulation.py",
    "xsimulator/replay/cells": "exegpt/cli/test_orders.py",
    "xsimulator/replay/lanes": "exegpt/cli/test_orders.py",
    "xcore/policies/registry": "exegpt/cli/test_plugins.py xscheduler/test_engine_defaults.py",
}
# Left out of their folders, since they take as long as all others together: they run for their own modules.
LONG = ("tests/xscheduler/test_device_search.py", "tests/xscheduler/test_expert_divisions.py")


def tests_of(path: str, root: Path = ROOT) -> tuple[list[str], list[str]]:
    """Files of tests in a tree for the mutants of a module: its own, and those listed for its folder, in their order.

    Its own are those of its name, and those of other folders that see it. Folders are listed file by file:
    of a folder and its files, pytest would run the folder alone, by the alphabet.
    """
    listed = TESTS[max((start for start in TESTS if path.startswith(start)), key=len)]
    files = sorted((root / "tests" / path).parent.glob(f"test_{Path(path).stem}.py"))
    files += [
        root / "tests" / name for start, names in BESIDE.items() if path.startswith(start) for name in names.split()
    ]
    others = [file for name in listed.split() for file in files_of(root / "tests" / name)]
    own, all_listed = ([str(file.relative_to(root)) for file in some] for some in (files, others))
    return list(dict.fromkeys(own)), [name for name in dict.fromkeys(all_listed) if name not in (*LONG, *own)]


def files_of(path: Path) -> list[Path]:
    """The test file of that path, or those of that folder."""
    return sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
