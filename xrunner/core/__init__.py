"""The engine: requests in, results out; driving a replica; changing the schedule while it runs."""
