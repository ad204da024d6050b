"""Texts without the markup of HTML."""

from __future__ import annotations

import html
import re

#: Elements within a line: their tags do not divide words.
_INLINE = frozenset(
    re.findall(
        r"\w+",
        "a abbr acronym b bdi bdo big cite code data del dfn em font i ins kbd mark nobr q s samp "
        "small span strike strong sub sup time tt u var wbr",
    )
)
#: Other tags without a prefix, such as ``<name>``, may be texts.
_BLOCKS = re.findall(
    r"\w+",
    "address applet area article aside audio base blockquote body br button canvas caption center "
    "col colgroup datalist dd details dialog dir div dl dt embed fieldset figcaption figure footer "
    "form frame frameset h1 h2 h3 h4 h5 h6 head header hgroup hr html iframe img input label "
    "legend li link main map menu meta nav noframes noscript object ol optgroup option output p "
    "param picture pre progress script section select slot source style summary svg table tbody td "
    "template textarea tfoot th thead title tr track ul video",
)
#: Attributes without a value; others need one, so that ``a<b and b>c`` is no tag.
_FLAGS = "checked|controls|compact|disabled|hidden|noshade|nowrap|open|readonly|required|selected"
_ATTRIBUTE = rf"""\s+(?:[^\s"'<>/=]+\s*=\s*(?:"[^"]*"|'[^']*'|[^\s"'=<>`]+)|{_FLAGS})"""
_NAME = rf"(?P<name>{'|'.join(sorted((*_INLINE, *_BLOCKS)))}|[a-z]\w*[:-][\w:.-]*)"
_TAG = re.compile(
    rf"</?{_NAME}(?:{_ATTRIBUTE})*\s*/?>",
    re.IGNORECASE,
)
#: Parts whose content is not text either.
_HIDDEN = re.compile(
    r"<!--.*?(?:-->|\Z)|<!(?:doctype|\[)[^>]*>|<\?xml[^>]*>"
    r"|<(script|style)\b[^>]*>.*?(?:</\1\s*>|\Z)",
    re.IGNORECASE | re.DOTALL,
)


def strip_html(text: str) -> str:
    """Return a text without HTML, in a single line.

    Tags, comments, scripts and styles are removed, and entities become characters. ``a < b`` and
    ``<name>`` are not HTML, and stay.
    """
    text = _TAG.sub(_replacement, _HIDDEN.sub(" ", text))
    return " ".join(html.unescape(text).split())


def _replacement(tag: re.Match[str]) -> str:
    return "" if tag["name"].lower() in _INLINE else " "
