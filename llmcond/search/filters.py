"""Filters: conditions on columns, written in a small subset of SQL and parsed to Arrow expressions.

The grammar has no functions and no arithmetic. Length, nesting and wildcards are limited, so that
no filter can be disproportionately expensive to evaluate.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from functools import reduce
from operator import and_, eq, ge, gt, le, lt, ne, or_
from typing import Any, NamedTuple, NoReturn

import pyarrow as pa
import pyarrow.compute as pc

from llmcond.base.errors import did_you_mean, shortened_repr
from llmcond.base.text import check_characters, condition_key
from llmcond.search import FilterError

#: Limits of a filter: characters, levels of nesting, and wildcards (% and _) in a LIKE pattern.
MAX_LENGTH, MAX_NESTING, MAX_WILDCARDS = 2_000, 20, 20
#: Number of columns that a message lists.
_MAX_LISTED = 20

#: A name: in double quotes, in backquotes, or a word, which may have combining marks.
_NAME = r"""(?:"(?:[^"]|"")*"|`[^`]+`|[^\W\d](?:\w|[^\x00-\x7f\s])*)"""
_TOKEN = re.compile(
    rf"""\s*(?:
    (?P<number>-?\s*(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?)
    | (?P<text>'(?:[^']|'')*')
    | (?P<name>{_NAME}(?:\.{_NAME})*)
    | (?P<symbol><>|<=|>=|!=|==|[=<>(),])
    | (?P<end>\Z)
    | (?P<unknown>.))""",
    re.VERBOSE | re.IGNORECASE | re.DOTALL,
)
_COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(("=", "=="), eq),
    **dict.fromkeys(("!=", "<>"), ne),
    **{"<": lt, "<=": le, ">": gt, ">=": ge},
}
_WORDS = re.findall(r"\w+", "AND OR NOT IN LIKE ILIKE BETWEEN IS NULL TRUE FALSE CAST TRY_CAST AS")
_TYPES = {
    **dict.fromkeys(("INT", "INTEGER", "BIGINT", "SMALLINT", "TINYINT"), pa.int64()),
    **dict.fromkeys(("FLOAT", "DOUBLE", "REAL"), pa.float64()),
    **dict.fromkeys(("STRING", "TEXT", "VARCHAR"), pa.string()),
    "BOOLEAN": pa.bool_(),
    "DATE": pa.date32(),
    "TIMESTAMP": pa.timestamp("us"),
}
_KINDS = {
    "number": (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal),
    "text": (pa.types.is_string, pa.types.is_large_string),
    "truth value": (pa.types.is_boolean,),
    "time": (pa.types.is_temporal,),
    "NULL": (pa.types.is_null,),
}
#: Patterns of texts that can be cast to a type; times are parsed instead.
_CASTABLE = {
    pa.int64(): r"^-?\d{1,18}$",
    pa.float64(): r"^-?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?$",
    pa.bool_(): r"^(?i:true|false|0|1)$",
}
#: How a text that stands for a time is written.
_FORMS = {
    _TYPES["DATE"]: "; write '2024-01-31'",
    _TYPES["TIMESTAMP"]: "; write '2024-01-31 12:00:00'",
}
_ALLOWED = (
    "A filter consists of columns, numbers, texts in single quotes, =, !=, <, <=, >, >=, AND, OR, "
    "NOT, IN, LIKE, BETWEEN, IS NULL, CAST, TRY_CAST and parentheses, such as \"kind = 'news' AND "
    'year > 2020". Names with spaces are in double quotes.'
)


class _Token(NamedTuple):
    kind: str
    text: str
    start: int

    @property
    def keyword(self) -> str:
        """The keyword or symbol in upper case; empty for other tokens."""
        word = self.text.upper()
        return word if self.kind == "symbol" or word in _WORDS else ""


class _Operand(NamedTuple):
    """Part of a filter that has one value per row.

    Attributes:
        start: position of its first character.
        type: its Arrow type.
        value: its Arrow expression.
        source: how it is written.
        literal: its text if it is written as one; None: it is anything else.
    """

    start: int
    type: Any
    value: Any
    source: str = ""
    literal: str | None = None

    @property
    def kind(self) -> str:
        """The kind of value; only operands of the same kind can be compared."""
        names = (name for name, tests in _KINDS.items() if any(test(self.type) for test in tests))
        return next(names, str(self.type))


def parse_filter(text: str, types: Mapping[str, Any]) -> tuple[list[str], Any]:
    """Return the columns that a filter reads, and its Arrow expression, which a row must satisfy.

    Args:
        text: the filter, for example ``kind = 'news' AND year > 2020``.
        types: the Arrow type of each column that may be used, by column name.

    Raises:
        FilterError: if the filter does not follow the grammar, has an invalid character, names an
            unknown column, or compares values of different kinds.
    """
    parser = _Parser(text, types)
    predicate = parser.filter()
    return list(parser.columns), predicate


