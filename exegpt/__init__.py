"""exegpt: serve large language models at the highest throughput a latency bound allows.

This package holds the nouns (one file each) and the doors to everything else; it imports nothing heavy.
"""

__version__ = "0.1.0"
