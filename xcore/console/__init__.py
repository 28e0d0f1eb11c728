"""What is said on a terminal: notes, progress, tables and answers as text."""
