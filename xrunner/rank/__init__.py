"""One rank's work: batches, compute, graphs, warm-up."""
