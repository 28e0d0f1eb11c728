"""Several models on devices that they share: an engine for each, one job at a time."""
