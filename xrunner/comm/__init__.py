"""Communication between ranks: messages, states between stages, KV transfer, and each rank's place in the schedule."""
