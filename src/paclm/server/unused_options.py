"""Fields of OpenAI's that are accepted while they change nothing, and why any other value is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError, core_schema


def problem(sentence: str, field: str | None = None) -> PydanticCustomError:
    """An error of a check; it must not repeat what the client sent. A check of several fields says which to change."""
    return PydanticCustomError("paclm", sentence, {"field": field})


@dataclass(frozen=True, slots=True)
class Only:
    """Marks a field of OpenAI's that is accepted while it changes nothing: with one of these values.

    An object whose entries are all null counts as empty: LiteLLM returns `provider_specific_fields` like that.
    """

    values: tuple[object, ...]
    why: str
    schema: dict[str, Any]

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> core_schema.CoreSchema:
        """The check."""
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: object, handler: object) -> dict[str, Any]:
        """The entry in the OpenAPI document."""
        return {"anyOf": [self.schema, {"type": "null"}], "description": f"{self.why[0].upper()}{self.why[1:]}."}

    def _check(self, value: object) -> object:
        plain = {} if isinstance(value, dict) and all(entry is None for entry in value.values()) else value
        if any(plain == taken and isinstance(plain, bool) == isinstance(taken, bool) for taken in self.values):
            return plain
        raise problem(self.why)


LONGEST_REMARK, _MOST_METADATA, _LONGEST_NAME = 512, 16, 64
_NO_SHAPING = "is not offered: requests cannot re-weight the candidates"
_CUT = "must be 1: the candidates are the model's top k, and requests cannot cut them further"
_NO_FUNCTIONS = "is not offered: OpenAI replaced functions by tools. Use tools and tool_choice"
_NO_FUNCTION_CALL = "is not offered: OpenAI replaced functions by tools. Use tool_calls"
_NO_IMAGES, _NO_AUDIO = "images are not offered: this model reads text", "audio is not offered: this model uses text"
_NO_FILES = "files are not offered: this model reads text"
_NO_REASONING = "is not offered: this model answers at once and does not reason first"
_UNREAD = "must be empty: of a message only role, content and tool calls are read"
PARTS = {
    "image_url": _NO_IMAGES,
    "input_image": _NO_IMAGES,
    "image": _NO_IMAGES,
    "input_audio": _NO_AUDIO,
    "file": _NO_FILES,
    "input_file": _NO_FILES,
}
"""Parts of a message that OpenAI's API knows, and why they are refused."""
_LIST_OF_TEXT = {"type": "array", "items": {"const": "text"}, "minItems": 1, "maxItems": 1}
"""Written out, because generators of clients do not read a constant that is a list."""
_NOTHING: list[dict[str, Any]] = [
    {"type": "string", "maxLength": 0},
    {"type": "array", "items": {}, "maxItems": 0},
    {"type": "object", "additionalProperties": {"type": "null"}},
]


def _read_metadata(value: object) -> dict[str, str]:
    """Read whole, because the keys are the client's and an error must not name them."""
    if (
        isinstance(value, dict)
        and len(value) <= _MOST_METADATA
        and all(len(name) <= _LONGEST_NAME for name in value)  # a response returns them, up to three times
        and all(isinstance(text, str) and len(text) <= LONGEST_REMARK for text in value.values())
    ):
        return value
    raise problem(
        f"must be an object of at most {_MOST_METADATA} entries, each a text of at most {LONGEST_REMARK} characters "
        f"under a name of at most {_LONGEST_NAME}"
    )


def one_of(why: str, *values: str | float) -> Only:
    """One of these, or left out."""
    return Only(values, why, {"const": values[0]} if len(values) == 1 else {"enum": list(values)})


def empty(why: str) -> Only:
    """An empty text, list or object, or left out."""
    return Only(("", [], {}), why, {"anyOf": _NOTHING})


def none_of(why: str) -> Only:
    """Always left out."""
    return Only((), why, {"type": "null"})


Zero = Annotated[object, one_of(_NO_SHAPING, 0)]
NoBias = Annotated[object, Only(({},), _NO_SHAPING, {"type": "object", "additionalProperties": {"type": "null"}})]
NoFunctions = Annotated[object, Only(([],), _NO_FUNCTIONS, {"type": "array", "items": {}, "maxItems": 0})]
NoFunctionChoice = Annotated[object, one_of(_NO_FUNCTIONS, "none", "auto")]
Whole = Annotated[object, one_of(_CUT, 1)]
OneOnly = Annotated[
    object, one_of("must be 1: choosing the best of several answers would charge for all of them and show one", 1)
]
NoSuffix = Annotated[object, one_of("is not offered: the model continues a text and does not fill gaps", "")]
TextModality = Annotated[object, Only((["text"],), _NO_AUDIO, _LIST_OF_TEXT)]
NotStored = Annotated[object, one_of("must be false: no answer is stored to be read later", False)]
AnyTier = Annotated[object, one_of("is not offered: all requests are served alike", "auto", "default")]
NoReasoning = Annotated[object, one_of(_NO_REASONING, "none")]
UsualVerbosity = Annotated[object, one_of("is not offered: max_tokens limits an answer", "medium")]
Unread = Annotated[object, empty(_UNREAD)]
NoCalls = Annotated[object, empty(_NO_FUNCTION_CALL)]
NoAudio = Annotated[object, empty(_NO_AUDIO)]
NoImages = Annotated[object, empty(_NO_IMAGES)]
Metadata = Annotated[
    dict[str, str],
    PlainValidator(_read_metadata),
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": _MOST_METADATA,
            "propertyNames": {"maxLength": _LONGEST_NAME},
            "additionalProperties": {"type": "string", "maxLength": LONGEST_REMARK},
        }
    ),
]
