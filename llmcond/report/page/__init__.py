"""An HTML report of results: one self-contained file that needs no network."""

from llmcond.report.page.gather import Page, make_page
from llmcond.report.page.render import check_page, write_page

__all__ = ["Page", "check_page", "make_page", "write_page"]