class _Parser:
    """Recursive descent parser with one method for each rule of the grammar."""

    def __init__(self, text: str, types: Mapping[str, Any]) -> None:
        if len(text) > MAX_LENGTH:
            raise FilterError(
                f"the filter has {len(text):,} characters; at most {MAX_LENGTH:,} are allowed."
            )
        try:
            check_characters(text)
        except ValueError as error:
            raise FilterError(f"the filter {shortened_repr(text)} {error}. Correct it.") from None
        self.columns: dict[str, None] = {}
        self._text, self._types, self._next, self._level = text, types, 0, 0
        self._tokens = [
            _Token(kind, match[kind], match.start(kind))
            for match in _TOKEN.finditer(text)
            if (kind := str(match.lastgroup))
        ]

    # -- tokens and errors -----------------------------------------------------------------------

    def _accept(self, *keywords: str) -> _Token | None:
        """Return the next token and advance, if it is one of these keywords."""
        token = self._tokens[self._next]
        self._next += token.keyword in keywords
        return token if token.keyword in keywords else None

    def _expect(self, *keywords: str) -> _Token:
        return self._accept(*keywords) or self._raise_error(f"expected {' or '.join(keywords)}")

    def _raise_error(
        self, problem: str, start: int | None = None, advice: str = _ALLOWED
    ) -> NoReturn:
        """Raise an error about the character at ``start``, by default that of the next token."""
        if start is None:
            token = self._tokens[self._next]
            start, token_text = token.start, shortened_repr(token.text) if token.text else "the end"
            problem = f"{problem}, got {token_text}"
        problem += "" if problem.endswith("?") else "."
        names = [_quote_name(name) for name in self._types]
        listed = ", ".join(names[:_MAX_LISTED])
        if len(names) > _MAX_LISTED:
            listed += f" and {len(names) - _MAX_LISTED:,} more"
        raise FilterError(
            f"the filter {shortened_repr(self._text)} cannot be applied: character {start + 1}: "
            f"{problem} {advice} The columns are {listed}."
        )

    # -- rules -----------------------------------------------------------------------------------

    def filter(self) -> Any:
        condition = self._parse_or()
        if self._tokens[self._next].kind != "end":
            self._raise_error("expected AND, OR or the end")
        return self._as_condition(condition)

    def _as_condition(self, operand: _Operand) -> Any:
        if operand.kind not in ("truth value", "NULL"):
            self._raise_error(f"expected a condition, got a {operand.kind} alone", operand.start)
        return operand.value.cast(pa.bool_())

    def _parse_or(self) -> _Operand:
        return self._parse_chain("OR", or_, lambda: self._parse_chain("AND", and_, self._parse_not))

    def _parse_chain(
        self, keyword: str, join: Callable[[Any, Any], Any], parse_part: Callable[[], _Operand]
    ) -> _Operand:
        operand = parse_part()
        while self._accept(keyword):
            value = join(self._as_condition(operand), self._as_condition(parse_part()))
            operand = _Operand(operand.start, pa.bool_(), value)
        return operand

    def _parse_not(self) -> _Operand:
        token = self._accept("NOT")
        if token is None:
            return self._parse_test()
        return _Operand(
            token.start, pa.bool_(), ~self._as_condition(self._parse_nested(self._parse_not))
        )

    def _parse_nested(self, rule: Callable[[], _Operand]) -> _Operand:
        self._level += 1
        if self._level > MAX_NESTING:
            self._raise_error(f"expected at most {MAX_NESTING} levels of nesting")
        operand = rule()
        self._level -= 1
        return operand

    def _parse_test(self) -> _Operand:
        left = self._parse_operand()
        sign = self._accept(*_COMPARISONS)
        if sign:
            value = self._compare(_COMPARISONS[sign.text], left, self._parse_operand())
        elif self._accept("IS"):
            value = self._parse_is(left)
        else:
            negated = self._accept("NOT")
            keyword = self._accept("IN", "BETWEEN", "LIKE", "ILIKE")
            if keyword is None:
                return self._raise_error("expected IN, BETWEEN or LIKE") if negated else left
            value = self._parse_predicate(left, keyword.keyword)
            value = ~value if negated else value
        return _Operand(left.start, pa.bool_(), value)

    def _compare(self, compare: Callable[[Any, Any], Any], left: _Operand, right: _Operand) -> Any:
        kinds = {left.kind, right.kind}
        if "NULL" in kinds:
            return pc.scalar(pa.scalar(None, pa.bool_()))
        if kinds == {"time", "text"}:  # dates are written as quoted texts
            time_type = left.type if left.kind == "time" else right.type
            return compare(self._cast(left, time_type), self._cast(right, time_type))
        if len(kinds) > 1 or not kinds <= set(_KINDS):
            self._raise_error(
                f"a {left.kind} cannot be compared with a {right.kind}; compare values of one "
                f"kind{self._advise_conversion(left, right)}",
                right.start,
            )
        types = (left.type, right.type)
        if (
            kinds == {"number"}
            and types[0] != types[1]
            and not all(map(pa.types.is_integer, types))
        ):
            # Arrow would refuse numbers that the other type cannot represent exactly.
            return compare(*(side.value.cast(pa.float64(), safe=False) for side in (left, right)))
        return compare(left.value, right.value)

    @staticmethod
    def _advise_conversion(left: _Operand, right: _Operand) -> str:
        """Return how a text and a number can be compared; empty for other kinds."""
        if {left.kind, right.kind} != {"number", "text"}:
            return ""
        text = left if left.kind == "text" else right
        if text.literal is None:
            return (
                f", or TRY_CAST({text.source} AS DOUBLE), which is NULL for texts that are not "
                "numbers"
            )
        number = text.literal.strip()
        is_number = re.fullmatch(_CASTABLE[pa.float64()], number)
        return f"; write the number without quotes: {number}" if is_number else ""

    def _parse_is(self, left: _Operand) -> Any:
        negated = self._accept("NOT")
        state = self._expect("NULL", "TRUE", "FALSE").keyword
        if state == "NULL":
            value = left.value.is_null()
        else:
            truth = self._as_condition(left)
            value = pc.coalesce(truth if state == "TRUE" else ~truth, pc.scalar(False))
        return ~value if negated else value

    def _parse_predicate(self, left: _Operand, keyword: str) -> Any:
        if keyword in ("LIKE", "ILIKE"):
            return self._parse_like(left, ignore_case=keyword == "ILIKE")
        if keyword == "BETWEEN":
            low = self._compare(ge, left, self._parse_operand())
            self._expect("AND")
            return low & self._compare(le, left, self._parse_operand())
        self._expect("(")
        values = [self._compare(eq, left, self._parse_operand())]
        while self._accept(","):
            values.append(self._compare(eq, left, self._parse_operand()))
        self._expect(")")
        return reduce(or_, values)

    def _parse_like(self, left: _Operand, *, ignore_case: bool) -> Any:
        token = self._tokens[self._next]
        if token.kind != "text":
            self._raise_error("expected a pattern in single quotes")
        if left.kind != "text":
            self._raise_error(
                f"LIKE applies to texts, but this is a {left.kind}; use CAST({left.source} AS "
                "STRING)",
                left.start,
            )
        self._next += 1
        pattern = _unquote(token.text)
        if pattern.count("%") + pattern.count("_") > MAX_WILDCARDS:
            # The time to match many wildcards grows with their number times the text's length.
            self._raise_error(
                f"a LIKE pattern may contain at most {MAX_WILDCARDS} wildcards (% and _)",
                token.start,
            )
        return pc.match_like(left.value, pattern, ignore_case=ignore_case)

    def _parse_operand(self) -> _Operand:
        first = self._tokens[self._next]
        operand = self._parse_value()
        last = self._tokens[self._next - 1]
        return operand._replace(source=self._text[first.start : last.start + len(last.text)])

    def _parse_value(self) -> _Operand:
        token = self._tokens[self._next]
        if self._accept("("):
            operand = self._parse_nested(self._parse_or)
            self._expect(")")
            return operand
        if self._accept("CAST", "TRY_CAST"):
            return self._parse_cast(token)
        if self._accept("NULL"):
            return _Operand(token.start, pa.null(), pc.scalar(None))
        if self._accept("TRUE", "FALSE"):
            return _Operand(token.start, pa.bool_(), pc.scalar(token.keyword == "TRUE"))
        if token.kind not in ("number", "text", "name") or token.keyword:
            self._raise_error("expected a column, a number or a text")
        self._next += 1
        if token.kind == "name":
            return self._parse_name(token)
        return self._parse_literal(token)

    def _parse_literal(self, token: _Token) -> _Operand:
        if token.kind == "text":
            text = _unquote(token.text)
            return _Operand(token.start, pa.string(), pc.scalar(text), literal=text)
        digits = "".join(token.text.split())
        number = int(digits) if re.fullmatch(r"-?\d{1,19}", digits) else None
        is_integer = number is not None and -(2**63) <= number < 2**63
        value = pa.scalar(number if is_integer else float(digits))
        return _Operand(token.start, value.type, pc.scalar(value))

    def _parse_name(self, token: _Token) -> _Operand:
        """Parse a column, a field of a struct column, or a date such as ``DATE '2024-01-31'``."""
        next_token = self._tokens[self._next]
        if next_token.text == "(":
            self._raise_error(
                f"{token.text} is used as a function, and functions are not allowed", token.start
            )
        if token.text.upper() in ("DATE", "TIMESTAMP") and next_token.kind == "text":
            self._next += 1
            arrow_type = _TYPES[token.text.upper()]
            return _Operand(
                token.start, arrow_type, self._cast(self._parse_literal(next_token), arrow_type)
            )
        first, *fields = map(_unquote, re.findall(_NAME, token.text))
        column = self._find_column(first, token)
        arrow_type = self._types[column]
        for field in fields:
            index = arrow_type.get_field_index(field) if pa.types.is_struct(arrow_type) else -1
            if index < 0:
                self._raise_error(f"{column} has no field {shortened_repr(field)}", token.start)
            arrow_type = arrow_type.field(index).type
        value = pc.field(column, *fields)
        self.columns[column] = None
        if pa.types.is_dictionary(arrow_type):
            arrow_type = arrow_type.value_type
            value = value.cast(arrow_type)
        return _Operand(token.start, arrow_type, value)

    def _find_column(self, name: str, token: _Token) -> str:
        if name in self._types:
            return name
        key = condition_key(name)
        matches = [column for column in self._types if condition_key(column) == key]
        if len(matches) == 1:
            return matches[0]
        problem = f"there is no column {shortened_repr(name)}"
        if token.text.startswith('"'):
            literal = name.replace("'", "''")
            advice = f"Double quotes are for columns. Write a text in single quotes: '{literal}'."
        else:
            suggestion = did_you_mean(name, self._types)
            problem += f". {suggestion}" if suggestion else ""
            advice = (
                "An index has the columns that it was built with. To build one that also has a "
                f"column of the texts' file: llmcond index TEXTS --out DIR --keep "
                f"{shlex.quote(name)}."
            )
        return self._raise_error(problem, token.start, advice)

    def _parse_cast(self, token: _Token) -> _Operand:
        self._expect("(")
        operand = self._parse_nested(self._parse_or)
        self._expect("AS")
        type_name = self._tokens[self._next]
        target_type = _TYPES.get(type_name.text.upper())
        if target_type is None:
            self._raise_error(f"expected one of the types {', '.join(_TYPES)}")
        self._next += 1
        self._expect(")")
        cast = self._cast if token.keyword == "CAST" else _try_cast
        return _Operand(token.start, target_type, cast(operand, target_type))

    def _cast(self, operand: _Operand, target_type: Any) -> Any:
        if operand.literal is not None:
            try:
                return pc.scalar(pa.scalar(operand.literal).cast(target_type))
            except pa.ArrowException:
                form = _FORMS.get(target_type, "")
                self._raise_error(
                    f"{shortened_repr(operand.literal)} cannot be converted to {target_type}{form}",
                    operand.start,
                )
        if pa.types.is_integer(target_type) and pa.types.is_floating(operand.type):
            return pc.trunc(operand.value).cast(target_type)
        return operand.value.cast(target_type)


