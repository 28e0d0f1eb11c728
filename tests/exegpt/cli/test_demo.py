"""`exegpt demo` from the model to the comparison, printed and in JSON; measured at few points."""

from exegpt.api import demo
from tests.xprofiler.small import shrink


def test_the_demo_runs_every_policy_and_compares_it(exegpt, tiny, monkeypatch, tmp_path):
    monkeypatch.setenv("EXEGPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(demo, "create_demo_model", lambda directory, seed: tiny)
    shrink(monkeypatch.setattr)
    directory = tmp_path / "demo"
    command = ("demo", "--dir", directory, "--workload", "8/8", "--latency-bound", "60s", "--num", 2, "--device", "cpu")
    done = exegpt(*command)
    assert done.code == 0, done.err
    assert "The best schedule of each policy under 60s, workload 8/8" in done.out
    assert "Predicted and measured results of these requests" in done.out
    assert {path.name for path in directory.iterdir()} >= {"schedule.json", "report.html", "trace.json"}
    answer = exegpt(*command, "--json").json
    assert answer["schedule"]["policy"] in {row["policy"] for row in answer["policies"]}
    assert all(row["throughput_tok_s"] > 0 and row["requests"] == 2 for row in answer["policies"])
