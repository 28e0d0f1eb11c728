"""Applications on a shared LLM (Hermes): demand, orders, caches and prewarming, in simulated time."""
