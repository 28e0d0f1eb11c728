"""Several models on one device that they share: an engine for each, one job at a time."""
