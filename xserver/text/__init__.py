"""Text: convert messages to prompts, and tokens to text."""
