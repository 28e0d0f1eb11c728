"""The engine that enforces a schedule."""
