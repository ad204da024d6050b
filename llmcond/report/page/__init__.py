"""An HTML report of results: one self-contained file that needs no network."""

from llmcond.report.page.figures import check_figures, write_figures
from llmcond.report.page.gather import Page, make_page
from llmcond.report.page.render import check_page, write_page

__all__ = ["Page", "check_figures", "check_page", "make_page", "write_figures", "write_page"]
