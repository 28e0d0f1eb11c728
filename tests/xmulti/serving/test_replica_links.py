"""The dispatcher of a run's requests, on links that are made up."""

from types import SimpleNamespace

from xmulti.serving.replica_links import replica_links
from xserver.engines.unit_options import EngineUnitOptions, UnitModel


def link():
    made = SimpleNamespace(outputs={}, failed=False)
    made.add = lambda request: made.outputs.setdefault(request, request)
    return made


def test_requests_go_to_the_engine_with_the_fewest_of_all_its_models():
    """Model `a` is alone on one engine, and beside `b` on another."""
    names = {0: "a", 1: "a", 2: "b"}
    units = [EngineUnitOptions(tuple(UnitModel(None, names[p], place=p) for p in own), ()) for own in ((0,), (1, 2))]
    links = {place: link() for place in names}
    of_models = replica_links(units, links)
    for request in "pqr":
        of_models["b"].add(request)
    for request in "stuvw":
        of_models["a"].add(request)
    assert ["".join(links[place].outputs) for place in names] == ["stuv", "w", "pqr"]  # at 3 and 3 the first
    links[2].outputs.clear()
    of_models["a"].add("x")
    assert "".join(links[1].outputs) == "wx"
    links[1].failed, links[1].outputs = True, {}
    of_models["a"].add("y")
    assert "".join(links[0].outputs) == "stuvy" and not links[1].outputs
