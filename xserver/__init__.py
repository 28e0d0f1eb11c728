"""The server's frontend, a process of its own without torch: HTTP, text, admission, and the engine behind a socket."""
