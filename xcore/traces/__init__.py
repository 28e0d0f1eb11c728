"""Recorded requests: their files, their arrivals, and the common prefixes of their prompts."""
