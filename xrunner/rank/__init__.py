"""What one rank does: batches, compute, decoding graphs, warm-up."""
