"""Sequences with hints for every order, and a ledger that runs them to their ends."""

from hypothesis import strategies as st

from xcore.batching import BlockPool, Hints, Ledger, Sequence
from xcore.policies.chunked import ChunkedPolicy

ROWS = st.lists(
    st.tuples(st.integers(1, 30), st.integers(1, 12), st.integers(0, 30), st.sampled_from("abc"), st.integers(0, 60)),
    min_size=1,
    max_size=14,
)
"""Input and output tokens, arrival, client (application, service), deadline."""


def hints(tokens, output, arrival, name, deadline):
    """All hints, of times in which a token of an output takes a second and one of a prompt a tenth."""
    return Hints(
        application=name,
        application_arrival_s=float(ord(name) - ord("a")),
        client=name,
        service=name,
        deadline_s=float(deadline),
        output_tokens=output,
        score=-float(output),
        prefill_s=tokens / 10,
        time_s=tokens / 10 + output,
        service_time_s=5.0 + ord(name) - ord("a"),
        service_sd_s=1.0,
    )


def sequences(rows):
    """A sequence of each row."""
    return [Sequence(i, row[0], row[1], float(row[2]), hints=hints(*row)) for i, row in enumerate(rows)]


def run(order, rows, blocks=6, residents=4, step_s=1.0):
    """Run rows to their ends under chunked prefill that grows; sequences, indices as admitted, ledger."""
    ledger = Ledger(BlockPool(blocks, 8), order, admission="grow")
    policy, submitted = ChunkedPolicy(residents, 16), sequences(rows)
    ledger.submit(submitted)
    now, admitted = 0.0, []
    admit = ledger._admit

    def noting(sequence, *how):
        done = admit(sequence, *how)
        if done:
            admitted.append(sequence.index)
        return done

    ledger._admit = noting
    while not ledger.idle:
        step = policy.next_step(ledger, now)
        if step:
            ledger.advance(step)
        ledger.check()
        now += step_s
        assert now < 20_000, "some sequence never ends"
    return submitted, admitted, ledger
