"""The processes of engines: what they are started with, their sockets, and what a plan needs of them."""
