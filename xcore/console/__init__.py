"""Console output: notes, progress, tables and answers as text."""
