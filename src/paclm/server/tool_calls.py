"""Tool calls: how they are asked for, written by the model, and read.

    <tool_call>
    {"name": "weather", "arguments": {"city": "Rome"}}
    </tool_call>

All models write this form, which many are trained on: the grammar allows no other, so that reading an answer takes no
guessing. The JSON is on one line, as `curator.grammar` writes it, so a line break ends it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from paclm.curator.grammar import UNFORCED, Grammar, grammar_with, json_rule
from paclm.server.chat_schemas import ChatAsk, Function, Message, ToolCall

BEGIN, END = "<tool_call>", "</tool_call>"
_HEAD = re.compile(re.escape(BEGIN) + r'\n\{"name": "([^"]+)", "arguments": ')
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_PLAIN = frozenset(("type", "properties", "required", "title", "description", "$schema", "$defs", "definitions"))
"""Keywords beside which `additionalProperties` changes nothing but what it says."""
_INSTRUCTIONS = (
    "You can call these functions. Each line describes one, with a JSON schema of its arguments:\n{functions}\n"
    "To call a function, write this form and nothing after it:\n"
    f'{BEGIN}\n{{{{"name": "NAME", "arguments": {{{{ARGUMENTS}}}}}}}}\n{END}\n'
    "The result then comes between <tool_response> and </tool_response>."
)


# --- what the model reads ---------------------------------------------------------------------------------------------


def conversation(ask: ChatAsk, template: object) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Messages and options for a chat template. One that does not know tools gets them as text, in messages."""
    shown = [] if ask.tool_choice == "none" else [tool.function for tool in ask.tools or ()]
    if _knows_tools(template):
        tools = {"tools": [_described(one) for one in shown]} if shown else {}
        return [_message(message) for message in ask.messages], tools
    messages: list[dict[str, Any]] = []
    for message in ask.messages:
        _add_as_text(messages, message)
    if shown:
        functions = "\n".join(json.dumps(_described(one)["function"], ensure_ascii=False) for one in shown)
        _add_instructions(messages, _INSTRUCTIONS.format(functions=functions))
    return messages, {}


def _knows_tools(template: object) -> bool:
    """Whether a template describes tools and calls in the form above."""
    texts = template.values() if isinstance(template, dict) else [template]  # of some models: by name
    marks = ("tools", "tool_calls", BEGIN)
    return any(
        isinstance(text, str) and all(mark in text for mark in marks) and "<function=" not in text for text in texts
    )


def _described(function: Function) -> dict[str, Any]:
    content = {"name": function.name, "description": function.description or "", "parameters": _parameters(function)}
    return {"type": "function", "function": content}


def _parameters(function: Function) -> dict[str, Any]:
    return _NO_ARGUMENTS if function.parameters is None else function.parameters or {"type": "object"}


def _arguments_schema(function: Function) -> dict[str, Any]:
    """What a call may hold. A schema that lists arguments and says nothing of others allows no others: clients pass
    them by name, and a function that gets one it does not have fails."""
    schema = _parameters(function)
    properties, required = schema.get("properties"), schema.get("required", [])
    if not (schema.keys() <= _PLAIN and isinstance(properties, dict) and isinstance(required, list)):
        return schema
    is_listed = all(name in properties for name in required if isinstance(name, str))
    return {**schema, "additionalProperties": False} if is_listed else schema


def _message(message: Message) -> dict[str, Any]:
    """As templates that know tools take it: the arguments of a call as an object."""
    found: dict[str, Any] = {"role": message.template_role, "content": message.text}
    if message.tool_calls:
        calls = [{"name": call.function.name, "arguments": _arguments(call)} for call in message.tool_calls]
        found["tool_calls"] = [
            {"id": call.id, "type": "function", "function": content}
            for call, content in zip(message.tool_calls, calls, strict=True)
        ]
    if message.role == "tool":
        found["tool_call_id"] = message.tool_call_id
    return found


def _arguments(call: ToolCall) -> Any:
    try:
        return json.loads(call.function.arguments)
    except (ValueError, RecursionError):  # an answer that was cut off
        return call.function.arguments


def _add_as_text(messages: list[dict[str, Any]], message: Message) -> None:
    """Calls in the form above. Results of calls, and what the user says next, become one message of the user."""
    role, text = message.template_role, message.text
    for call in message.tool_calls or ():
        written = json.dumps({"name": call.function.name, "arguments": _arguments(call)}, ensure_ascii=False)
        text += ("\n" if text else "") + f"{BEGIN}\n{written}\n{END}"
    if role == "tool":
        role, text = "user", f"<tool_response>\n{text}\n</tool_response>"
    if role == "user" and messages and messages[-1]["role"] == "user" and "</tool_response>" in messages[-1]["content"]:
        messages[-1] = {"role": "user", "content": f"{messages[-1]['content']}\n{text}"}
    else:
        messages.append({"role": role, "content": text})


