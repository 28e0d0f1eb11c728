"""XProfiler: compiles measured layers or the roofline into a Profile (paper section 3)."""
