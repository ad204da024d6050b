"""``llmcond heads``: list recipes, or the heads of a run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmcond.bundled import bundled_names
from llmcond.commands.base import Command
from llmcond.errors import UserError
from llmcond.log import log
from llmcond.options import option


@dataclass(frozen=True, kw_only=True)
class Heads(Command):
    """List the bundled head recipes, or the fitted heads of a run."""

    position = 240
    example = "llmcond heads --run runs/mine --default mlp@concat-sent-cond"
    formats = True

    run: str | Path | None = option(
        None, metavar="DIR", help="run whose heads are listed (default: list the bundled recipes)"
    )
    default: str | None = option(
        None,
        metavar="NAME",
        help="with --run: make this head the run's default head (until then: the head with the "
        "best dev score, if that is better than the score of zero-shot)",
    )

    def execute(self) -> dict[str, Any]:
        """Return the recipes or heads, one row each.

        Raises:
            UserError: there is no such run or head, or ``default`` is given without ``run``.
        """
        return {"heads": self._bundled() if self.run is None else self._fitted(Path(self.run))}

    def _bundled(self) -> list[dict[str, Any]]:
        from llmcond.heads.recipes import load_recipe
        from llmcond.tasks import TASKS

        if self.default is not None:
            raise UserError("--default sets the default head of a run. Name the run with --run.")
        rows = []
        for task in TASKS:
            for recipe in (load_recipe(name, task) for name in bundled_names("heads", task)):
                settings = " ".join(f"{k}={v}" for k, v in asdict(recipe.settings).items())
                about = {"name": recipe.name, "task": task, "kind": recipe.kind}
                about |= {"description": recipe.description, "settings": settings}
                rows.append({**about, "source": recipe.source})
        return rows

    def _fitted(self, folder: Path) -> list[dict[str, Any]]:
        from llmcond.runs import dev_score, open_any_run

        run = open_any_run(folder)
        if self.default is not None:
            run.set_default_head(self.default)
        default = run.default_head()
        records = {name: run.head_record(name) for name in run.head_names()}
        if default is not None and default[0] not in records:
            log.info(f"the run's default is zero-shot, {default[0]}: {default[1]}")
        return [
            {
                "name": name,
                "kind": record["kind"],
                "dim": record["dim_out"],
                f"dev_{run.dev_metric}": dev_score(record, run.dev_metric),
                "fitted_on": record["data"]["source"],
                "taken": default[1] if default and default[0] == name else "",
            }
            for name, record in records.items()
        ]

    def show(self, result: dict[str, Any], form: str) -> None:
        """Print a table; in a terminal without the recipes' settings, which ``--json`` prints."""
        from llmcond.display import Table

        brief = form == "table" and self.run is None
        keys = ("name", "task", "description") if brief else ()
        Table.of_rows(result["heads"], keys).print(form)
