"""Admission: the sustainable rate of an engine, and the queue."""
