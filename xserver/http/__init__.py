"""HTTP interface: routes, bodies, answers and pages."""
