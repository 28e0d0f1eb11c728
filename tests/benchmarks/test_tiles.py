"""The benchmark of tiles: both ways compute the same, and each has its time."""

import sys

from benchmarks import tiles


def test_both_ways_are_timed(monkeypatch, capsys):
    monkeypatch.setattr(tiles, "SHAPES", ((40, 24),))
    monkeypatch.setattr(tiles, "_WEIGHTS_BYTES", 2**12)
    monkeypatch.setattr(sys, "argv", ["tiles", "--times", "2"])
    tiles.main()
    shown = capsys.readouterr().out
    assert "40 × 24" in shown
    assert all(float(ratio) > 0 for ratio in shown.split("40 × 24")[1].split()[: len(tiles.ROWS)])
