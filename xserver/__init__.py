"""The server's frontend, a separate process without torch: HTTP, text, admission, and the socket to the engine."""
