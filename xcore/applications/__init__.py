"""Applications: their demand graphs, the demand that follows, and when to warm up what comes next (Hermes)."""
