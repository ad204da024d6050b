"""``llmcond heads``: the bundled recipes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmcond.bundled import bundled_names
from llmcond.commands.base import Command
from llmcond.errors import UserError
from llmcond.options import option


@dataclass(frozen=True, kw_only=True)
class Heads(Command):
    """List the bundled head recipes, or the heads that were fitted in a run."""

    position = 240
    example = "llmcond heads --run runs/mine --default mlp@concat-sent-cond"
    formats = True

    run: str | Path | None = option(None, metavar="DIR", help="list the heads of this run")
    default: str | None = option(
        None,
        metavar="NAME",
        help="from now on the head that is taken where none is named (otherwise: the best on dev)",
    )

    def execute(self) -> dict[str, Any]:
        """List."""
        return {"heads": self._bundled() if self.run is None else self._fitted(Path(self.run))}

    def _bundled(self) -> list[dict[str, Any]]:
        from llmcond.heads.recipes import load_recipe
        from llmcond.tasks import TASKS

        if self.default is not None:
            raise UserError("--default is of a run; name it with --run.")
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
        usual = run.default_head()
        records = {name: run.head_record(name) for name in run.head_names()}
        return [
            {
                "name": name,
                "kind": record["kind"],
                "dim": record["dim_out"],
                f"dev_{run.dev_metric}": dev_score(record, run.dev_metric),
                "fitted_on": record["data"]["source"],
                "taken": usual[1] if usual and usual[0] == name else "",
            }
            for name, record in records.items()
        ]

    def show(self, result: dict[str, Any], form: str) -> None:
        """Print a table; in a terminal without the recipes' settings, which ``--json`` has."""
        from llmcond.report.terminal import listing, show

        brief = form == "table" and self.run is None
        show(listing(result["heads"], ("name", "task", "description") if brief else ()), form)
