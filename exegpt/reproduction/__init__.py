"""Reproduce the paper's evaluation by simulation on stock rooflines: one file per table or figure, and shared code."""
