"""Every spec is written and read back unchanged, and a document that is wrong is refused in one sentence."""

import itertools
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.xcore.small_specs import profile, schedule
from xcore import document
from xcore.errors import InputError
from xcore.requests.request import Request, Result
from xcore.spec import Spec
from xcore.specs.builtin_models import HUB_IDS, builtin_model
from xcore.specs.cluster import ClusterSpec, parse_cluster
from xcore.specs.estimate import Estimate
from xcore.specs.model import ModelSpec
from xcore.specs.profile import Profile
from xcore.specs.schedule import Schedule
from xcore.specs.timeline import Span, Timeline
from xcore.specs.workload import LengthDistribution, RequestLengths, Workload, task

finite = st.floats(0, 1e9)
perhaps = st.none() | finite


def round_trip(spec):
    text = document.dumps(document.to_dict(spec))
    return document.from_dict(type(spec), json.loads(text, parse_constant=_not_json), "it")


def _not_json(constant):
    raise AssertionError(f"{constant} is no JSON")


@pytest.mark.parametrize("name", HUB_IDS)
def test_models(name):
    assert round_trip(builtin_model(name)) == builtin_model(name)


@pytest.mark.parametrize("text", ["local", "4xA40", "2x8xA100-80GB", "1xH200-SXM"])
def test_clusters(text):
    assert round_trip(parse_cluster(text)) == parse_cluster(text)


@given(
    samples=st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 5000), finite), min_size=1, max_size=20),
    rate=st.none() | st.floats(0.1, 100),
)
@example(samples=[(1, 1, 0.0), (1, 1, 5e-324)], rate=1.0)
def test_workloads(samples, rate):
    from dataclasses import replace

    workload = replace(Workload.from_requests("w", [RequestLengths(*s) for s in samples]), arrival_rate=rate)
    assert round_trip(workload) == workload
    assert round_trip(workload.without_requests) == workload.without_requests


@pytest.mark.parametrize("policy", ["static", "orca", "chunked", "rra"])
def test_schedules(policy):
    assert round_trip(schedule(policy)) == schedule(policy)


def test_profiles():
    assert round_trip(profile()) == profile()
    assert round_trip(profile()).fingerprint == profile().fingerprint


@given(st.builds(Estimate, finite, finite, *[perhaps] * 7, memory_bytes=st.tuples(finite), feasible=st.booleans()))
def test_estimates(estimate):
    assert round_trip(estimate) == estimate


@given(
    st.lists(
        st.builds(Span, st.integers(0, 3), st.integers(0, 3), st.just("decode"), st.integers(0, 3), finite, finite)
    )
)
def test_timelines(spans):
    timeline = Timeline("measured", tuple(spans))
    assert round_trip(timeline) == timeline


@given(st.lists(st.integers(0, 99), max_size=5), perhaps, st.text(max_size=9))
def test_requests_and_results(ids, moment, text):
    request = Request("a", tuple(ids), 3)
    result = Result("a", 3, tuple(ids), "stop", 0.0, moment, moment, 1.0, text=text)
    assert round_trip(request) == request
    assert round_trip(result) == result


@pytest.mark.parametrize("spec", [profile(), schedule(), task("S"), parse_cluster("4xA40"), builtin_model("gpt2")])
def test_unknown_keys_and_wrong_types_are_refused(spec):
    data = document.to_dict(spec)
    with pytest.raises(InputError, match="surprise"):
        document.from_dict(type(spec), data | {"surprise": 1}, "it")
    with pytest.raises(InputError, match=rf"^it: {next(iter(data))} must be .* \(got {{'a': 1}}\)"):
        document.from_dict(type(spec), data | {next(iter(data)): {"a": 1}}, "it")
    with pytest.raises(InputError, match=r"^it: the top level must be a group of keys"):
        document.from_dict(type(spec), [data], "it")
    every = {name: {"a": 1} if isinstance(data[name], str) else "x" for name in list(data)[:3]}
    with pytest.raises(InputError) as refused:
        document.from_dict(type(spec), every, "it")
    assert all(f"{name} must be" in str(refused.value) for name in every)  # all at once


@pytest.mark.parametrize("spec", [profile(), schedule()])
def test_another_version_is_refused(spec):
    with pytest.raises(InputError, match="version 99"):
        document.from_dict(type(spec), document.to_dict(spec) | {"version": 99}, "it")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'{"a": 1'])
def test_torn_files_are_named(tmp_path, content):
    path = tmp_path / "schedule.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"schedule\.json' is (not (valid JSON|in UTF-8)|in UTF-16)"):
        document.read(Schedule, path)
    with pytest.raises(InputError, match="There is no file"):
        document.read(Profile, tmp_path / "gone.json")


