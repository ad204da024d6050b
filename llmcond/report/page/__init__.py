"""An HTML report of results: one self-contained file that needs no network."""

from llmcond.report.page.gather import Page, page_of
from llmcond.report.page.render import check_page, write_page

__all__ = ["Page", "check_page", "page_of", "write_page"]
