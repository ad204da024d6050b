"""The log of a fit or training: JSON lines, resuming, and a real tracker."""

import math
import struct
import sys

import pytest

import llmcond
from llmcond.base.errors import UserError
from llmcond.base.run_log import RunLog, check_trackers, log_path, read_log

CONFIG = {"seed": 0, "settings": {"rank": 4, "target": ["auto"]}}


@pytest.fixture
def path(tmp_path):
    return log_path(tmp_path / "run", "training")


def write_steps(run_log, first, last, stage=""):
    for step in range(first, last + 1):
        run_log.write("step", {"step": step, "loss": 1 / step}, stage)


def steps_of(path, stage=None):
    return [
        record["step"]
        for record in read_log(path)
        if record["event"] == "step" and record.get("stage") == stage
    ]


def read_scalars(folder):
    """Read the scalars of TensorBoard's files, which are length, checksum, event, checksum."""
    from tensorboardX.proto.event_pb2 import Event

    scalars = {}
    for path in folder.glob("*/events.*"):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            for value in event.summary.value:
                scalars.setdefault(value.tag, []).append((event.step, value.simple_value))
    return scalars


# -- JSON lines --------------------------------------------------------------------------------


def test_records_are_readable_as_soon_as_they_are_written(path):
    with RunLog(path, "run", CONFIG) as run_log:
        run_log.write("evaluation", {"step": 3, "loss": 0.5, "dev_spearman": math.nan})
        start, record = read_log(path)
    assert (start["event"], start["name"], start["config"]) == ("start", "run", CONFIG)
    assert start["versions"]["llmcond"] == llmcond.__version__
    assert record.pop("time") >= start["time"]
    assert record == {"event": "evaluation", "step": 3, "loss": 0.5, "dev_spearman": None}
    before = path.read_bytes()
    with pytest.raises(ValueError, match="invalid"), RunLog(path, "run", CONFIG):
        raise ValueError("invalid")  # a fit that fails at once leaves the earlier log
    assert path.read_bytes() == before


def test_incomplete_last_line_is_ignored(path):
    config = {"prompt": "a\v\x1c\x85\u2028b"}  # characters at which Python splits lines
    with RunLog(path, "run", config) as run_log:
        write_steps(run_log, 1, 2)
    with path.open("a", encoding="utf-8") as stream:
        stream.write('{"event": "step", "st')
    assert steps_of(path) == [1, 2]
    with RunLog(path, "run", config, step=2) as run_log:
        write_steps(run_log, 3, 3)
    assert steps_of(path) == [1, 2, 3]
    assert read_log(path)[0]["config"] == config


def test_resumed_training_continues_log_after_its_checkpoint(path):
    with RunLog(path, "run", CONFIG) as run_log:
        write_steps(run_log, 1, 7)
    with RunLog(path, "run", CONFIG, step=4) as run_log:
        write_steps(run_log, 5, 8)
        run_log.resume(0, "then")
        write_steps(run_log, 1, 3, "then")
        run_log.write("end", {"seconds": 1.0})
    with RunLog(path, "run", CONFIG, step=8) as run_log:  # stopped after the end was written
        run_log.resume(2, "then")
        write_steps(run_log, 3, 4, "then")
        run_log.write("end", {"seconds": 2.0})
    assert steps_of(path) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert steps_of(path, "then") == [1, 2, 3, 4]
    events = [record["event"] for record in read_log(path)]
    assert (events.count("start"), events.count("end"), events.count("resume")) == (1, 1, 3)


def test_log_of_resumed_training_is_complete_without_earlier_one(path, tmp_path):
    with RunLog(None, "run", CONFIG, ["wandb"], step=3) as run_log:  # not the main process
        write_steps(run_log, 4, 5)
    assert not [*tmp_path.iterdir()]
    with RunLog(path, "run", CONFIG, step=4) as run_log:
        write_steps(run_log, 5, 5)
    assert [record["event"] for record in read_log(path)] == ["start", "resume", "step"]


