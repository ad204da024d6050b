"""Results as one HTML file that needs nothing else: no network, no further file."""

from llmcond.report.page.gather import Page, page_of
from llmcond.report.page.render import check_page, write_page

__all__ = ["Page", "check_page", "page_of", "write_page"]
