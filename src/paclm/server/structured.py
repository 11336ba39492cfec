"""Structured output: from `response_format`, `structured_outputs` and `tools` to one grammar."""

from __future__ import annotations

from paclm.curator.grammar import (
    Grammar,
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    regex_grammar,
    user_grammar,
)
from paclm.errors import InvalidInput
from paclm.server.chat_schemas import Ask, ChatAsk
from paclm.server.forced_choice import forced_tool_choice
from paclm.server.refusals import invalid
from paclm.server.schemas import ResponseFormat, StructuredOutputs
from paclm.server.tool_calls import call_grammar, call_or_answer_grammar, call_or_text_grammar


def grammar_of(ask: Ask) -> Grammar | None:
    """What the answers must look like; None if they may be any text. Refuses what is no grammar."""
    if not ask.is_structured:
        return None
    try:
        answer = _answer_grammar(ask.response_format, ask.structured_outputs)
        functions = ask.callable_tools if isinstance(ask, ChatAsk) else []
        if not functions:
            return answer
        if isinstance(ask, ChatAsk) and ask.must_call:
            return call_grammar(functions)
        return call_or_text_grammar(functions) if answer is None else call_or_answer_grammar(functions, answer)
    except InvalidInput as error:
        raise invalid(str(error), field_of(ask)) from None


def forced_choice_of(ask: Ask) -> str | None:
    """Why the answer would be a choice between texts that the caller wrote, in a sentence; None if it is none."""
    functions = ask.callable_tools if isinstance(ask, ChatAsk) else []
    schemas = [function.parameters or {} for function in functions]
    outputs, wanted = ask.structured_outputs, ask.response_format
    try:
        if isinstance(ask, ChatAsk) and ask.must_call:
            return forced_tool_choice("required", schemas)
        if functions and (outputs is not None or (wanted is not None and wanted.type != "text")):
            return "A tool call or an answer in a form of its own is a choice between two that the caller wrote."
        if outputs is not None and outputs.json_ is None and not outputs.json_object:
            return "regex, choice and grammar let the model choose between texts that the caller wrote."
        schemas += [] if outputs is None or outputs.json_ is None else [outputs.json_]
        schemas += [] if wanted is None or wanted.json_schema is None else [wanted.json_schema.schema_]
        return forced_tool_choice("auto", schemas)
    except InvalidInput as error:
        raise invalid(str(error), field_of(ask)) from None


def field_of(ask: Ask) -> str:
    """The field of a request that gives its grammar."""
    if isinstance(ask, ChatAsk) and ask.callable_tools:
        return "tools"
    return "response_format" if ask.structured_outputs is None else "structured_outputs"


def _answer_grammar(wanted: ResponseFormat | None, outputs: StructuredOutputs | None) -> Grammar | None:
    if outputs is not None:
        return _output_grammar(outputs)
    if wanted is None or wanted.type == "text":
        return None
    return json_object_grammar() if wanted.json_schema is None else json_schema_grammar(wanted.json_schema.schema_)


def _output_grammar(outputs: StructuredOutputs) -> Grammar:
    if outputs.json_ is not None:
        return json_schema_grammar(outputs.json_)
    if outputs.regex is not None:
        return regex_grammar(outputs.regex)
    if outputs.choice is not None:
        return choice_grammar(outputs.choice)
    return json_object_grammar() if outputs.grammar is None else user_grammar(outputs.grammar)
