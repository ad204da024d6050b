r"""Execute the tutorials, and write them as Markdown and as notebooks with their outputs.

    python scripts/notebooks.py --out build/tutorials
    python scripts/notebooks.py quickstart tickets --out build/tutorials

A tutorial is a notebook in jupytext's percent format, `docs/tutorials/NAME.py`. It runs in an empty
temporary folder with this checkout of llmcond, and without a network. A failing cell is an error,
and so is a shell command with another exit code than 0.

A cell lists regular expressions that its output must contain, with single spaces between words,
so that the text cannot disagree with the output: `# %% expect=["the place 0\\.4"]`.
`scripts/make_docs.py` renders the tutorials in the site.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from common import Options

ROOT: Final = Path(__file__).resolve().parent.parent
TUTORIALS: Final = ROOT / "docs" / "tutorials"
#: Width of tables in characters, which fits into 700 pixels.
COLUMNS: Final = 80
#: Number of lines above which a cell is folded.
LONG_CELL: Final = 40
#: Largest time of a cell, in seconds.
TIMEOUT: Final = 180
#: Makes `!command` fail where the command fails, and run without a terminal and its progress bars.
#: ipykernel sets FORCE_COLOR.
STARTUP: Final = '''
def _system(command):
    """Run a shell command, print its output, and raise its failure."""
    import os
    import subprocess

    os.environ.pop("FORCE_COLOR", None)
    out = subprocess.run(command, shell=True, text=True, stdout=-1, stderr=subprocess.STDOUT)
    print(out.stdout, end="", flush=True)
    out.check_returncode()


get_ipython().system = _system
del _system
'''
TEMPLATE: Final = """
{%- extends 'markdown/index.md.j2' -%}
{% block input %}{{ cell.source | fence_source }}{% endblock input %}
{% block stream %}{{ output.text | fence_text }}{% endblock stream %}
{% block data_text %}{{ output.data['text/plain'] | fence_text }}{% endblock data_text %}
{% block data_html %}{{ output.data['text/html'] | plain_html }}{% endblock data_html %}
"""


class TutorialError(Exception):
    """A cell failed, or its output lacks something that the text of the tutorial relies on."""


def execute(source: Path, out: Path) -> str:
    """Execute a tutorial in an empty temporary folder, and write NAME.md and NAME.ipynb.

    Args:
        source: notebook in the percent format.
        out: folder to write to; files that the page shows are written to a folder in it.

    Returns:
        The Markdown page.

    Raises:
        TutorialError: a cell failed, or its output does not match the cell's `expect`.
    """
    import jupytext
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError
    from traitlets.config import Config

    notebook = jupytext.read(source, fmt="py:percent")
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    with TemporaryDirectory(prefix="tutorial-") as temporary:
        folder = Path(temporary).resolve() / "work"
        folder.mkdir()
        # Only this user can connect to sockets in the temporary folder.
        sockets = {"transport": "ipc", "ip": str(folder.parent / "kernel")}
        client = NotebookClient(
            notebook,
            timeout=TIMEOUT,
            kernel_name="python3",
            record_timing=False,
            config=Config({"ConnectionFileMixin": sockets}),
        )
        try:
            client.execute(cwd=str(folder), env=_environment(folder.parent))
        except (CellExecutionError, CellTimeoutError) as error:
            number = sum(cell.get("execution_count") is not None for cell in code)
            reason = tidy_text(str(error), folder).strip()
            raise TutorialError(f"tutorial {source.stem}, code cell {number}: {reason}") from None
    for number, cell in enumerate(code, 1):
        cell.outputs = list(_tidied_outputs(cell.outputs, folder))
        text = "\n".join(map(_output_text, cell.outputs))
        for pattern in cell.metadata.get("expect", ()):
            if not re.search(pattern, " ".join(text.split())):
                raise TutorialError(
                    f"tutorial {source.stem}, code cell {number}: the output of this cell does not "
                    f"contain {pattern!r}.\n\n{cell.source}\n\n{text}"
                )
    notebook.metadata.pop("jupytext", None)
    for number, cell in enumerate(notebook.cells):
        cell.id = f"{source.stem}-{number}"
        cell.metadata.pop("expect", None)
    markdown, resources = _to_markdown(source.stem, notebook)
    nbformat.write(notebook, out / f"{source.stem}.ipynb")
    for path, content in {f"{source.stem}.md": markdown.encode(), **resources}.items():
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        (out / path).write_bytes(content)
    return markdown


def _environment(folder: Path) -> dict[str, str]:
    """Return the environment of the kernel, whose configuration is in a folder."""
    startup = folder / "ipython" / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "00-system.py").write_text(STARTUP, encoding="utf-8")
    first = {"PYTHONPATH": str(ROOT), "PATH": str(Path(sys.executable).parent)}
    paths = {name: [path, os.environ.get(name, "")] for name, path in first.items()}
    return {
        **os.environ,
        **{name: os.pathsep.join(filter(None, parts)) for name, parts in paths.items()},
        "IPYTHONDIR": str(folder / "ipython"),
        "COLUMNS": str(COLUMNS),
        "HF_HUB_OFFLINE": "1",
        # Threads of several notebooks would wait for each other.
        "OMP_NUM_THREADS": "1",
        # Messages and results are in the order in which a command prints them.
        "PYTHONUNBUFFERED": "1",
        "NO_COLOR": "1",
    }


def _output_text(output: Any) -> str:
    """Return the text of an output without tags."""
    data = output.get("data", {})
    if "text/html" in data:
        return re.sub("<[^<>]*>", " ", data["text/html"])
    return str(output.get("text") or data.get("text/plain") or "")


def _tidied_outputs(outputs: list[Any], folder: Path) -> Iterator[Any]:
    """Yield the outputs of a cell, with adjacent text joined, and without colours and paths.

    Args:
        outputs: outputs of a cell.
        folder: working folder of the notebook.
    """
    from nbformat.v4 import new_output

    texts: list[str] = []
    for output in outputs:
        data = output.get("data", {})
        if "text" in output:
            texts.append(tidy_text(output.text, folder))
        elif data.get("text/html", "").startswith("<pre"):  # a message that rich has printed
            texts.append(tidy_text(data["text/plain"], folder).rstrip("\n") + "\n")
        else:
            if texts:
                yield new_output("stream", name="stdout", text="".join(texts))
            texts = []
            for kind in {"text/plain", "text/html"} & set(data):
                data[kind] = tidy_text(data[kind], folder)
            yield output
    if texts:
        yield new_output("stream", name="stdout", text="".join(texts))


def tidy_text(text: str, folder: Path) -> str:
    """Return text without colours, trailing spaces and the paths of this machine."""
    from nbconvert.filters import strip_ansi

    hidden = {f"{folder}/": "", f"{folder}": ".", f"{ROOT}": "llmcond", f"{Path.home()}": "~"}
    for path, replacement in hidden.items():
        text = text.replace(path, replacement)
    return "\n".join(_wrapped(line.rstrip()) for line in strip_ansi(text).split("\n"))


def _wrapped(line: str) -> str:
    """Return a line of prose as a terminal would show it; tables remain as they are."""
    is_prose = len(line) > COLUMNS and "  " not in line and "─" not in line
    return textwrap.fill(line, COLUMNS) if is_prose else line


# -- Markdown ----------------------------------------------------------------------------------


def _to_markdown(name: str, notebook: Any) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as Markdown, and the files that it shows."""
    from nbconvert import MarkdownExporter

    exporter = MarkdownExporter(raw_template=TEMPLATE)
    for function in (fence_source, fence_text, plain_html):
        exporter.register_filter(function.__name__, function)
    markdown, resources = exporter.from_notebook_node(
        notebook, {"unique_key": name, "output_files_dir": name}
    )
    return markdown.strip() + "\n", resources.get("outputs", {})


