"""The processes of engines: their options, their sockets, and the KV blocks that they need after a restart."""
