"""Texts without HTML: what is markup goes, and what only looks like it stays."""

import time

import pytest

from llmcond.data.datasets import strip_html


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<p>Hello <b>wor</b>ld</p><br/>now", "Hello world now"),
        ("one<br>two<li>three</td>four", "one two three four"),
        ("<i>Good</i><EM CLASS=x>bye</EM>", "Goodbye"),
        ("<script>if (a < b) {}</script>a<style>p {}</style>b", "a b"),
        ("a <!-- <b>no</b> --> b<!-- open", "a b"),
        ("<!DOCTYPE html><?xml version='1.0'?><html>a</html>", "a"),
        ("<a title='a > b' href=\"x\">link</a>", "link"),
        ("<o:p>word</o:p> <my-tag>b</my-tag>", "word b"),
        ("&lt;b&gt; &amp; caf&eacute;&nbsp;&#8211;\n\t&#x41;", "<b> & café – A"),
        ("<script>open", ""),
        ("<br>&nbsp;", ""),
        ("a < b", "a < b"),
        ("a<b and b>c", "a<b and b>c"),
        ("x <- y, i <3 you", "x <- y, i <3 you"),
        ("1 <2 and 3> 2", "1 <2 and 3> 2"),
        ("if x <y then", "if x <y then"),
        ("Dear <name>, <john@doe.org> wrote <https://a.b>", "Dear <name>, <john@doe.org> wrote <https://a.b>"),
        ("AT&T R&D", "AT&T R&D"),
        ("List<String> and <unk>", "List<String> and <unk>"),
        ("<p", "<p"),
        ("<td nowrap align=left>a</td><option selected>b", "a b"),
    ],
)  # fmt: skip
def test_html_is_removed(text: str, expected: str):
    assert strip_html(text) == expected


@pytest.mark.parametrize("part", ["<!--", "<a ", "<a x=1", "<script>", "<a x='", "<", "&amp"])
def test_time_grows_with_the_length(part: str):
    began = time.perf_counter()
    strip_html(part * 50_000)
    assert time.perf_counter() - began < 5
