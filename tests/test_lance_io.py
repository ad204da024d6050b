"""Lance datasets on a disk: missing datasets, and files that a full disk truncates."""

import re
import subprocess
import sys

import lance
import pyarrow as pa
import pytest

from llmcond.base.errors import UserError
from llmcond.base.stores import check_lance_column_names, commit_rows, open_newest, write_rows

ROWS = pa.table({"x": list(range(1000))})

WRITE_WITH_SIZE_LIMIT = """
import resource, signal, sys
import pyarrow as pa
from llmcond.base.errors import is_disk_full
from llmcond.base.stores import open_newest, write_rows
uri, size = sys.argv[1], int(sys.argv[2])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
try:
    write_rows(uri, None, open_newest(uri), pa.table({"x": list(range(1000))}))
except OSError as error:
    print(is_disk_full(error))
"""


@pytest.mark.parametrize(("exists", "missing"), [(False, 60), (True, 1)])
def test_truncated_file_is_reported_as_full_disk(tmp_path, exists, missing):
    """A limit on the size of files stands in for a full disk."""
    if exists:
        lance.write_dataset(ROWS, tmp_path / "cut.lance")
    (fragment,) = write_rows(str(tmp_path / "whole.lance"), None, None, ROWS)
    limit = fragment.files[0].file_size_bytes - missing
    code = [sys.executable, "-c", WRITE_WITH_SIZE_LIMIT, str(tmp_path / "cut.lance"), str(limit)]
    process = subprocess.run(code, capture_output=True, text=True, check=True)
    assert process.stdout == "True\n", process.stderr


def test_folder_without_version_contains_no_dataset(tmp_path):
    uri = str(tmp_path / "x.lance")
    assert open_newest(uri) is None
    fragments = write_rows(uri, None, None, ROWS)
    (tmp_path / "x.lance" / "_versions").mkdir()
    assert open_newest(uri) is None
    commit_rows(uri, None, None, fragments, ROWS.schema)
    assert open_newest(uri).count_rows() == 1000


def test_column_names_that_lance_cannot_hold_are_refused():
    for names, reason in (
        (["a.b"], "'a.b' contains '.'"),
        (["my `kind`"], "contains '`'"),
        (["\u00a0 "], "is empty"),
        (["kind", "year", "kind"], "'kind' occurs twice"),
        (["_rowid"], "'_rowid' is reserved"),
        (["x\0"], "contains a NUL character"),
    ):
        with pytest.raises(UserError, match=rf"{re.escape(reason)}.* Rename the column\.$"):
            check_lance_column_names(["text", *names])


def test_lance_holds_all_other_column_names(tmp_path):
    names = [*"a A e\u0301 _x select null 'q' a/b a\\b a:b ** 😀".split(), "a\nb", "x" * 5000]
    check_lance_column_names(names)
    uri = str(tmp_path / "names.lance")
    rows = pa.table([pa.array([name]) for name in names], names=names)
    dataset = commit_rows(uri, None, None, write_rows(uri, None, None, rows), rows.schema)
    assert dataset.to_table(columns=names).to_pylist() == rows.to_pylist()
