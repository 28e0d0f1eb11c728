"""The nodes of a plan: a launcher on each, and a server's connections to them."""
