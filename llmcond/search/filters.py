"""Filters: conditions on columns in a small part of SQL, parsed into Arrow expressions.

There are no functions and no arithmetic, and length, nesting and wildcards are limited, so that
nobody can write a filter whose cost is out of proportion.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import reduce
from operator import and_, eq, ge, gt, le, lt, ne, or_
from typing import Any, NamedTuple, NoReturn

import pyarrow as pa
import pyarrow.compute as pc

from llmcond.errors import UserError, brief, did_you_mean

#: Limits of a filter: characters, levels of nesting, and % and _ in a pattern of LIKE.
MAX_LENGTH, MAX_NESTING, MAX_WILDCARDS = 2_000, 20, 20

_TOKEN = re.compile(
    r"""\s*(?:
    (?P<number>-?\s*(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?)
    | (?P<text>'(?:[^']|'')*'|"(?:[^"]|"")*")
    | (?P<name>(?:[^\W\d]\w*|`[^`]+`)(?:\.(?:[^\W\d]\w*|`[^`]+`))*)
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
_WORDS = re.findall(r"\w+", "AND OR NOT IN LIKE ILIKE BETWEEN IS NULL TRUE FALSE CAST AS")
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
_ALLOWED = (
    "A filter consists of columns, numbers, texts in single quotes, =, !=, <, <=, >, >=, AND, OR, "
    "NOT, IN, LIKE, BETWEEN, IS NULL, CAST and parentheses, such as \"kind = 'news' AND year > "
    '2020"'
)


class _Token(NamedTuple):
    kind: str
    text: str
    start: int

    @property
    def keyword(self) -> str:
        """Return the keyword or symbol that it is; nothing for others."""
        word = self.text.upper()
        return word if self.kind == "symbol" or word in _WORDS else ""


class _Operand(NamedTuple):
    """A part of a filter that has a value for each row."""

    start: int
    type: Any
    value: Any  # an Arrow expression

    @property
    def kind(self) -> str:
        """Return what it can be compared with: others of the same kind."""
        names = (name for name, tests in _KINDS.items() if any(test(self.type) for test in tests))
        return next(names, str(self.type))


class Filter(NamedTuple):
    """A filter: what it reads, and what is to be true of a row."""

    columns: list[str]
    predicate: Any  # an Arrow expression


def parse_filter(text: str, types: Mapping[str, Any]) -> Filter:
    """Return a filter on columns of some Arrow types.

    Raises:
        UserError: something else than the grammar allows, an unknown column, or values that cannot
            be compared with each other.
    """
    parser = _Parser(text, types)
    predicate = parser.filter()
    return Filter(list(parser.columns), predicate)


