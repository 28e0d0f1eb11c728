"""What ranks send each other: messages, states between stages, KV transfer; and where each rank stands."""
