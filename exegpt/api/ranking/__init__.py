"""The learned order's ranker: which of two prompts will have the shorter output."""