class _Parser:
    """Recursive descent, with one method for each rule of the grammar."""

    def __init__(self, text: str, types: Mapping[str, Any]) -> None:
        if len(text) > MAX_LENGTH:
            raise UserError(
                f"the filter has {len(text):,} characters; at most {MAX_LENGTH:,} are allowed."
            )
        self.columns: dict[str, None] = {}
        self._text, self._types, self._next, self._level = text, types, 0, 0
        self._tokens = [
            _Token(kind, match[kind], match.start(kind))
            for match in _TOKEN.finditer(text)
            if (kind := str(match.lastgroup))
        ]

    # -- tokens and errors -----------------------------------------------------------------------

    def _accept(self, *keywords: str) -> _Token | None:
        """Return the next token and pass it, if it is one of these keywords."""
        token = self._tokens[self._next]
        self._next += token.keyword in keywords
        return token if token.keyword in keywords else None

    def _expect(self, *keywords: str) -> _Token:
        return self._accept(*keywords) or self._refuse(f"expected {' or '.join(keywords)}")

    def _refuse(self, problem: str, start: int | None = None) -> NoReturn:
        """Raise the error; without ``start`` it is about the next token."""
        if start is None:
            token = self._tokens[self._next]
            start, got = token.start, brief(token.text) if token.text else "the end"
            problem = f"{problem}, got {got}"
        problem += "" if problem.endswith("?") else "."
        raise UserError(
            f"the filter {brief(self._text)} cannot be applied: character {start + 1}: {problem} "
            f"{_ALLOWED}. The columns are {', '.join(self._types)}."
        )

    # -- rules -----------------------------------------------------------------------------------

    def filter(self) -> Any:
        found = self._either()
        if self._tokens[self._next].kind != "end":
            self._refuse("expected AND, OR or the end")
        return self._truth(found)

    def _truth(self, operand: _Operand) -> Any:
        if operand.kind not in ("truth value", "NULL"):
            self._refuse(f"expected a condition, got a {operand.kind} alone", operand.start)
        return operand.value.cast(pa.bool_())

    def _either(self) -> _Operand:
        return self._joined("OR", or_, lambda: self._joined("AND", and_, self._negation))

    def _joined(
        self, keyword: str, join: Callable[[Any, Any], Any], part: Callable[[], _Operand]
    ) -> _Operand:
        found = part()
        while self._accept(keyword):
            value = join(self._truth(found), self._truth(part()))
            found = _Operand(found.start, pa.bool_(), value)
        return found

    def _negation(self) -> _Operand:
        token = self._accept("NOT")
        if token is None:
            return self._test()
        return _Operand(token.start, pa.bool_(), ~self._truth(self._nested(self._negation)))

    def _nested(self, rule: Callable[[], _Operand]) -> _Operand:
        self._level += 1
        if self._level > MAX_NESTING:
            self._refuse(f"expected at most {MAX_NESTING} levels of nesting")
        found = rule()
        self._level -= 1
        return found

    def _test(self) -> _Operand:
        left = self._operand()
        sign = self._accept(*_COMPARISONS)
        if sign:
            value = self._compared(_COMPARISONS[sign.text], left, self._operand())
        elif self._accept("IS"):
            value = self._state(left)
        else:
            negated = self._accept("NOT")
            keyword = self._accept("IN", "BETWEEN", "LIKE", "ILIKE")
            if keyword is None:
                return self._refuse("expected IN, BETWEEN or LIKE") if negated else left
            value = self._membership(left, keyword.keyword)
            value = ~value if negated else value
        return _Operand(left.start, pa.bool_(), value)

    def _compared(self, compare: Callable[[Any, Any], Any], left: _Operand, right: _Operand) -> Any:
        kinds = {left.kind, right.kind}
        if "NULL" in kinds:
            return pc.scalar(pa.scalar(None, pa.bool_()))
        if kinds == {"time", "text"}:  # dates are written as texts
            kind = left.type if left.kind == "time" else right.type
            return compare(self._cast(left, kind), self._cast(right, kind))
        if len(kinds) > 1 or not kinds <= set(_KINDS):
            advice = ", or CAST(... AS INT)" if kinds == {"number", "text"} else ""
            self._refuse(
                f"a {left.kind} cannot be compared with a {right.kind}; compare values of one "
                f"kind{advice}",
                right.start,
            )
        return compare(left.value, right.value)

    def _state(self, left: _Operand) -> Any:
        negated = self._accept("NOT")
        state = self._expect("NULL", "TRUE", "FALSE").keyword
        if state == "NULL":
            value = left.value.is_null()
        else:
            truth = self._truth(left)
            value = pc.coalesce(truth if state == "TRUE" else ~truth, pc.scalar(False))
        return ~value if negated else value

    def _membership(self, left: _Operand, keyword: str) -> Any:
        if keyword in ("LIKE", "ILIKE"):
            return self._pattern(left, ignore_case=keyword == "ILIKE")
        if keyword == "BETWEEN":
            low = self._compared(ge, left, self._operand())
            self._expect("AND")
            return low & self._compared(le, left, self._operand())
        self._expect("(")
        values = [self._compared(eq, left, self._operand())]
        while self._accept(","):
            values.append(self._compared(eq, left, self._operand()))
        self._expect(")")
        return reduce(or_, values)

    def _pattern(self, left: _Operand, *, ignore_case: bool) -> Any:
        token = self._tokens[self._next]
        if token.kind != "text":
            self._refuse("expected a pattern in single quotes")
        if left.kind != "text":
            self._refuse(f"LIKE is for texts, and this is a {left.kind}", left.start)
        self._next += 1
        pattern = _unquoted(token.text)
        if pattern.count("%") + pattern.count("_") > MAX_WILDCARDS:
            # A pattern of many _ takes a time that grows with their number and the text's length.
            self._refuse(f"a pattern has at most {MAX_WILDCARDS} of % and _", token.start)
        return pc.match_like(left.value, pattern, ignore_case=ignore_case)

    def _operand(self) -> _Operand:
        token = self._tokens[self._next]
        if self._accept("("):
            found = self._nested(self._either)
            self._expect(")")
            return found
        if self._accept("CAST"):
            return self._explicit_cast(token)
        if self._accept("NULL"):
            return _Operand(token.start, pa.null(), pc.scalar(None))
        if self._accept("TRUE", "FALSE"):
            return _Operand(token.start, pa.bool_(), pc.scalar(token.keyword == "TRUE"))
        if token.kind not in ("number", "text", "name") or token.keyword:
            self._refuse("expected a column, a number or a text")
        self._next += 1
        if token.kind == "name":
            return self._name(token)
        return self._literal(token)

    def _literal(self, token: _Token) -> _Operand:
        if token.kind == "text":
            return _Operand(token.start, pa.string(), pc.scalar(_unquoted(token.text)))
        digits = "".join(token.text.split())
        whole = re.fullmatch(r"-?\d{1,18}", digits)
        value = pa.scalar(int(digits) if whole else float(digits))
        return _Operand(token.start, value.type, pc.scalar(value))

    def _name(self, token: _Token) -> _Operand:
        """A column, a field of one, or a date such as DATE '2024-01-31'."""
        following = self._tokens[self._next]
        if following.text == "(":
            self._refuse(
                f"{token.text} is used as a function, and functions are not allowed", token.start
            )
        if token.text.upper() in ("DATE", "TIMESTAMP") and following.kind == "text":
            self._next += 1
            kind = _TYPES[token.text.upper()]
            return _Operand(token.start, kind, self._cast(self._literal(following), kind))
        first, *fields = (part.strip("`") for part in re.findall(r"`[^`]+`|[^.`]+", token.text))
        column = self._column(first, token.start)
        kind = self._types[column]
        for field in fields:
            index = kind.get_field_index(field) if pa.types.is_struct(kind) else -1
            if index < 0:
                self._refuse(f"{column} has no field {brief(field)}", token.start)
            kind = kind.field(index).type
        value = pc.field(column, *fields)
        self.columns[column] = None
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
            value = value.cast(kind)
        return _Operand(token.start, kind, value)

    def _column(self, name: str, start: int) -> str:
        if name in self._types:
            return name
        alike = [column for column in self._types if column.lower() == name.lower()]
        if len(alike) != 1:
            near = did_you_mean(name, self._types)
            self._refuse(f"there is no column {brief(name)}{'. ' + near if near else ''}", start)
        return alike[0]

    def _explicit_cast(self, token: _Token) -> _Operand:
        self._expect("(")
        operand = self._nested(self._either)
        self._expect("AS")
        name = self._tokens[self._next]
        kind = _TYPES.get(name.text.upper())
        if kind is None:
            self._refuse(f"expected one of the types {', '.join(_TYPES)}")
        self._next += 1
        self._expect(")")
        return _Operand(token.start, kind, self._cast(operand, kind))

    def _cast(self, operand: _Operand, kind: Any) -> Any:
        if pa.types.is_integer(kind) and pa.types.is_floating(operand.type):
            return pc.trunc(operand.value).cast(kind)
        return operand.value.cast(kind)


def _unquoted(text: str) -> str:
    quote = text[0]
    return text[1:-1].replace(2 * quote, quote)
