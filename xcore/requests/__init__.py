"""Requests to engines: prompts, sampling, grammars and messages."""
