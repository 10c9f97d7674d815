"""Small templates that speak as the families do, and a tokenizer that knows their tokens.

The templates are our own: they have the form of the published ones, not their wording.
"""

from __future__ import annotations

from typing import Any

from tinkex.chat.messages import Message, Tool, ToolCall

CONTROL = (
    "<|im_start|> <|im_end|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|eom_id|> "
    "<|python_tag|> <|start|> <|end|> <|channel|> <|message|> <|call|> <|return|> <|constrain|> "
    "</s>"
).split()

_HERMES = """\
{%- if tools %}<|im_start|>system
Functions:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}
{%- if not loop.first or m.content %}
{% endif %}CALL{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

QWEN3 = _HERMES.replace(
    "CALL",
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}\n</tool_call>",
)
QWEN35 = _HERMES.replace(
    "CALL",
    "<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for key, value in call.function.arguments.items() %}<parameter={{ key }}>\n"
    "{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>",
)
LLAMA3 = """\
{%- for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{% if m.tool_calls %}{"name": "{{ m.tool_calls[0].function.name }}", "parameters": \
{{ m.tool_calls[0].function.arguments | tojson }}}{% else %}{{ m.content }}{% endif %}<|eot_id|>
{%- endfor %}
{%- if tools %}{# they would be listed here #}{% endif %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
HARMONY = """\
{%- for m in messages %}
{%- if m.role == "assistant" %}
{%- if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>\
{{ m.thinking }}<|end|>{% endif %}
{%- for call in m.tool_calls or [] %}<|start|>assistant<|channel|>commentary \
to=functions.{{ call.function.name }} <|constrain|>json<|message|>\
{{ call.function.arguments | tojson }}<|call|>{% endfor %}
{%- if m.content %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>{% endif %}
{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}
{%- endfor %}
{%- if tools %}{# they would be listed here #}{% endif %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
SMOLLM2 = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
GENERIC = """\
{%- for m in messages %}{% if m.role == "assistant" %}{{ m.content }}</s>
{% else %}[{{ m.role }}] {{ m.content }}
{% endif %}{% endfor %}"""
TEMPLATES = {
    "qwen3": QWEN3,
    "qwen3.5": QWEN35,
    "llama3": LLAMA3,
    "gpt-oss": HARMONY,
    "smollm2": SMOLLM2,
    "generic": GENERIC,
}
# As Qwen3's does: earlier thoughts are left out, and an answer without thoughts is written with
# empty ones as long as it is the last.
FORGETFUL = _HERMES.replace("CALL", "<tool_call>").replace(
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}",
    "{% if m.role == 'assistant' and loop.last %}<think>\n{{ m.reasoning_content or '' }}\n"
    "</think>\n\n{% endif %}",
)

WEATHER = Tool(
    name="weather",
    description="The weather of a city.",
    parameters={"type": "object", "properties": {"city": {"type": "string"}}},
)
CALL = ToolCall(name="weather", arguments='{"city": "Z\u00fcrich", "days": 3}')
SAID = Message(role="assistant", content="Hello there.\n\nTwo lines.")
CALLED = Message(role="assistant", tool_calls=(CALL,))
THOUGHT = Message(role="assistant", content="It is 4.", reasoning="Two and two.\nFour.")
TRICKY = ToolCall(
    name="weather",
    arguments='{"city": "8000", "days": [1, 2.5, null], "deep": {"a": "</b> \\n"}, "on": true}',
)
TRIED = Message(role="assistant", tool_calls=(TRICKY,))
PLANNED = Message(role="assistant", reasoning="I need the weather.", tool_calls=(CALL,))
BOTH = Message(role="assistant", content="Let me see.", tool_calls=(CALL, CALL))


def tokenizer(template: str | None, *, control: tuple[str, ...] = tuple(CONTROL)) -> Any:
    """A byte-level tokenizer: every text has tokens, and control tokens are one each."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    from tinkex.chat.tokenizer import FastTokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True) for token in control])
    return FastTokenizer(inner, {"chat_template": template} if template else {})
