"""LangChain's integration tests for chat models (langchain-tests), run by langchain_client.py.

Tools, JSON and images are declared unsupported, as the server refuses them.
"""

from __future__ import annotations

from typing import Any

from check import HALF
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestPaclm(ChatModelIntegrationTests):
    """ChatOpenAI against the server."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        """The class under test."""
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        """How it finds the server."""
        return {"model": HALF.model, "base_url": HALF.url, "api_key": HALF.key, "stream_usage": True}

    @property
    def has_tool_calling(self) -> bool:
        """Tools are refused."""
        return False

    @property
    def has_structured_output(self) -> bool:
        """So is JSON."""
        return False

    @property
    def supports_json_mode(self) -> bool:
        """In either form."""
        return False

    @property
    def supports_image_inputs(self) -> bool:
        """And images."""
        return False