def _try_cast(operand: _Operand, target_type: Any) -> Any:
    """Return the values in another type; NULL for texts and numbers that cannot be converted."""
    value = operand.value
    if operand.kind == "number" and pa.types.is_integer(target_type):
        fits = (value > -(2.0**63)) & (value < 2.0**63)
        return pc.trunc(pc.if_else(fits, value, pc.scalar(None))).cast(target_type)
    if operand.kind != "text" or pa.types.is_string(target_type):
        return value.cast(target_type)
    text = pc.utf8_trim_whitespace(value)
    if not pa.types.is_temporal(target_type):
        fits = pc.match_substring_regex(text, _CASTABLE[target_type])
        return pc.if_else(fits, text, pc.scalar(pa.scalar(None, pa.string()))).cast(target_type)
    # A day, or a day with a time; fractions of a second and the letter Z do not matter.
    text = pc.replace_substring_regex(text, r"(\.\d+)?Z?$", "")
    text = pc.replace_substring_regex(text, r"^(\d{4}-\d{2}-\d{2})T", r"\1 ")
    formats = ("%Y-%m-%d", "%Y-%m-%d %H:%M:%S", "%Y-%m-%d %H:%M")
    times = [pc.strptime(text, form, "us", error_is_null=True) for form in formats]
    return pc.coalesce(*times).cast(target_type)


def _quote_name(name: str) -> str:
    """Return a column as it is written in a filter."""
    is_word = re.fullmatch(r"[^\W\d]\w*", name) and name.upper() not in _WORDS
    return name if is_word else '"' + name.replace('"', '""') + '"'


def _unquote(text: str) -> str:
    quote = text[0]
    if quote not in "'\"`":
        return text
    return text[1:-1].replace(2 * quote, quote)
