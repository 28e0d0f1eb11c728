"""Small cost tables and applications that several tests need."""

from xcore.specs.cost_table import CostTable, DegreeCosts, ModelCosts, PhaseLines
from xcore.specs.workload import LengthDistribution
from xmulti.files.call_graph import CallGraph, GraphEdge, GraphNode


def lines(seconds, per_work):
    """Iterations of `seconds` and more, that take longer with batches and lengths."""
    batches = (1, 4, 512)
    compute = tuple((per_work, seconds * (1 + batch / 64)) for batch in batches)
    return PhaseLines(batches, compute, ((1e-6, 1e-4),) * 3, ((2e-6, 2e-4),) * 3)


def degree(tp, speed=1.0, kv_tokens=4096, load_s=2.0):
    """A degree whose iterations are by `speed` faster."""
    phases = (lines(0.02 / speed, 1e-6 / speed), lines(0.01 / speed, 1e-6 / speed))
    return DegreeCosts(tp, 100.0 / tp, 0.5 / tp, kv_tokens, load_s, *phases)


def model(name="small", speed=1.0, kv_tokens=4096, load_s=2.0, context=512):
    """A model at the degrees 1 and 2, with outputs of 1 to 40 tokens."""
    degrees = (degree(1, speed, kv_tokens, load_s), degree(2, 1.6 * speed, 2 * kv_tokens, 1.5 * load_s))
    outputs = LengthDistribution((1, 8, 20, 40), (0.1, 0.4, 0.3, 0.2))
    return ModelCosts(name, context, degrees, outputs)


def table(*models):
    return CostTable(CostTable.VERSION, "imagined", "host", models or (model(),))


def ensemble(count=2, calls=20):
    """A graph and its table: so many models, each slower than the one before, without edges."""
    models = tuple(model(f"m{k}", 1 / (k + 1), load_s=1.0 + k) for k in range(count))
    nodes = tuple(GraphNode(f"n{k}", f"m{k}", tuple(range(5, 5 + calls))) for k in range(count))
    return CallGraph(nodes), table(*models)


def chain_and_judge(documents=6):
    """A graph and its table: documents of several rounds, then one call for each final summary; and a node beside."""
    rounds = tuple(1 + document % 3 for document in range(documents))
    nodes = (
        GraphNode("chain", "m0", (30,) * documents, rounds=rounds, longest_output=20),
        GraphNode("judge", "m1", prompt=10, times=2),
        GraphNode("beside", "m1", (7,) * 30),
    )
    edges = (GraphEdge("chain", "chain"), GraphEdge("chain", "judge", "final"))
    return CallGraph(nodes, edges), table(model("m0"), model("m1", 0.7, load_s=1.0))
