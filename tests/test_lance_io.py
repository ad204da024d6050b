"""Lance datasets on a disk: missing datasets, and files that a full disk truncates."""

import subprocess
import sys

import lance
import pyarrow as pa
import pytest

from llmcond.lance_io import DatasetTarget, open_newest

ROWS = pa.table({"x": list(range(1000))})

WRITE_WITH_SIZE_LIMIT = """
import resource, signal, sys
import pyarrow as pa
from llmcond.errors import is_disk_full
from llmcond.lance_io import DatasetTarget, open_newest
uri, size = sys.argv[1], int(sys.argv[2])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
try:
    DatasetTarget(uri, None, open_newest(uri)).write(pa.table({"x": list(range(1000))}))
except OSError as error:
    print(is_disk_full(error))
"""


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("missing", [1, 60])
def test_truncated_file_is_reported_as_full_disk(tmp_path, exists, missing):
    """A limit on the size of files stands in for a full disk."""
    if exists:
        lance.write_dataset(ROWS, tmp_path / "cut.lance")
    fragment = DatasetTarget(str(tmp_path / "whole.lance"), None).write(ROWS)
    limit = fragment.files[0].file_size_bytes - missing
    code = [sys.executable, "-c", WRITE_WITH_SIZE_LIMIT, str(tmp_path / "cut.lance"), str(limit)]
    process = subprocess.run(code, capture_output=True, text=True, check=True)
    assert process.stdout == "True\n", process.stderr


def test_folder_without_version_contains_no_dataset(tmp_path):
    uri = str(tmp_path / "x.lance")
    assert open_newest(uri) is None
    fragment = DatasetTarget(uri, None).write(ROWS)
    (tmp_path / "x.lance" / "_versions").mkdir()
    assert open_newest(uri) is None
    DatasetTarget(uri, None).create(ROWS.schema, [fragment])
    assert open_newest(uri).count_rows() == 1000
