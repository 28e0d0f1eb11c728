"""What was predicted and what was measured, for terminals and as one HTML page."""
