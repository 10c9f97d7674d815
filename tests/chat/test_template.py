"""A chat template is foreign code: it stays in its sandbox, within its time and its size."""

from __future__ import annotations

import pytest

from tinkex.chat import template
from tinkex.errors import InvalidInputError

GREEDY = [
    "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}"
    "{% endfor %}",
    "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}"
    "{% endfor %}",
    "{{ 'a' * 1000000000 }}",
    "{{ 2 ** 99999999 }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '{:1000000000d}'.format(1) }}",
    "{{ 'a'.ljust(1000000000) }}",
    "{{ ('a' * 10000)|replace('a', 'b' * 10000) }}",
    "{{ ('a' * 10000).replace('a', 'b' * 10000) }}",
    "{{ range(9999)|join('b' * 10000) }}",
    "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    "{{ messages.append(1) }}",
    "{{ raise_exception('no such role') }}",
    "{{ messages.none.at.all }}",
]


@pytest.mark.parametrize("text", GREEDY)
def test_a_template_that_asks_for_too_much_is_refused(text: str):
    with pytest.raises(InvalidInputError, match="chat template"):
        template.render(text, messages=[])


def test_a_template_that_loops_is_stopped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(template, "MAX_SECONDS", 0.2)
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(InvalidInputError, match=r"more than 0.2 s"):
        template.render(loops, messages=[])


def test_what_published_templates_use_works():
    text = (
        "{% for m in messages %}{% if m.role == 'skip' %}{% continue %}{% endif %}"
        "{% generation %}{{ m.content.strip().replace('a', 'b') ~ 1 }}{% endgeneration %}"
        "{% endfor %}{{ {'x': 'é'} | tojson }}{{ ['a', 'b'] | join(',') }}{{ strftime_now('%Y') }}"
    )
    messages = [{"role": "skip", "content": "no"}, {"role": "user", "content": " aha "}]
    shown = template.render(text, messages=messages)
    assert shown[:-4] == 'bhb1{"x": "é"}a,b'
    assert shown[-4:].isdigit()


def test_nothing_of_python_can_be_reached():
    text = "{{ ''.__class__.__mro__ }}{{ messages.__class__ }}"
    with pytest.raises(InvalidInputError):
        template.render(text, messages=[])
