"""The grammar of the whole answer, under each of the names that clients have for it."""

from __future__ import annotations

import re
from typing import Any

from ...schemas.bounds import load_json
from ...schemas.errors import InvalidRequest
from ...schemas.openai.completions import ChatRequest, CompletionRequest, StructuredOutputs
from ...schemas.params import Grammar
from ..grammar.json_schema import any_json_object, choice_grammar, ebnf_grammar, json_schema_grammar, regex_grammar

_UNSTRUCTURED = StructuredOutputs()


def response_grammar(request: ChatRequest | CompletionRequest) -> tuple[Grammar | None, str]:
    """The grammar that `response_format` or a parameter of another server asks for, and the parameter's name.

    Two that ask for the same are one: clients send the new name of a parameter beside the old one. Raises
    `InvalidRequest`.
    """
    own = request.structured_outputs or _UNSTRUCTURED
    asked: dict[str, Any] = {
        "response_format": request.response_format,
        "guided_json": request.guided_json,
        "guided_regex": request.guided_regex,
        "guided_choice": request.guided_choice,
        "guided_grammar": request.guided_grammar,
        "regex": request.regex or None,
        "ebnf": request.ebnf or None,
        "grammar": request.grammar_ or None,
        "json_schema": request.json_schema or None,
        "structured_outputs.json": own.json_,
        "structured_outputs.regex": own.regex,
        "structured_outputs.choice": own.choice,
        "structured_outputs.grammar": own.grammar,
        "structured_outputs.json_object": own.json_object or None,
    }
    given = [name for name, value in asked.items() if value is not None]
    kinds = {re.split("guided_|[.]", name)[-1] for name in given}
    if len(given) > 1 and (len(kinds) > 1 or any(asked[name] != asked[given[0]] for name in given)):
        raise InvalidRequest(f"{' and '.join(given)} exclude each other; give one.", param=given[0])
    param = given[0] if given else ""
    match re.split("guided_|[.]", param)[-1]:
        case "json" | "json_schema":
            return json_schema_grammar(_schema(asked[param], param), path=param), param
        case "regex":
            return regex_grammar(asked[param], path=param), param
        case "choice":
            return choice_grammar(asked[param], path=param), param
        case "grammar" | "ebnf":
            return ebnf_grammar(asked[param], path=param), param
        case "json_object":
            return any_json_object(), param
    form = request.response_format
    if form is None or form.type == "text":
        return None, ""
    schema, path, strict = form.schema_, "response_format.schema", False
    if form.json_schema is not None:
        schema, path = form.json_schema.schema_, "response_format.json_schema.schema"
        strict = bool(form.json_schema.strict)
    return any_json_object() if schema is None else json_schema_grammar(schema, path=path, strict=strict), param


def _schema(value: dict[str, Any] | str, path: str) -> dict[str, Any]:
    """A JSON Schema; like vLLM's, the parameter takes an object or JSON text."""
    if isinstance(value, dict):
        return value
    try:
        schema = load_json(value.encode())
    except ValueError as error:
        raise InvalidRequest(f"{path} {error}", param=path) from None
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{path}: a JSON Schema must be an object.", param=path)
    return schema
