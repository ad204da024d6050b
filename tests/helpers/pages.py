"""HTML pages in a parser and in a browser, and hostile texts that they must escape."""

import json
from contextlib import contextmanager
from html.parser import HTMLParser

HOSTILE = (
    "<script>alert(1)</script>",
    "</script><script>document.title = 'run'</script><!-- <script>",
    "<img src=x onerror=alert(1)> &amp; \u2028 \u2029 \x00 {{ 7 * 7 }} ${7 * 7} \\u003c",
    "\N{FAMILY} 👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 — ﷽ and a family on the beach 🏖️",
    "امرأتان تقرأان كتابًا على الشاطئ في المساء.",
    "\u202eright to left, never closed",
    "wordwithoutanyspace" * 105,
    "A long story of a dog, and of its owner. " * 50,
)


class ParsedPage(HTMLParser):
    """The elements, attributes, scripts and text of a page, as a browser would read them."""

    VOID = ("meta", "link", "input", "br")

    def __init__(self, source):
        super().__init__(convert_charrefs=True)
        self.elements, self.scripts, self.text, self.open = [], [], [], []
        self.feed(source)
        self.close()
        self.visible_text = " ".join(" ".join(self.text).split())

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif self.open and self.open[-1] != "style":
            self.text.append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def data(self):
        return json.loads(self.scripts[0])


CHARTS_READY = (
    "[...document.querySelectorAll('[data-chart]')].every(box => box.querySelector('svg'))"
)


@contextmanager
def open_page(browser, path, width=1_280, scheme="light"):
    """Open a page in a browser; check at the end that it had no errors and made no requests."""
    complaints, requested = [], []
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    try:
        tab = context.new_page()
        tab.set_default_timeout(15_000)
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
        tab.on("request", lambda request: requested.append(request.url))
        tab.goto(path.as_uri())
        tab.wait_for_function(CHARTS_READY)
        yield tab
        assert complaints == []
        assert requested == [path.as_uri()]
    finally:
        context.close()


VIEWS = (("screen", 1_280, "light"), ("print", 718, "dark"), ("screen", 360, "dark"))

#: Returns by how many pixels the page is too wide, and the elements outside of scroll boxes that
#: overflow it.
FIND_OVERFLOW = """() => {
    const width = document.documentElement.clientWidth;
    const out = [...document.querySelectorAll("body *")].filter((e) =>
        e.getBoundingClientRect().right > width + 1 && !e.closest(".scroll"));
    return [document.documentElement.scrollWidth - width, out.map((e) => e.outerHTML)];
}"""


def check_views(tab):
    """Check the current state of a page wide and light, printed, and narrow and dark.

    It must fit in each of these views, and break no rule of axe on screen.
    """
    from axe_playwright_python.sync_playwright import Axe

    options = {"resultTypes": ["violations"], "rules": {"target-size": {"enabled": True}}}
    for media, width, scheme in VIEWS:
        tab.emulate_media(media=media, color_scheme=scheme)
        tab.set_viewport_size({"width": width, "height": 800})
        assert tab.evaluate(FIND_OVERFLOW) == [0, []]
        assert media == "print" or Axe().run(tab, options=options).response["violations"] == []
