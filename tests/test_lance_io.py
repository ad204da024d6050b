"""Lance datasets on a disk: what is not there yet, and what a full disk cuts."""

import subprocess
import sys

import lance
import pyarrow as pa
import pytest

from llmcond.lance_io import DatasetTarget, open_newest

ROWS = pa.table({"x": list(range(1000))})

LIMITED = """
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


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("missing", [1, 60])
def test_a_file_whose_end_does_not_fit_is_noticed(tmp_path, begun, missing):
    """A limit on the size of files stands in for a full disk."""
    if begun:
        lance.write_dataset(ROWS, tmp_path / "cut.lance")
    fragment = DatasetTarget(str(tmp_path / "whole.lance"), None).write(ROWS)
    limit = fragment.files[0].file_size_bytes - missing
    code = [sys.executable, "-c", LIMITED, str(tmp_path / "cut.lance"), str(limit)]
    done = subprocess.run(code, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n", done.stderr


def test_a_folder_that_a_kill_left_without_a_version_holds_no_dataset(tmp_path):
    uri = str(tmp_path / "x.lance")
    assert open_newest(uri) is None
    fragment = DatasetTarget(uri, None).write(ROWS)
    (tmp_path / "x.lance" / "_versions").mkdir()
    assert open_newest(uri) is None
    DatasetTarget(uri, None).create(ROWS.schema, [fragment])
    assert open_newest(uri).count_rows() == 1000
