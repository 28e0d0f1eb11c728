"""Files of tests that share what takes long to make: one process runs them, one after the other."""

from pathlib import Path

SHARING = {
    **dict.fromkeys(("test_client_libraries", "test_responses", "test_tools"), "tools"),
    **dict.fromkeys(("test_body", "test_chat", "test_completions", "test_journal", "test_openapi"), "server"),
    **dict.fromkeys(("test_faults", "test_logprobs", "test_openai_client", "test_prefix_caching"), "server"),
    **dict.fromkeys(("test_bench_serve", "test_ranks", "test_relay", "test_rescheduling"), "server"),
    **dict.fromkeys(("test_engine_process", "test_keys", "test_monitoring", "test_tracing"), "server"),
    **dict.fromkeys(("test_shared_devices", "test_simulate_plan"), "plan"),
}
"""The server or the plan that test files of tests/xserver and tests/xmulti share, by the file's name."""


def shared_by(test: str) -> str:
    """Return what tests of one process have in common: their file, or what it shares with others."""
    path = test.partition("::")[0]
    return SHARING.get(Path(path).stem, path) if path.startswith(("tests/xserver", "tests/xmulti")) else path
