"""The launch commands of other engines, a file for each engine, and the files that start them in containers."""
