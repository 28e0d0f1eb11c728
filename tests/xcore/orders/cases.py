"""Sequences with hints for every order, and a ledger that runs them to their ends."""

from hypothesis import strategies as st

from xcore.applications.demand import ApplicationDemand, ServiceRates
from xcore.applications.demand_graph import END, DemandGraph, DemandStep, JointRecords
from xcore.batching import BlockPool, Hints, Ledger, Sequence
from xcore.orders.ranked_demands import RankedDemands
from xcore.policies.chunked import ChunkedPolicy

ROWS = st.lists(
    st.tuples(st.integers(1, 30), st.integers(1, 12), st.integers(0, 30), st.sampled_from("abc"), st.integers(0, 60)),
    min_size=1,
    max_size=14,
)
"""Input and output tokens, arrival, client (application, service), deadline."""


def demands(*sizes, refine=True):
    """Applications a, b, …: a call "first" and a call "second", with outputs of these sizes, the second's five times.

    The output of the first call predicts that of the second.
    """
    models = {}
    for name, outputs in zip("abc", sizes, strict=False):
        ones = (1,) * len(outputs)
        units = (
            DemandStep("first", "llm", ("second",) * len(outputs), ones, outputs, ones),
            DemandStep("second", "llm", (END,) * len(outputs), ones, tuple(5 * o for o in outputs), ones),
        )
        joint = JointRecords("first", "second", tuple((1, o, 1, 1, 5 * o, 1) for o in outputs) * 10)
        graph = DemandGraph(1, name, ("first",), units, (joint,))
        models[name] = ApplicationDemand(graph, ServiceRates(0.125, 1.0))
    return RankedDemands(models, refine)


DEMANDS = demands((2, 30), (10, 11), (1, 50, 60))


def hints(tokens, output, arrival, name, deadline):
    """All hints, of times in which a token of an output takes a second and one of a prompt a tenth."""
    return Hints(
        application=name,
        run=f"{name}{output % 4}",
        unit=("first", "second")[tokens % 2],
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
