"""The format of an output, from a body's keys to a grammar for the engine."""

import json
import re
from dataclasses import dataclass

from xcore.errors import InputError, refusing
from xserver.http.api_error import ApiError, invalid
from xserver.http.schemas import ResponseFormat, Sampled, StructuredOutputs
from xserver.http.served_model import ServedModel
from xserver.text.message_parts import Reasoning
from xserver.text.tool_grammar import ONE_LINE, Thinking, answer_grammar, lark_text, without_neutral

FORMAT_KEYS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
"""The keys of a body that may give its outputs a format."""


@dataclass(frozen=True)
class OutputFormat:
    """A constraint on an answer, given by the key `param` of a body."""

    param: str
    lark: str
    """The answer as a Lark expression, or if `whole` a complete Lark grammar."""
    whole: bool = False

    def grammar(self, thinking: Thinking | None) -> str:
        """Return the grammar of an output, with its reasoning."""
        if not self.whole:
            return answer_grammar(self.lark, thinking)
        if thinking:
            raise invalid(
                f"'{self.param}' has a grammar, which can't be combined with a model's reasoning.", self.param
            )
        return self.lark


def output_format(body: Sampled, model: ServedModel) -> OutputFormat | None:
    """Return the format that a body requests; None for any text. ApiError for several formats."""
    formats = []
    if body.response_format is not None and body.response_format.type != "text":
        formats.append(OutputFormat("response_format", _json(_schema_of(body.response_format), model)))
    if body.structured_outputs is not None:
        formats += _structured(body.structured_outputs, "structured_outputs", model)
    guided = StructuredOutputs.model_construct(
        json_schema=body.guided_json, regex=body.guided_regex, choice=body.guided_choice, grammar=body.guided_grammar
    )
    formats += _structured(guided, "guided_", model)
    if len(formats) > 1:
        names = " and ".join(dict.fromkeys(f"'{each.param}'" for each in formats))
        raise invalid(f"The output has several formats, from {names}: keep one of them.", formats[1].param)
    return formats[0] if formats else None


def thinking_of(reasoning: Reasoning | None, model: ServedModel, prompt: str) -> Thinking | None:
    """Return the reasoning for a grammar; None if the model marks none."""
    if reasoning is None:
        return None
    begin, end = (lark_text(mark, model.special_token) for mark in (reasoning.begin, reasoning.end))
    return Thinking(begin, end, reasoning.begun_in(prompt))


def _structured(asked: StructuredOutputs, param: str, model: ServedModel) -> list[OutputFormat]:
    """Return the formats of vLLM's constraints; the name of a `guided_` key is completed."""

    def named(key: str) -> str:
        return param + key if param.endswith("_") else param

    def made(key: str, lark: str, whole: bool = False) -> OutputFormat:
        return OutputFormat(named(key), lark, whole)

    formats = []
    if asked.json_schema is not None:
        formats.append(made("json", _json(_document(asked.json_schema, named("json")), model)))
    if asked.json_object:
        formats.append(made("json_object", _json({"type": "object"}, model)))
    if asked.regex is not None:
        slashes_escaped = re.sub(
            r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], asked.regex, flags=re.S
        )
        formats.append(made("regex", f"/{slashes_escaped}/"))
    if asked.choice is not None:
        formats.append(made("choice", f"/{'|'.join(map(_regex_of, asked.choice))}/"))
    if asked.grammar is not None:
        formats.append(made("grammar", _lark(asked.grammar, named("grammar")), whole=True))
    return formats


def _regex_of(text: str) -> str:
    """Return the regular expression of one text. As strings of a rule, 2,000 texts would be too many for llguidance."""
    return re.sub("[^0-9A-Za-z]", lambda found: rf"\x{{{ord(found[0]):x}}}", text)


def _json(schema: dict[str, object], model: ServedModel) -> str:
    """Return the Lark expression of JSON that follows a schema."""
    spaces = {} if model.json_whitespace else {"x-guidance": ONE_LINE}
    return f"%json {json.dumps(without_neutral(schema) | spaces)}"


def _schema_of(wanted: ResponseFormat) -> dict[str, object]:
    if wanted.type == "json_object":
        return {"type": "object"}
    if wanted.json_schema is None or wanted.json_schema.json_schema is None:
        raise invalid("'response_format.json_schema.schema' is missing.", "response_format")
    return wanted.json_schema.json_schema


def _document(schema: dict[str, object] | str, param: str) -> dict[str, object]:
    """Return a schema that may be given as a text."""
    try:
        document = json.loads(schema) if isinstance(schema, str) else schema
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise invalid("The JSON schema is not a JSON object.", param)
    return document


def _lark(grammar: str, param: str) -> str:
    """Return a Lark grammar; one in EBNF with `::=`, as vLLM also takes it, is converted."""
    if "::=" not in grammar:
        return grammar
    try:
        with refusing("The grammar can't be converted to Lark"):
            from llguidance.gbnf_to_lark import any_to_lark

            return str(any_to_lark(grammar))
    except (InputError, ImportError) as error:
        raise _refused(str(error), param) from None


def _refused(why: str, param: str) -> ApiError:
    return invalid(why[:300], param)
