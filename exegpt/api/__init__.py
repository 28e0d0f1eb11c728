"""Functions shared by several commands, the server and the benchmarks: settings, searches, comparisons with replays."""
