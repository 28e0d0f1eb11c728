"""Recorded requests: their files, arrivals, and prompts that begin alike."""
