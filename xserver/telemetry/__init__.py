"""What is told of a running server: metrics, traces, logs and reports."""
