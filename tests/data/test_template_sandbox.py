"""Chat templates in the sandbox: the same text as Jinja's own sandbox, and an error for those that would not end."""

import time

import pytest
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from maxhydra.config import ConfigError
from maxhydra.data.chat import ChatTemplate, ChatTemplateError, compile_chat_template
from maxhydra.data.template_budget import limited
from maxhydra.data.template_sandbox import LimitedEnvironment
from maxhydra.data.tokenizers.byte import ByteTokenizer
from tests.support.vocabularies import MARKS, template

USER = [{"role": "user", "content": "hello there"}]
NAMESPACE = "{% set ns = namespace(x=[1], s='ab', t=(1,)) %}"
# A list or tuple that contains itself twice at each of 99 levels.
TWICE = "{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% set ns.t = (ns.t, ns.t) %}{% endfor %}"

ENDLESS = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "filtered loops": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "output": "{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}",
    "output of a macro": "{% macro f() %}{% for i in range(99999) %}"
    + "x" * 9999
    + "{% endfor %}{% endmacro %}{{ f() }}",
    "captured output": "{% set a %}{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}{% endset %}{{ a }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "branching recursion": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loop": "{% for i in range(9) recursive %}{{ loop(range(99)) if loop.depth < 9 }}{% endfor %}",
    "block": "{% block a %}{{ self.a() }}{% endblock %}",
    "repeated text": "{{ 'a' * 10**10 }}",
    "repeated list": "{% set x = 10**10 * [1] %}",
    "power": "{{ 10**(10**10) }}",
    "squares": NAMESPACE + "{% set ns.n = 9 %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "joined text": NAMESPACE + "{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "added text": NAMESPACE + "{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "added lists": NAMESPACE + "{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "printed list": NAMESPACE + TWICE + "{{ ns.x }}",
    "list as JSON": NAMESPACE + TWICE + "{{ ns.x|tojson(indent=2) }}",
    "compared list": NAMESPACE + TWICE + "{{ ns.x == [ns.x[0]] }}",
    "list as text": NAMESPACE + TWICE + "{{ ns.x|string|length }}",
    "tested list": NAMESPACE + TWICE + "{{ ns.x is upper }}",
    "formatted list": NAMESPACE + TWICE + "{{ '{}'.format(ns.x) }}",
    "list in a format": NAMESPACE + TWICE + "{{ '%s' % [ns.x] }}",
    "key": NAMESPACE + TWICE + "{{ {ns.t: 1} }}",
    "looked up key": NAMESPACE + TWICE + "{{ {1: 1}[ns.t] }}",
    "unique": NAMESPACE + TWICE + "{{ [ns.t]|unique|list }}",
    "dict": NAMESPACE + TWICE + "{{ dict([(ns.t, 1)]) }}",
    "deep key": NAMESPACE + "{% for i in range(9999) %}{% set ns.t = (ns.t,) %}{% endfor %}{{ {ns.t: 1} }}",
    "center": "{{ 'a'|center(10**10) }}",
    "str.center": "{{ 'a'.center(10**10) }}",
    "attr": "{{ 'a'|attr('center')(10**10) }}",
    "expandtabs": "{{ '\t'.expandtabs(10**9) }}",
    "indent": "{{ 'a\nb'|indent(10**9) }}",
    "batch": "{{ [1]|batch(10**9, 0)|list }}",
    "width": "{{ '%1000000000d' % 5 }}",
    "width of a key": "{{ '%(a)999999999d' % {'a': 1} }}",
    "width argument": "{{ '%*d' % (10**9, 5) }}",
    "format width": "{{ '{:1000000000d}'.format(5) }}",
    "format argument": "{{ '{:{}}'.format(5, 10**9) }}",
    "replace": "{{ ('a'*99999)|replace('a', 'b'*99999) }}",
    "str.replace": "{{ ('a'*99999).replace('', 'b'*99999) }}",
    "join": "{{ range(99999)|join('b'*99999) }}",
    "str.join": "{{ ('b'*99999).join(['a']*99999) }}",
    "round": "{{ 1.5|round(10**9, 'ceil') }}",
    "sum": "{{ ([[1]]*9999)|sum(start=[]) }}",
    "bytes": "{{ (5).to_bytes(10**9, 'big') }}",
    "search": "{% set x = range(99999)|list %}{% for i in range(9999) %}{% if 'a' in x %}{% endif %}{% endfor %}",
    "slices": "{% set x = 'a'*999999 %}{% for i in range(99999) %}{% set y = x[1:] %}{% endfor %}",
    "sort": "{% set x = range(99999)|list %}{% for i in range(9999) %}{% set y = x|sort %}{% endfor %}",
    "strip": "{% set x = 'a'*999999 %}{{ x.strip('b'*99999 ~ 'a') }}",
    "division by zero": "{{ 1/0 }}",
}


# Operations on the lists and keys that other cases print, compare and hash too.
FURTHER = ("list as text", "tested list", "list in a format", "looked up key", "dict")


@pytest.mark.slow
@pytest.mark.default_cases(*(name for name in ENDLESS if name not in FURTHER))
@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_would_not_end_is_an_error(name: str) -> None:
    began = time.process_time()
    with pytest.raises(ChatTemplateError, match=r"the chat template (exceeds a limit|failed)"):
        ChatTemplate(ENDLESS[name], ByteTokenizer()).prompt(USER)
    assert time.process_time() - began < 10


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}",
        "{% if 1 %}" * 500 + "{% endif %}" * 500,
        "{{ " + "9" * 9999 + " }}",
        "x" * 10**6,
        "{% for %}",
        "{{ 1/0 }}",
        "{{ messages[0].content.text.x }}",
        ENDLESS["recursion"],
        ENDLESS["loops"],
    ],
)
def test_a_template_that_fails_for_every_conversation_is_an_error_at_the_start(source: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.tokenizer\.chat_template"):
        compile_chat_template(ByteTokenizer(source))


def test_a_template_may_refuse_the_conversations_of_the_check() -> None:
    strict = compile_chat_template(ByteTokenizer("{{ raise_exception('only tools') }}"))
    with pytest.raises(ChatTemplateError, match="only tools"):
        strict.prompt(USER)


def test_a_long_conversation_is_within_the_budget() -> None:
    text = "{% for m in messages %}{% set last = loop.index0 == messages|length - 1 %}<{{ m.role }}>{{ m.content }}"
    chat = ChatTemplate(text + "{{ '\n' if not last }}{% endfor %}", ByteTokenizer())
    assert len(chat.prompt([{"role": "user", "content": "word " * 100}] * 2000)) > 1_000_000
    assert len(chat.prompt([{"role": "user", "content": "word " * 2_000_000}])) > 10_000_000


EXPRESSIONS = r"""
{{ 'a' ~ 1 ~ [2, 'b'] ~ none }} {{ 1 + 2 * 3 - 4 / 5 // 6 % 7 ** 2 }} {{ 'x' * 3 + 'y' }} {{ [1] + [2] }} {{ -3 }}
{{ 1 < 2 <= 2 != 3 }} {{ 'a' in 'abc' }} {{ 2 not in [1, 3] }} {{ 'abc'[1:] ~ 'abc'[::-1] }} {{ {'a': 1, 2: (1,)} }}
{{ '%s is %5.2f' % ('pi', 3.14159) }} {{ '{:>5}|{a}'.format('x', a=1) }}
{{ 'a,b'.split(',') }} {{ '-'.join(['a', 'b']) }}
{{ ' x '.strip() ~ 'Ab'.lower() ~ 'ab'.upper() ~ 'ab'.title() ~ 'aXb'.replace('X', '-') ~ 'ab'.center(6) }}
{{ {'a': 1}.items()|list }} {{ {'a': 1}.get('b', 2) }} {{ [3, 1]|sort }} {{ [1, 1, 2]|unique|list }} {{ [1, 2]|sum }}
{{ ['a', 'b']|map('upper')|join(', ') }} {{ [{'a': 1}, {'a': 2}]|selectattr('a', 'equalto', 2)|list }}
{{ [{'a': 1}, {'b': 2}]|rejectattr('a', 'defined')|list }} {{ [1, 2, 3]|select('odd')|list }} {{ [1, 2]|reverse|list }}
{{ ' a '|trim ~ 'a b'|title ~ 'a'|center(5) ~ 'a\nb'|indent ~ 'ab'|length ~ 'ab'|first ~ 'ab'|last ~ 'a'|upper }}
{{ {'b': 1, 'a': [1, 'x']}|dictsort }} {{ x|default('none') }} {{ '5'|int + 1 }} {{ '1.5'|float }} {{ 1.26|round(1) }}
{{ [1, 2, 3]|batch(2)|list }} {{ [1, 2, 3]|slice(2)|list }} {{ 'a b c'|wordcount }} {{ '<a>'|e }}
{{ 'abc def'|truncate(5) }}
{{ [{'k': 1, 'v': 2}, {'k': 1, 'v': 3}]|groupby('k')|length }} {{ [1, 2]|max ~ [1, 2]|min ~ (-1)|abs }} {{ 1|string }}
{% for k, v in {'a': 1, 'b': 2}.items() %}{{ loop.index }}{{ loop.last }}{{ loop.length }}{{ k }}={{ v }};{% endfor %}
{% for i in [[1, [2]], 3] recursive %}{{ loop(i) if i is iterable else i }}{% else %}none{% endfor %}
{% for i in range(5) if i is even %}{% if i == 4 %}{% break %}{% endif %}{{ loop.cycle('a', 'b') }}{{ i }}{% endfor %}
{% macro f(a, b=2) %}{{ a }}{{ b }}{{ caller() if caller }}{% endmacro %}{{ f(1) }}{% call f(3) %}called{% endcall %}
{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}
{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{% set j = joiner(', ') %}{{ j() }}a{{ j() }}b
{% filter upper %}loud{% endfilter %}{% set t %}block{% endset %}{{ t }}{% with y = 5 %}{{ y }}{% endwith %}
{{ missing is defined }}{{ 'a' is string }}{{ none is none }}{{ {} is mapping }}{{ 4 is divisibleby 2 }}{{ missing }}
{% autoescape true %}{{ '<' ~ '>' }}{{ '<b>'|safe }}{% endautoescape %}
""".strip().splitlines()


@pytest.mark.parametrize("source", EXPRESSIONS)
def test_expressions_have_the_text_of_the_plain_sandbox(source: str) -> None:
    plain = ImmutableSandboxedEnvironment(extensions=[loopcontrols]).from_string(source).render()
    with limited([]):
        assert LimitedEnvironment(extensions=[loopcontrols]).from_string(source).render() == plain


@pytest.mark.parametrize("family", MARKS)
def test_published_templates_have_the_text_of_the_plain_sandbox(family: str) -> None:
    source = template(family, marked=False)
    messages = [{"role": role, "content": f" {role} says {{}}"} for role in ("user", "assistant", "user")]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    names = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "pad_token": "<|pad|>"}
    plain = environment.from_string(source).render(messages=messages, add_generation_prompt=True, **names)
    assert ChatTemplate(source, ByteTokenizer()).prompt(messages) == plain
