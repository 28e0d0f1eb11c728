"""One rank's work: batches, compute, decoding graphs, warm-up."""
