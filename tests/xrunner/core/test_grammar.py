"""Grammars: outputs that follow JSON schemas, and what can't be followed."""

import json
import sys
from dataclasses import replace

import pytest

from tests.xrunner import cells
from tests.xrunner.cells import requests
from xcore.errors import InputError
from xcore.requests.grammar import Grammars
from xcore.requests.requests import read_requests
from xrunner.core.engine import Engine
from xrunner.models import load_model

pytest.importorskip("llguidance", reason="llguidance is not installed: pip install -e '.[serve]'")
END = 256
SCHEMA = {
    "x-guidance": {"whitespace_flexible": False},
    "type": "object",
    "properties": {
        "name": {"enum": ["x", "yy"]},
        "many": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        "n": {"type": "integer", "minimum": -9, "maximum": 99},
    },
    "required": ["name", "many", "n"],
    "additionalProperties": False,
}
GRAMMARS = {"schema": json.dumps(SCHEMA), "document": json.dumps({"grammars": [{"json_schema": SCHEMA}]})}


@pytest.fixture(scope="module")
def model(directories):
    return load_model(directories["llama"])


@pytest.fixture(scope="module")
def tokenizer(directories):
    return directories["llama"] / "tokenizer.json"


def text_of(tokenizer, ids):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(tokenizer)).decode(list(ids))


@pytest.mark.parametrize("grammar", GRAMMARS.values(), ids=GRAMMARS)
def test_outputs_follow_a_json_schema(model, tokenizer, grammar):
    todo = requests([(5 + i, 60) for i in range(8)], temperature=1.5, grammar=grammar)
    found = Engine(model, cells.schedule(model.spec, "orca", kv_blocks=100), tokenizer=tokenizer).run(todo).results
    answers = [json.loads(text_of(tokenizer, result.output_ids)) for result in found]
    for answer in answers:
        assert list(answer) == ["name", "many", "n"] and answer["name"] in ("x", "yy")
        assert len(answer["many"]) <= 2 and all(isinstance(item, bool) for item in answer["many"])
        assert isinstance(answer["n"], int) and -9 <= answer["n"] <= 99
    assert {result.finish_reason for result in found} == {"stop"} and len({str(answer) for answer in answers}) > 4


def test_a_grammar_that_must_end_goes_before_the_shortest_length(model, tokenizer):
    (request,) = requests([(5, 20)], grammar="start: /a{3}/", min_tokens=10)
    (result,) = Engine(model, cells.schedule(model.spec), tokenizer=tokenizer).run([request]).results
    assert result.output_ids == (64, 64, 64) and result.finish_reason == "stop"


def test_a_length_that_is_reached_is_the_reason(model, tokenizer):
    (request,) = requests([(5, 2)], grammar="start: /a{3}/")
    (result,) = Engine(model, cells.schedule(model.spec), tokenizer=tokenizer).run([request]).results
    assert result.output_ids == (64, 64) and result.finish_reason == "length"


def test_a_grammar_that_becomes_too_complex_ends_its_request_with_an_error(model, tokenizer, monkeypatch):
    import llguidance

    make, limits = llguidance.LLMatcher, llguidance.LLParserLimits(max_items_in_row=3)
    grammars = Grammars(tokenizer, model.eos, model.spec.vocab)
    grammar = "start: (x | y | z)*\nx: /a/ x?\ny: /a/ y? x?\nz: /a/ z? y?"
    monkeypatch.setattr("llguidance.LLMatcher", lambda *given, **options: make(*given, **options, limits=limits))
    (request,) = requests([(5, 20)], grammar=grammar, logit_bias=((64, 100.0),))
    constraint = grammars.start(request)
    for _ in range(20):
        constraint.mask()
        constraint.consume(64)
    assert constraint.failed and constraint.complete
    (result,) = Engine(model, cells.schedule(model.spec), tokenizer=tokenizer).run([request]).results
    assert result.finish_reason == "error"


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("start: bad(", r"^Request '0' has a grammar, and llguidance refuses it: .*Expected token"),
        ("", r"^Request '0' has a grammar, and llguidance refuses it: Empty grammar\.$"),
        ('{"type": "nonsense"}', "Invalid type: nonsense"),
        ('{"type": "object"', "llguidance refuses it"),
        ('{"grammars": {}}', "llguidance refuses it"),
        ('{"grammars": [{"json_schema": {"type": "nonsense"}}]}', "Invalid type: nonsense"),
    ],
)
def test_what_is_no_grammar_is_refused(model, tokenizer, grammar, message):
    engine = Engine(model, cells.schedule(model.spec), tokenizer=tokenizer)
    (request,) = requests([(3, 3)], grammar=grammar)
    with pytest.raises(InputError, match=message) as error:
        engine.run([request])
    assert "\n" not in str(error.value)


def test_a_model_without_a_usable_tokenizer_has_no_grammars(model, tmp_path):
    (request,) = requests([(3, 3)], grammar="start: /a/")
    for path in (None, tmp_path / "tokenizer.json"):
        with pytest.raises(InputError, match=r"the model has no tokenizer\.json, and grammars need one"):
            Engine(model, cells.schedule(model.spec), tokenizer=path).run([request])
    path.write_text("{}")
    with pytest.raises(InputError, match=r"llguidance can't use '.*tokenizer\.json': "):
        Grammars(path, model.eos, 300).check(request)


def test_the_package_is_imported_for_a_grammar_alone(model, tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    engine = Engine(model, cells.schedule(model.spec), tokenizer=tokenizer)
    (request,) = requests([(3, 3)])
    assert len(engine.run([request]).results) == 1
    with pytest.raises(InputError, match="the package llguidance is not installed: pip install llguidance"):
        engine.run([replace(request, grammar="start: /a/")])


def test_a_bad_grammar_in_a_list_is_skipped_or_named(model, tokenizer, tmp_path):
    lines = [
        {"id": name, "prompt_ids": [1], "max_tokens": 4, "grammar": name} for name in ("start: /a/", "start: bad(")
    ]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = (str(tmp_path / "r.jsonl"), model.spec, None)
    check = Grammars(tokenizer, frozenset(), model.spec.vocab).check
    with pytest.raises(InputError, match=r"^Request 'start: bad\(' has a grammar, and llguidance refuses it"):
        read_requests(*given, check=check)
    requests, rejected = read_requests(*given, check=check, skip_invalid=True)
    assert [r.id for r in requests] == ["start: /a/"] and [r.result.id for r in rejected] == ["start: bad("]


@pytest.mark.parametrize(
    "schema", [{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, {"allOf": [{"$ref": "#"}]}]
)
def test_a_schema_that_no_output_can_begin_is_refused_before_it_runs(tokenizer, schema):
    """The compiler accepts a reference to itself; the first token has no choice then."""
    with pytest.raises(InputError, match=r"no token can begin|refuses it"):
        Grammars(tokenizer, frozenset([END]), 300).check(replace(requests()[0], grammar=json.dumps(schema)))
