"""What several commands, the server and the benchmarks share: settings, searches, comparisons of runs with replays."""