def fence_source(source: str) -> str:
    """Return a cell as a code block: commands of a shell, a file that it writes, or Python."""
    lines = source.splitlines()
    if source.startswith("%%writefile "):
        block = _fence("\n".join(lines[1:]), f'python title="{lines[0].split()[1]}"')
    elif re.fullmatch(r"(!(.*\\\n)*.*(\n|\Z))+", source):
        block = _fence(re.sub("^!", "", source, flags=re.MULTILINE), "bash")
    else:
        block = _fence(source, "python")
    if len(lines) <= LONG_CELL:
        return block
    summary = f"<summary>Show this cell of {len(lines)} lines</summary>"
    return f"<details markdown>{summary}\n\n{block}\n</details>\n"


def fence_text(text: str) -> str:
    """Return the output of a cell as a code block; nothing for that of `%%writefile`."""
    if re.fullmatch(r"(Writing|Overwriting) \S+\n?", text):
        return ""
    return "\n" + _fence(re.sub(r"\A\n+|\s+\Z", "", text), "text")


def _fence(text: str, language: str) -> str:
    return f"```{language}\n{text}\n```\n"


def plain_html(html: str) -> str:
    """Return HTML without the style and the attributes of pandas' tables."""
    html = re.sub(r"<style.*?</style>\s*", "", html, flags=re.DOTALL)
    html = re.sub(r' (?:border|class|style)="[^"]*"', "", html)
    html = re.sub(r"\s+(?=</t[dh]>)", "", html)
    # A blank line or an indented one would end the HTML block in Markdown.
    return "\n" + "\n".join(line.strip() for line in html.splitlines() if line.strip()) + "\n"


# -- Command line ------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """Execute tutorials, write them to a folder, and print the seconds of each."""
    parser = Options(__doc__)
    names = sorted(path.stem for path in TUTORIALS.glob("*.py"))
    parser.names("names", "tutorials", names)
    parser.option("--out", Path, "output folder", required=True, metavar="FOLDER")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.names or names:
        start = time.perf_counter()
        try:
            execute(TUTORIALS / f"{name}.py", options.out)
        except TutorialError as error:
            sys.stderr.write(f"{error}\n")
            return 1
        print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
