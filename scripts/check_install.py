"""Install the package in new environments, away from the clone, and run the README's examples.

    python scripts/check_install.py [--python 3.11 3.12 3.13] [--versions lowest newest]

Without ``--package``, the script builds an sdist, and a wheel from it. For each Python and each set
of versions it creates an environment with the extra ``demo``, with the lowest or the newest
versions of the dependencies that pyproject.toml admits. It needs uv (``pip install uv``), which
downloads several gigabytes: on Linux, PyPI has PyTorch for CUDA only. ``--torch-backend cpu`` takes
the CPU build from PyTorch's index.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import Options

ROOT = Path(__file__).resolve().parent.parent
#: Prints the installed versions of the libraries that change most.
VERSIONS = """
from importlib.metadata import version
print(*map(version, ("torch", "transformers", "pylance")))
"""
RESOLUTIONS = {"lowest": "lowest-direct", "newest": "highest"}


def main() -> None:
    """Check each combination, and print a row for it; exit with 1 if any failed."""
    parser = Options(__doc__)
    parser.add_argument("--python", nargs="+", default=["3.11"], help="versions or paths")
    parser.add_argument("--versions", nargs="+", default=[*RESOLUTIONS], choices=RESOLUTIONS)
    parser.add_argument("--package", type=Path, help="a wheel or an sdist")
    parser.add_argument("--torch-backend", help="passed to uv, for example cpu")
    arguments = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        package = arguments.package or build(folder / "dist")
        print("| Python | versions | torch | transformers | pylance | README | seconds |")
        print("|---|---|---|---|---|---|---|", flush=True)
        for python in arguments.python:
            for versions in arguments.versions:
                start = time.perf_counter()
                try:
                    environment = folder / f"{python.replace(os.sep, '-')}-{versions}"
                    executable = install(
                        package.resolve(), environment, python, versions, arguments.torch_backend
                    )
                    libraries = " | ".join(run(executable, "-c", VERSIONS).split())
                    n_examples = run_readme(executable, folder / "work")
                    result = f"{libraries} | {n_examples} examples run"
                except subprocess.CalledProcessError as error:
                    result, failed = f"failed: {shlex.join(map(str, error.cmd))}", True
                    print(error.stderr or error.stdout, file=sys.stderr)
                seconds = time.perf_counter() - start
                print(f"| {python} | {versions} | {result} | {seconds:.0f} |", flush=True)
    sys.exit(int(failed))


def build(out: Path) -> Path:
    """Build an sdist, and a wheel from it, and return the wheel."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT)
    (wheel,) = out.glob("*.whl")
    return wheel


def install(
    package: Path, environment: Path, python: str, versions: str, torch_backend: str | None
) -> Path:
    """Create an environment with the package and the extra ``demo``, and return its Python."""
    executable = environment / "bin" / "python"
    backend = ("--torch-backend", torch_backend) if torch_backend else ()
    run("uv", "venv", "--quiet", "--no-project", "--python", python, environment)
    uv = ("uv", "pip", "install", "--quiet", "--only-binary", ":all:", "--python", executable)
    # uv takes the lowest versions of the requirements of a file, but not of those of a wheel.
    resolution = ("--resolution", RESOLUTIONS[versions], *backend)
    run(*uv, *resolution, "--requirements", ROOT / "pyproject.toml", "--extra", "demo")
    run(*uv, "--no-deps", package)
    run("uv", "pip", "check", "--python", executable)
    return executable


def run_readme(executable: Path, folder: Path) -> int:
    """Run the README's examples in a folder, without a network, and return their number."""
    folder.mkdir(exist_ok=True)
    (folder / "docs").mkdir(exist_ok=True)
    shutil.copy(ROOT / "docs" / "tickets.csv", folder / "docs")
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    examples: list[list[str | Path]] = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        if language == "python":
            examples.append([executable, "-c", block])
        for line in block.replace("\\\n", " ").splitlines() if language == "bash" else ():
            program, *words = shlex.split(line, comments=True)
            if program == "llmcond":  # the other commands install the package
                examples.append([executable.with_name("llmcond"), *words])
    for example in examples:
        run(*example, cwd=folder)
    return len(examples)


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Run a command without a network for models, and return what it printed."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    process = subprocess.run(
        command,
        cwd=cwd,
        env={**environment, "HF_HUB_OFFLINE": "1"},
        check=True,
        capture_output=True,
        text=True,
    )
    return process.stdout


if __name__ == "__main__":
    main()
