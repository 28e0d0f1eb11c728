"""The engine beside transformers' continuous batching, of a tiny model on the CPU."""

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import serving
from exegpt.api import peers
from xcore.specs.model import ModelSpec

CPU = torch.device("cpu")
TINY = ModelSpec("tiny", "llama", 2, 32, 2, 1, 16, 48, True, 300, 256)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "measure_profile", lambda *given, **on: None)  # the roofline does for the search
        return serving.measured_model(tmp_path_factory.mktemp("models"), TINY, "fp32", CPU)


@pytest.fixture(scope="module")
def rows(prepared):
    return serving.serve(*prepared, 8, CPU, (2, 4))


@pytest.mark.slow
def test_ours_keeps_to_the_bound_that_the_peer_kept(rows):
    *theirs, ours = rows
    best = max(theirs, key=lambda row: row.tokens_s)
    assert [row.setting for row in theirs] == ["at most 2", "at most 4"]
    assert ours.name == "exegpt" and ours.bound_s == best.latency_s
    assert ours.ratio == ours.tokens_s / best.tokens_s
    assert all(row.tokens_s > 0 and row.latency_s > 0 for row in rows)


@pytest.mark.slow
def test_rows_are_printed_and_written(rows, prepared, monkeypatch, capsys):
    monkeypatch.setattr(serving, "measured_model", lambda *given: prepared)
    monkeypatch.setattr(serving, "serve", lambda *given: rows)
    written = gpu._serving(CPU)
    assert [row["bound_s"] for row in written] == [None, None, rows[-1].bound_s]
    out = capsys.readouterr().out
    assert out.count("tokens/s") == 3 and f"{rows[-1].ratio:.2f} times the peer's" in out


@pytest.mark.slow
def test_a_failed_peer_is_printed_and_the_others_count(prepared, monkeypatch, capsys):
    real = peers.continuous

    def out_of_memory(model, requests, most):
        if most == 4:
            raise RuntimeError("no memory left")
        return real(model, requests, most)

    monkeypatch.setattr(peers, "continuous", out_of_memory)
    theirs = serving.serve(*prepared, 4, CPU, (2, 4))[:-1]
    assert [row.setting for row in theirs] == ["at most 2"]
    assert "at most 4: RuntimeError: no memory left" in capsys.readouterr().out


def test_without_any_peer_there_is_no_comparison(prepared, monkeypatch, capsys):
    def broken(model, requests, most):
        raise ImportError("too old")

    monkeypatch.setattr(peers, "continuous", broken)
    monkeypatch.setattr(serving, "measured_model", lambda *given: prepared)
    (row,) = gpu._serving(CPU)
    assert "serves nothing" in row["failed"]
