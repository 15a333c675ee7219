"""Slotgate: one OpenAI-compatible address in front of several self-hosted LLM engines."""

__version__ = "0.1.0"
