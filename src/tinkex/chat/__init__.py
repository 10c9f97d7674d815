"""Conversations: messages, the model's own chat template, and reading what an assistant said.

Knows text and tokens. Nothing here knows HTTP, sampling or a server, so recipes, the command line
and the server's OpenAI and Anthropic endpoints render and read conversations in one way.
"""
