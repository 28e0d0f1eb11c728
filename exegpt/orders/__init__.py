"""Orders: which waiting request comes first. Each is one function from a sequence to its sorting key."""

from exegpt.orders.fcfs import fcfs

__all__ = ["fcfs"]
