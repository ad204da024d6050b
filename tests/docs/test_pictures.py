"""Pictures of README.md and docs/ exist, with alternative texts, for light and for dark pages."""

import re

import pictures
import pytest
from helpers.paths import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARKDOWN = re.compile(r"!\[([^]]*)\]\(([^)\s]+)\)")
HTML = re.compile(r'<img alt="([^"]*)" src="([^"]+)"|<source [^>]*?srcset="([^"]+)"')


def find_images(page):
    """Yield the alternative text and the path of each image; a <source> has no such text."""
    text = page.read_text(encoding="utf-8")
    for alternative, path in MARKDOWN.findall(text):
        yield alternative, path
    for alternative, path, source in HTML.findall(text):
        yield (None, source) if source else (alternative, path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_images_of_page_exist_and_have_alternative_text(page):
    for alternative, path in find_images(page):
        # README.md has absolute addresses, for a package index.
        _, absolute, part = path.partition("/main/docs/")
        file = ROOT / "docs" / part if absolute else page.parent / path.partition("#")[0]
        assert file.is_file(), path
        assert alternative is None or alternative.strip(), path
        if file.parent == pictures.IMAGES and alternative is not None:
            name = file.stem.rpartition("-")[0]
            assert " ".join(alternative.split()) == pictures.alternative_text(name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_shows_pictures_for_both_themes(page):
    shown = [path for _, path in MARKDOWN.findall(page.read_text(encoding="utf-8"))]
    shown = [path for path in shown if "images/" in path]
    for light, dark in zip(shown[::2], shown[1::2], strict=True):
        assert light.endswith("#gh-light-mode-only")
        assert dark == light.replace("-light.", "-dark.").replace(
            "#gh-light-mode-only", "#gh-dark-mode-only"
        )


def test_html_images_are_read(tmp_path):
    page = tmp_path / "page.md"
    page.write_text('<source srcset="a-dark.svg"><img alt="" src="a-light.svg"> ![b](b.svg)')
    assert list(find_images(page)) == [("b", "b.svg"), (None, "a-dark.svg"), ("", "a-light.svg")]


def test_folder_has_every_picture_and_nothing_else():
    files = {
        pictures.picture_path(name, theme) for name in pictures.NAMES for theme in pictures.THEMES
    }
    assert set(pictures.IMAGES.iterdir()) == files
