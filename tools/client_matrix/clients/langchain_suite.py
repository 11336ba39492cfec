"""LangChain's integration tests for chat models (langchain-tests), run by langchain_client.py.

Images are declared unsupported, as the server refuses them; so are the tests of other model names, of which a server has
one. Tools and JSON are supported. What the server enforces is the form of a call or an answer; tests that also ask for
its sense need a model that is clever enough, and are declared for the small model of this run.
"""

from __future__ import annotations

from typing import Any

import pytest
from check import INSTRUCT
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

needs_sense = pytest.mark.xfail(
    strict=False,
    reason="the form is right, the sense is up to the model: one of 135 million parameters does not always find it",
)


class TestPaclm(ChatModelIntegrationTests):
    """ChatOpenAI against the server."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        """The class under test."""
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        """How it finds the server."""
        server = {"model": INSTRUCT.model, "base_url": INSTRUCT.url, "api_key": INSTRUCT.key}
        return {**server, "stream_usage": True, "temperature": 1, "max_tokens": 500}

    @property
    def has_tool_calling(self) -> bool:
        """Tools are offered."""
        return True

    @property
    def has_tool_choice(self) -> bool:
        """A call can be forced, of any tool or of a named one."""
        return True

    @property
    def has_structured_output(self) -> bool:
        """By JSON schema."""
        return True

    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        """The server enforces the schema."""
        return {"method": "json_schema"}

    @property
    def supports_json_mode(self) -> bool:
        """Any JSON object."""
        return True

    @property
    def supports_image_inputs(self) -> bool:
        """Refused."""
        return False


class TestPaclmFunctionCalling(TestPaclm):
    """Structured output by a forced call instead."""

    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        """The schema is the tool's."""
        return {"method": "function_calling"}
