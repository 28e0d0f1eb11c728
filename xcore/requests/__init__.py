"""What engines are asked for: requests, sampling, grammars, and the messages that carry them."""
