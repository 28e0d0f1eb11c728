"""Serving a plan: its engines, and another plan when popularity drifts."""
