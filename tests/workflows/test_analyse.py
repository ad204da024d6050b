"""Analyses of heads, as the workflow lays them out."""

import pytest

import llmcond
from llmcond.errors import UserError


@pytest.mark.parametrize("top", [0, 1])
def test_so_many_of_the_changed_rows_are_listed(fitted, tmp_path, top):
    found = llmcond.analyse(run=fitted, what=["examples"], out=tmp_path, top=top).to_json()
    (head,) = found["examples"]
    for which in ("better", "worse"):
        assert len(head[which]) == min(top, head[f"n_{which}"])
    assert head["n_better"] + head["n_worse"] > 1


def test_a_number_of_rows_below_0_is_refused(fitted):
    with pytest.raises(UserError, match=r"--top is -1; it must be at least 0"):
        llmcond.analyse(run=fitted, what=["examples"], top=-1)
