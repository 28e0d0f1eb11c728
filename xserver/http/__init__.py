"""The server's interface: routes, bodies, answers and pages."""