def _add_instructions(messages: list[dict[str, Any]], text: str) -> None:
    if messages[0]["role"] == "system":
        messages[0] = {"role": "system", "content": f"{messages[0]['content']}\n\n{text}"}
    else:
        messages.insert(0, {"role": "system", "content": text})


# --- what the model may write -----------------------------------------------------------------------------------------


def call_grammar(functions: Sequence[Function]) -> Grammar:
    """One call, and nothing else."""
    return _with_calls(f"start: {_quoted(BEGIN)} call\n", functions)


def call_or_text_grammar(functions: Sequence[Function]) -> Grammar:
    """Text that does not contain the beginning of a call, or a call, perhaps after such text."""
    any_text = "/(?s:.*)/"
    return _with_calls(
        f"start: TEXT | before call\n"
        f"TEXT: {any_text} & ~/(?s:.*){BEGIN}(?s:.*)/\n"
        f"before[suffix={_quoted(BEGIN)}]: {any_text}\n",
        functions,
    )


def call_or_answer_grammar(functions: Sequence[Function], answer: Grammar) -> Grammar:
    """A call, or an answer in a form of its own."""
    text = answer.text.removeprefix(UNFORCED)
    both = _with_calls(f"start: {_quoted(BEGIN)} call | answer\nanswer: %lark {{\n{text}\n}}\n", functions)
    is_unforced = text != answer.text and not both.text.startswith(UNFORCED)  # the option holds for the whole grammar
    return Grammar(UNFORCED + both.text) if is_unforced else both


def _with_calls(rules: str, functions: Sequence[Function]) -> Grammar:
    """These rules with those of a call after its beginning; each name has the arguments of its own function."""
    schemas = [_arguments_schema(function) for function in functions]
    return grammar_with(rules + _call_rules(functions), schemas)


def _call_rules(functions: Sequence[Function]) -> str:
    numbers = range(len(functions))
    rules = [f"call: {_quoted(chr(10))} ({' | '.join(f'call_{n}' for n in numbers)}) {_quoted(f'{chr(10)}{END}')}"]
    for number, function in enumerate(functions):
        head = _quoted(f'{{"name": "{function.name}", "arguments": ')
        rules += [f'call_{number}: {head} arguments_{number} "}}"']
        rules += [f"arguments_{number}: {json_rule(_arguments_schema(function))}"]
    return "\n".join(rules)


def _quoted(text: str) -> str:
    return json.dumps(text)


# --- what it wrote ----------------------------------------------------------------------------------------------------


class AnswerPart(NamedTuple):
    """What a piece of an answer adds."""

    raw: str
    """As the model wrote it; empty if nothing can be shown yet."""
    content: str
    """Text outside of the call."""
    name: str | None
    """Of the function, with the piece in which it becomes known."""
    arguments: str
    """A piece of their JSON."""


class CallSplitter:
    """Splits an answer into text and a call, piece by piece; shows nothing that may be the beginning of a call."""

    def __init__(self) -> None:
        self._held = ""
        self._name: str | None = None
        self._arguments: list[str] = []
        self._is_over = False  # the arguments are

    @property
    def has_call(self) -> bool:
        """Whether the name of a function is known."""
        return self._name is not None

    @property
    def is_complete(self) -> bool:
        """Whether the call is there to its end."""
        return self._is_over and END in self._held

    def feed(self, text: str, *, is_last: bool = False) -> AnswerPart:
        """Take a piece and return what can be shown. What is left of an unfinished call at the end counts as text
        before its name is known, and as arguments afterwards."""
        known, before = self._held + text, self._name
        self._held = known
        content = "" if self.has_call else self._text(is_last)
        arguments = self._more_arguments(is_last) if self.has_call else ""
        name = self._name if before is None else None
        is_shown = bool(content or name or arguments or is_last)
        raw = (known if is_last else known[: len(known) - len(self._held)]) if is_shown else ""
        return AnswerPart(raw, content, name, arguments)

    def _text(self, is_last: bool) -> str:
        """Text before a call; reads the beginning of the call."""
        at = self._held.find(BEGIN)
        if at < 0:
            at = len(self._held) - _overlap(self._held, BEGIN)
        content, self._held = self._held[:at], self._held[at:]
        if found := _HEAD.match(self._held):
            self._name, self._held = found[1], self._held[found.end() :]
        elif is_last:
            content, self._held = content + self._held, ""
        return content

    def _more_arguments(self, is_last: bool) -> str:
        """The brace before the line break closes the call and not its arguments."""
        if self._is_over:
            return ""
        line, line_break, _ = self._held.partition("\n")
        self._is_over = bool(line_break)
        is_closed = line.endswith("}") and (self._is_over or not is_last or self._is_json(line[:-1]))
        more = line[:-1] if is_closed else line
        self._held = self._held[len(more) :]
        self._arguments.append(more)
        return more

    def _is_json(self, more: str) -> bool:
        try:
            json.loads("".join((*self._arguments, more)))
        except (ValueError, RecursionError):
            return False
        return True


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of the text with which the mark begins."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-size:])), 0)
