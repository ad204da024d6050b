"""The pictures of the documentation: current, small, legible, and without foreign content."""

import re
import shutil
from contextlib import contextmanager
from xml.etree import ElementTree

import pictures
import pytest

pytestmark = pytest.mark.usefixtures("one_thread")

DRAWINGS = [
    pictures.picture_path(name, theme) for name in pictures.DRAWINGS for theme in pictures.THEMES
]
#: The map of clusters takes a minute to draw.
CHEAP = [name for name in pictures.DRAWINGS if name != "clusters"]
NUMBER = re.compile(r"(?<![\w#])-?\d+(?:\.\d+)?")


@pytest.mark.parametrize("name", CHEAP)
def test_drawing_is_current(name):
    picture = pictures.DRAWINGS[name]()
    for theme in pictures.THEMES:
        svg = picture.svg(theme)
        stored = pictures.picture_path(name, theme).read_text(encoding="utf-8")
        # Another processor may round differently, which also changes shades of colours.
        shapes = [re.sub("#[0-9a-f]{6}", "#", NUMBER.sub("", text)) for text in (svg, stored)]
        assert shapes[0] == shapes[1]
        numbers = [[float(n) for n in NUMBER.findall(text)] for text in (svg, stored)]
        assert numbers[0] == pytest.approx(numbers[1], rel=0.01, abs=0.011)


def test_drawing_is_the_same_twice():
    first, second = (pictures.draw_benchmark().svg("dark") for _ in range(2))
    assert first == second


def test_chart_has_the_speeds_of_the_table():
    table = pictures.read_benchmark()
    assert len(table) == 11
    svg = pictures.draw_benchmark().svg("light")
    assert f">{table['float32', 'llmcond']['tokens/s']}</text>" in svg
    assert f">{table['bfloat16', 'OpenVINO']['tokens/s']}</text>" in svg


@pytest.mark.parametrize("path", DRAWINGS, ids=lambda path: path.stem)
def test_drawing_has_no_scripts_links_or_styles(path):
    assert path.stat().st_size < 60_000
    root = ElementTree.parse(path).getroot()
    assert root.get("role") == "img"
    for element in root.iter():
        assert element.tag.partition("}")[2] in {"svg", "title", "rect", "text", "tspan", "path"}
        assert not [name for name in element.attrib if "href" in name or name.startswith("on")]
        assert not [value for value in element.attrib.values() if "url(" in value]


@pytest.mark.parametrize("path", DRAWINGS, ids=lambda path: path.stem)
def test_texts_of_drawing_are_legible(path):
    root = ElementTree.parse(path).getroot()
    boxes, smallest = [], 100.0
    for element in root:
        at = {name: float(element.get(name, 0)) for name in ("x", "y", "width", "height")}
        kind = element.tag.partition("}")[2]
        if kind == "rect":
            boxes.append((at, element.get("fill")))
        elif kind == "text":
            behind = [fill for box, fill in boxes if contains(box, at["x"], at["y"])][-1]
            for part in (element, *element):
                smallest = min(smallest, pictures.contrast(part.get("fill"), behind))
            assert 0 < at["x"] < pictures.WIDTH
            # At 358 of 600 pixels, the smallest text has about 9.5 pixels.
            assert float(element.get("font-size", 18)) >= 16
    assert 4.5 <= smallest < 100


def contains(box, x, y):
    across, down = x - box["x"], y - box["y"]
    return 0 <= across <= box["width"] and 0 <= down <= box["height"]


def test_contrast_is_that_of_wcag():
    assert pictures.contrast("#000000", "#ffffff") == pytest.approx(21)
    assert pictures.contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)


@pytest.mark.parametrize("name", pictures.DRAWINGS)
def test_both_themes_have_the_same_alternative_text(name):
    texts = {
        ElementTree.parse(pictures.picture_path(name, theme)).getroot().findtext("{*}title")
        for theme in pictures.THEMES
    }
    assert texts == {pictures.alternative_text(name)}
    assert not re.search(r'[]["\n<&]', *texts)  # they stand in Markdown and in HTML


def test_screenshots_are_small():
    for name in pictures.SCREENSHOTS:
        for theme in pictures.THEMES:
            assert pictures.picture_path(name, theme).stat().st_size < 150_000


@pytest.mark.script("pictures")
def test_screenshot_has_both_themes(tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    if pictures.find_browser() is None:
        pytest.skip("no Chromium or Chrome is installed")

    @contextmanager
    def make_page(folder):
        page = folder / "page.html"
        page.write_text('<html style="color-scheme: light dark"><body><p id="text">a')
        yield page.as_uri()

    monkeypatch.setattr(pictures, "IMAGES", tmp_path)
    monkeypatch.setitem(
        pictures.SCREENSHOTS,
        "server-page",
        pictures.Screenshot("text", "p", make_page, lambda tab: None),
    )
    pictures.take_screenshots("server-page")
    corners = [
        image.open(pictures.picture_path("server-page", theme)).getpixel((9, 9))
        for theme in pictures.THEMES
    ]
    assert corners[0] == (255, 255, 255)
    assert max(corners[1]) < 64


def test_alternative_text_is_written_into_pages(tmp_path, monkeypatch):
    text = pictures.alternative_text("clusters")
    (tmp_path / "docs").mkdir()
    readme, page = tmp_path / "README.md", tmp_path / "docs" / "page.md"
    before = (
        '<img alt="old" src="docs/images/clusters-light.svg">',
        "![](images/clusters-light.svg#gh-light-mode-only)![b](images/clusters-page-dark.webp)",
    )
    readme.write_text(before[0])
    page.write_text(before[1])
    monkeypatch.setattr(pictures, "ROOT", tmp_path)
    pictures.write_alternative_text("clusters")
    assert readme.read_text(encoding="utf-8") == before[0].replace("old", text)
    assert page.read_text(encoding="utf-8") == before[1].replace("![]", f"![{text}]")


def test_right_alternative_text_may_be_broken_into_lines(tmp_path, monkeypatch):
    text = pictures.alternative_text("benchmark").replace(" ", "\n", 1)
    (tmp_path / "docs").mkdir()
    readme = tmp_path / "README.md"
    readme.write_text(f"![{text}](docs/images/benchmark-dark.svg)", encoding="utf-8")
    before = readme.read_bytes()
    monkeypatch.setattr(pictures, "ROOT", tmp_path)
    pictures.write_alternative_text("benchmark")
    assert readme.read_bytes() == before


def test_unknown_picture_is_reported(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["pictures", "conditions", "cluster"])
    with pytest.raises(SystemExit, match="2"):
        pictures.main()
    assert "unknown 'cluster'. Expected one of: conditions, " in capsys.readouterr().err


def test_main_writes_named_drawing(tmp_path, monkeypatch, capsys):
    images = tmp_path / "docs" / "images"
    images.parent.mkdir()
    shutil.copy(pictures.ROOT / "README.md", tmp_path)
    monkeypatch.setattr(pictures, "ROOT", tmp_path)
    monkeypatch.setattr(pictures, "IMAGES", images)
    monkeypatch.setattr("sys.argv", ["pictures", "benchmark"])
    pictures.main()
    assert "benchmark-dark.svg: 3 KiB" in capsys.readouterr().out
    assert sorted(path.name for path in images.iterdir()) == [
        "benchmark-dark.svg",
        "benchmark-light.svg",
    ]
