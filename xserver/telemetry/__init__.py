"""Telemetry of a running server: metrics, traces, logs and reports."""
