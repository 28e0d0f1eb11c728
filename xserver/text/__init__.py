"""Text: from messages to prompts, and from tokens to text."""
