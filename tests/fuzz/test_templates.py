"""Chat templates: every source renders or is rejected, within limits of steps and text."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example
from hypothesis import strategies as st

from maxhydra.config import ConfigError
from maxhydra.data.chat import ChatTemplate, ChatTemplateError, compile_chat_template
from maxhydra.data.tokenizers.byte import ByteTokenizer
from tests.support.fuzzing import fuzz
from tests.support.vocabularies import TEMPLATES

SOURCES = [path.read_text() for path in sorted(Path(TEMPLATES).glob("*.jinja"))]
MESSAGES = [{"role": role, "content": f"text of the {role}"} for role in ("user", "assistant", "user")]
# Text that a template writes at most: 8 characters for each of the steps of such a conversation.
MAX_OUTPUT = 4_000_000

NAMES = st.sampled_from(["messages", "x", "ns.a", "ns.b", "loop", "loop.index", "bos_token", "missing", "messages[0]"])
LITERALS = st.one_of(
    st.sampled_from(["'a'", "'%s'", "'{}'", "''", "1", "0", "-1", "1.5", "10**9", "9**99", "[]", "{}", "none", "true"]),
    st.integers(-(10**12), 10**12).map(str),
    st.text(st.sampled_from("ab \\n%d{}*<é"), max_size=6).map(lambda text: "'" + text.replace("\\", "\\\\") + "'"),
)
FILTER_CALLS = (
    "abs|attr('a')|batch(3)|batch(10**9)|capitalize|center(99)|center(10**9)|count|default(1)|dictsort|e|first|float|"
    "format(1)|groupby('a')|indent(9)|indent(10**9)|int|items|join|join('xy')|last|length|list|lower|map('upper')|"
    "map(attribute='role')|max|min|reject|rejectattr('a')|replace('a', 'bb')|reverse|round(2)|safe|select|"
    "selectattr('role', 'equalto', 'user')|slice(3)|slice(10**9)|sort|string|sum|title|tojson|tojson(indent=2)|trim|"
    "truncate(9)|unique|upper|urlencode|wordcount"
)
FILTERS = st.sampled_from(FILTER_CALLS.split("|"))
METHOD_CALLS = (
    "center(10**9)|format(x)|join(x)|ljust(9999)|replace('', 'abc')|split()|strip('a')|zfill(99)|items()|get('a')|"
    "encode()|append(1)|update({})|index(1)|next()|cycle(1, 2)"
)
METHODS = st.sampled_from(METHOD_CALLS.split("|"))
OPERATORS = st.sampled_from(["+", "-", "*", "/", "//", "%", "**", "~", "==", "<", "in", "and", "or", "not in"])
TESTS = st.sampled_from(["defined", "string", "upper", "iterable", "in x", "eq 1", "divisibleby 0", "sameas none"])


def combine(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.builds("({} {} {})".format, inner, OPERATORS, inner),
        st.builds("{}|{}".format, inner, FILTERS),
        st.builds("({}).{}".format, inner, METHODS),
        st.builds("({} is {})".format, inner, TESTS),
        st.builds("({} if {} else {})".format, inner, inner, inner),
        st.builds("{}[{}]".format, inner, inner),
        st.builds("{}[{}:]".format, inner, inner),
        st.builds("[{}, {}]".format, inner, inner),
        st.builds("{{{}: {}}}".format, inner, inner),
        st.builds("({}, {})".format, inner, inner),
        st.builds("{}({})".format, st.sampled_from(["range", "dict", "cycler", "f", "joiner", "strftime_now"]), inner),
    )


EXPRESSIONS = st.recursive(NAMES | LITERALS, combine, max_leaves=6)
STATEMENTS = st.recursive(
    st.one_of(
        EXPRESSIONS.map("{{{{ {} }}}}".format),
        EXPRESSIONS.map("{{% set x = {} %}}".format),
        EXPRESSIONS.map("{{% set ns.a = {} %}}".format),
        st.sampled_from(["{% set ns.b = [ns.b, ns.b] %}", "{% set ns.a = ns.a ~ ns.a %}", "text", "{% break %}"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map("".join),
        st.builds("{{% for x in {} %}}{}{{% endfor %}}".format, EXPRESSIONS, inner),
        st.builds("{{% for x in range(99999) %}}{}{{% endfor %}}".format, inner),
        st.builds("{{% for x in {} recursive %}}{}{{{{ loop(x) }}}}{{% endfor %}}".format, EXPRESSIONS, inner),
        st.builds("{{% if {} %}}{}{{% else %}}{}{{% endif %}}".format, EXPRESSIONS, inner, inner),
        st.builds("{{% macro f(x) %}}{}{{% endmacro %}}{{{{ f({}) }}}}".format, inner, EXPRESSIONS),
        st.builds("{{% set x %}}{}{{% endset %}}".format, inner),
        st.builds("{{% filter {} %}}{}{{% endfilter %}}".format, FILTERS, inner),
        st.builds("{{% generation %}}{}{{% endgeneration %}}".format, inner),
    ),
    max_leaves=5,
)
START = "{% set ns = namespace(a='a', b=[1]) %}{% set x = messages %}"


@st.composite
def damaged(draw: st.DrawFn) -> str:
    """A published template with a few pieces replaced, removed or repeated."""
    text = draw(st.sampled_from(SOURCES))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 12)))
        pieces = st.sampled_from(
            ["", "{{", "}}", "{%", "%}", "{#", "'", "|", " * 10**9", "-", "\0", text[start:end] * 3]
        )
        text = text[:start] + draw(pieces | EXPRESSIONS) + text[end:]
    return text


def render(source: str) -> None:
    template = ChatTemplate(source, ByteTokenizer())
    for messages in (MESSAGES[:1], MESSAGES):
        assert len(template.prompt(messages)) < MAX_OUTPUT
        template.render(messages)


@pytest.mark.exhaustive
@fuzz(cases=30, rejects=(ConfigError, ChatTemplateError), statements=STATEMENTS)
@example("{% for x in range(99999) %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.b }}")
@example("{{ 'a'.center(10**9) }}")
@example("{{ (9**99)|round(2, 'ceil') }}")
def test_generated_templates(statements: str) -> None:
    render(START + statements)


@pytest.mark.slow
@fuzz(cases=60, rejects=(ConfigError, ChatTemplateError), source=damaged())
def test_damaged_templates(source: str) -> None:
    render(source)


@pytest.mark.slow
@fuzz(
    cases=60,
    rejects=(ConfigError, ChatTemplateError),
    source=st.text(st.sampled_from("{}%#-'\"|()[]a1.~*\n "), max_size=60),
)
def test_random_sources(source: str) -> None:
    compile_chat_template(ByteTokenizer(source))
    render(source)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10) | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
RECORDS = VALUES | st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system"]) | VALUES, "content": st.text(max_size=20) | VALUES},
        optional={"tool_calls": VALUES, "\ud800": VALUES},
    ),
    max_size=4,
)


@pytest.mark.slow
@fuzz(cases=60, messages=RECORDS, source=st.sampled_from([*SOURCES, "{{ messages|tojson }}", "{{ messages }}"]))
def test_records(messages: Any, source: str) -> None:
    """A record becomes a document or is rejected; it never raises."""
    compile_chat_template(ByteTokenizer(source)).encode(messages)
