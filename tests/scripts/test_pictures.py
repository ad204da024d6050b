"""The pictures of the documentation: current, legible, and without foreign content."""

import re
from xml.etree import ElementTree

import pictures
import pytest

pytestmark = pytest.mark.usefixtures("one_thread")

NUMBER = re.compile(r"(?<![\w#])-?\d+(?:\.\d+)?")


@pytest.mark.parametrize(
    "name",
    [
        "benchmark",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("conditions", "tokens", "ignoring")),
    ],
)
def test_drawing_is_current(name):
    picture = pictures.DRAWINGS[name]()
    for theme in pictures.THEMES:
        stored = pictures.picture_path(name, theme).read_text(encoding="utf-8")
        texts = (picture.svg(theme), stored)
        # Another processor may round differently, which also changes shades of colours.
        shapes = [re.sub("#[0-9a-f]{6}", "#", NUMBER.sub("", text)) for text in texts]
        assert shapes[0] == shapes[1]
        numbers = [[float(n) for n in NUMBER.findall(text)] for text in texts]
        assert numbers[0] == pytest.approx(numbers[1], rel=0.01, abs=0.011)


def test_drawings_have_no_scripts_and_legible_texts():
    for name in pictures.DRAWINGS:
        for theme in pictures.THEMES:
            path = pictures.picture_path(name, theme)
            root = ElementTree.parse(path).getroot()
            kinds = {element.tag.partition("}")[2] for element in root.iter()}
            assert kinds <= {"svg", "title", "rect", "text", "tspan", "path"}
            for element in root.iter():
                assert not [key for key in element.attrib if "href" in key or key.startswith("on")]
                assert float(element.get("font-size", 18)) >= 16
            assert root.findtext("{*}title") == pictures.alternative_text(name)
