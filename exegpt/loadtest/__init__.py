"""The load generator of `exegpt bench serve`: it sends requests on a fixed schedule and measures their answers.

The loop is open: requests arrive at their times, whatever the endpoint does. `arrivals.py` makes the arrival times,
`prompts.py` the prompts. `connection.py` is the HTTP client, `answer.py` reads streams, `open_loop.py` sends,
`measurements.py` sums up, and `bench_serve.py` puts them together.
"""
