"""`exegpt demo` from the model to the comparison, printed and in JSON; measured at few points."""

from exegpt.api import demo
from tests.xprofiler.small import shrink


def once(call):
    """The call, whose first result is that of all later ones."""
    results = []

    def called(*arguments):
        results.extend([] if results else [call(*arguments)])
        return results[0]

    return called


def test_the_demo_runs_every_policy_and_compares_it(exegpt, tiny, monkeypatch, tmp_path):
    monkeypatch.setenv("EXEGPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(demo, "create_demo_model", lambda directory, seed: tiny)
    shrink(monkeypatch.setattr)
    for name in ("prepare", "run"):
        monkeypatch.setattr(demo, name, once(getattr(demo, name)))
    directory = tmp_path / "demo"
    command = ("demo", "--dir", directory, "--workload", "8/8", "--latency-bound", "60s", "--num", 2, "--device", "cpu")
    done = exegpt(*command)
    assert done.code == 0, done.err
    title, _, columns, _, *rows = done.out.splitlines()
    assert title.startswith("2 requests on ") and title.endswith("latency bound: 60 s for 99% of all requests")
    assert [part.strip() for part in columns.split("  ") if part.strip()] == [
        "policy",
        "predicted tok/s",
        "measured tok/s",
        "error",
        "predicted p99 latency",
        "measured",
        "bound met",
    ]
    assert {row.split()[0]: row.split()[-1] for row in rows[:5]}.keys() == {
        "static",
        "hybrid",
        "orca",
        "chunked",
        "rra",
    }
    assert all(row.split()[-1] == "yes" for row in rows[:5])
    report = (directory / "report.html").read_text()
    assert "output tokens/s, steady" in report and "decode iteration" in report and "2 requests first" in report
    assert {path.name for path in directory.iterdir()} >= {"schedule.json", "report.html", "trace.json"}
    answer = exegpt(*command, "--json").json  # of the same searches and runs
    assert answer["schedule"]["policy"] in {row["policy"] for row in answer["policies"]}
    assert all(row["throughput_tok_s"] > 0 and row["requests"] == 2 for row in answer["policies"])
