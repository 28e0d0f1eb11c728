"""The comparison with `vllm bench serve`: its load, its table, and what it does without vLLM."""

import importlib.util
import json

import pytest

from benchmarks import bench_serve, servers
from xcore.traces.trace import read_trace
from xrunner.models.create import create_model


def test_both_clients_read_the_same_load(tmp_path):
    """Ours takes the times beside hashes for milliseconds, as Mooncake's are; vLLM multiplies them by 1e-3."""
    bench_serve.write_trace(tmp_path / "t.jsonl", 50, 10.0, 3)
    rows = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    read = read_trace(tmp_path / "t.jsonl")
    assert [r.arrival_s for r in read] == pytest.approx([1e-3 * row["timestamp"] for row in rows])
    assert read[-1].arrival_s == pytest.approx(5.0, rel=0.5)
    assert {(r.input, r.output) for r in read} == {(servers.INPUT, servers.OUTPUT)}
    blocks = [i for row in rows for i in row["hash_ids"]]
    assert len(set(blocks)) == len(blocks) == 50 * servers.INPUT // 16


def test_every_token_has_text(tmp_path):
    from tokenizers import Tokenizer

    vocab = 2048
    create_model(tmp_path / "m", "llama", layers=1, hidden=16, heads=1, kv_heads=1, ffn=16, vocab=vocab, context=64)
    servers.give_text(tmp_path / "m" / "tokenizer.json", vocab)
    tokenizer = Tokenizer.from_file(str(tmp_path / "m" / "tokenizer.json"))
    assert sorted(tokenizer.get_vocab().values()) == list(range(vocab))
    assert tokenizer.decode([2000]) == " w2000"


def test_medians_are_compared_and_a_difference_fails():
    figures = {"throughput": 2.0, "ttft": 0.010, "tpot": 0.002, "latency": 0.1}
    text, alike = bench_serve.table([figures | {"ttft": t} for t in (0.0101, 0.0102, 0.5)], [figures] * 3)
    assert alike and "+2.0%" in text and "(rounds +1.0% to +4900.0%)" in text and "10.200" in text
    for key in figures:
        assert not bench_serve.table([figures | {key: 1.06 * figures[key]}], [figures])[1]


def test_missing_vllm_is_printed(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(bench_serve.sys, "argv", ["bench_serve"])
    bench_serve.main()
    assert capsys.readouterr().out == "vLLM isn't installed, so there is nothing to compare with: skipped.\n"