def test_what_is_not_a_number_is_never_written(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        document.dumps({"a": math.nan})
    (tmp_path / "f.json").write_text("before")
    with pytest.raises(ValueError, match="JSON compliant"):
        document.write_text(tmp_path / "f.json", document.dumps({"a": math.inf}))
    assert (tmp_path / "f.json").read_text() == "before"


def test_files_are_written_whole(tmp_path):
    document.write(tmp_path / "m.json", builtin_model("gpt2"))
    assert document.read(ModelSpec, tmp_path / "m.json") == builtin_model("gpt2")
    assert [p.name for p in tmp_path.iterdir()] == ["m.json"]


def test_different_values_have_different_fingerprints():
    assert document.fingerprint(task("S")) == document.fingerprint(task("S"))
    assert document.fingerprint(task("S")) != document.fingerprint(task("T"))
    assert isinstance(round_trip(parse_cluster("4xA40")), ClusterSpec)
    assert LengthDistribution.fixed(3) != LengthDistribution.fixed(4)


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"a": NaN}', "NaN is not a number"),
        ('{"a": -Infinity}', "-Infinity is not a number"),
        ('{"a": "\\ud800"}', "half of a surrogate pair"),
        ('{"a": ' + "9" * 5000 + "}", "digits"),
        (DEEP, "nested too deeply"),
        ('{"a": 1,\n"b": }', "line 2, column 6"),
        ('{"a": "b', "Unterminated string starting at column 7"),
    ],
)
def test_invalid_json_is_refused_in_one_sentence(text, why):
    with pytest.raises(InputError, match=rf"^It is not valid JSON: .*{why}[^\n]*\.$"):
        document.parse_json(text, "It")


def test_a_pair_of_surrogates_is_text_and_what_is_none_is_written_as_an_escape():
    assert document.parse_json('"\\ud83d\\ude00"', "It") == "\U0001f600"
    assert document.dumps({"path": "a\udcff \u00b1"}, indent=None) == '{"path": "a\\udcff \u00b1"}'


def test_a_byte_order_mark_is_no_content(tmp_path):
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert document.read_json(tmp_path / "a.json") == {"a": 1}


def test_only_plain_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, why in ((tmp_path / "pipe", "a pipe or a device"), (Path("/dev/zero"), "a device"), (tmp_path, "folder")):
        for read in (document.read_json, lambda path: document.read_yaml(path, "cluster")):
            with pytest.raises(InputError, match=why):
                read(path)


def test_a_line_without_an_end_is_not_read_to_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(document, "MAX_LINE", 10)
    (tmp_path / "t").write_text("short\n" + "x" * 11)
    lines = document.read_lines(tmp_path / "t")
    assert next(lines) == "short\n"
    with pytest.raises(InputError, match="a line of more than 10 characters"):
        next(lines)


def test_a_link_stays_where_its_file_is_written(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    document.write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new"


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 9)}]\n" for before, name in itertools.pairwise("abcdefghij")
)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (BOMB, "a is not known; b is not known"),
        ("nodes: &a [*a]\ndevices_per_node: 1\nkind: A40\n", "nodes"),
        ("[" * 5000 + "]" * 5000, "can't be read as YAML"),
        ("day: 2024-99-99", "can't be read as YAML"),
        ("# " + "x" * document.MAX_YAML_BYTES, "bytes"),
    ],
)
def test_a_hostile_yaml_file_costs_no_time(tmp_path, text, why):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(InputError, match=why) as refused:
        parse_cluster(str(tmp_path / "c.yaml"))
    assert len(str(refused.value)) < 1000


@dataclass(frozen=True)
class Either(Spec):
    """Values of several types."""

    rounds: int | tuple[int, ...] | None = None
    load: str | dict[int, str] | None = None


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({"rounds": "x"}, "rounds must be a whole number or a list (got 'x')"),
        ({"rounds": [1, "x"]}, "rounds.1 must be a whole number (got 'x')"),
        ({"load": ["x"]}, "load must be text or a group of keys (got ['x'])"),
        ({"load": {"x": "5s"}}, "load.x must be a whole number (got 'x')"),
        ({"load": {"1": []}}, "load.1 must be text (got [])"),
    ],
)
def test_a_wrong_value_of_several_types_is_one_problem(data, problem):
    with pytest.raises(InputError) as refused:
        document.from_dict(Either, data, "it")
    assert str(refused.value) == f"it: {problem}."
