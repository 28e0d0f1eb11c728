"""The load generator behind `exegpt bench serve`: requests that arrive on a schedule of their own, whatever the
endpoint does (open loop), and what each of them got.

`arrivals.py` says when, `prompts.py` what, `connection.py` is the HTTP client, `answer.py` reads streams,
`open_loop.py` sends, `measurements.py` sums up, `bench_serve.py` puts them together.
"""