# -- trackers ----------------------------------------------------------------------------------


def test_missing_or_unknown_trackers_are_reported_before_the_fit(run_copy, monkeypatch, tmp_path):
    # W&B writes to a folder ``wandb`` in the working directory, which is no package.
    (tmp_path / "untracked").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="needs untracked, which is not installed"):
        check_trackers(["untracked"])
    for name in ("accelerate", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
    for log, message in (
        ("wandb", r"accelerate and wandb, which .* not installed. Install: pip install accelerate"),
        ("tensorbord", r"--log is 'tensorbord'. Did you mean 'tensorboard'"),
    ):
        with pytest.raises(UserError, match=message):
            llmcond.fit_head(run=run_copy, head="linear", log=log)
    assert not (run_copy / "logs").exists()


@pytest.fixture
def tensorboard():
    return pytest.importorskip("tensorboardX", reason="tensorboardX is not installed")


@pytest.mark.usefixtures("tensorboard")
def test_tracker_gets_numbers_of_records(path):
    with RunLog(path, "run", CONFIG, ["tensorboard"]) as run_log:
        run_log.write("step", {"step": 1, "loss": 0.5, "gradient_norm": math.inf})
        run_log.write("evaluation", {"step": 2, "hits@1": 0.25, "dev_mrr": None})
        run_log.write("step", {"step": 1, "loss": 0.75}, "then")
        run_log.write("end", {"selected_on": "dev", "folds": {"gain": 1.5}})
    assert read_scalars(path.with_suffix(".tensorboard")) == {
        "step/loss": [(1, 0.5)],
        "evaluation/hits_1": [(2, 0.25)],
        "then/step/loss": [(3, 0.75)],
        "end/folds.gain": [(3, 1.5)],
    }


def test_tracker_that_fails_does_not_stop_the_fit(path, tensorboard, monkeypatch, caplog):
    def fail(*_args, **_options):
        raise OSError("no route to host")

    with RunLog(path, "run", CONFIG) as run_log:
        write_steps(run_log, 1, 3)
    with RunLog(path, "run", CONFIG, ["tensorboard"], step=2) as run_log:
        write_steps(run_log, 3, 4)
    # The tracker of the resumed training gets the earlier records again.
    steps = [step for step, _ in read_scalars(path.with_suffix(".tensorboard"))["step/loss"]]
    assert steps == [1, 2, 3, 4]
    monkeypatch.setattr(tensorboard.SummaryWriter, "add_scalar", fail)
    with RunLog(path, "run", CONFIG, ["tensorboard"]) as run_log:
        write_steps(run_log, 1, 3)
    assert steps_of(path) == [1, 2, 3]
    (warning,) = [record.message for record in caplog.records if record.name == "llmcond"]
    assert "tensorboard gets no more records of this run: no route to host" in warning


@pytest.mark.usefixtures("tensorboard")
def test_fit_and_sweep_send_their_curves(run_copy):
    fitted = llmcond.fit_head(
        run=run_copy, head="linear", dim=4, set={"epochs": 2}, log="tensorboard"
    )
    scalars = read_scalars(log_path(run_copy, fitted.name).with_suffix(".tensorboard"))
    curve = fitted.record["curve"]
    assert scalars["evaluation/loss"] == [
        (entry["step"], pytest.approx(entry["loss"])) for entry in curve
    ]
    assert scalars["end/best_epoch"] == [(curve[-1]["step"], fitted.record["best_epoch"])]
    swept = llmcond.sweep(
        run=run_copy, head="linear", vary={"dim": [4, 8]}, seeds=1, set={"epochs": 1}, workers=1,
        log="tensorboard",
    )  # fmt: skip
    folders = [*(run_copy / "logs/sweep").glob("*.tensorboard")]
    losses = sorted(read_scalars(folder)["evaluation/loss"][0][1] for folder in folders)
    expected = sorted(row.fits[0]["curve"][0]["loss"] for row in swept.results)
    assert losses == pytest.approx(expected)
