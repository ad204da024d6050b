"""Sweeps over trainings: every combination is trained once, and the best encoder is kept."""

import json
import shutil
from pathlib import Path

import pytest
from helpers.commands import run_json, run_rejected
from helpers.dialogues import write_dialogues
from helpers.flags import change_flags

import llmcond
from llmcond.base.metrics import METRICS
from llmcond.base.run_log import read_log
from llmcond.cli import run
from llmcond.options.training import SweepLoraOptions
from llmcond.runs.trials import Grid
from llmcond.workflows import sweep_lora
from llmcond.workflows.sweep_lora import plan_trainings

pytestmark = pytest.mark.usefixtures("one_thread")

ENCODER = "--pooling mean --normalize --dtype float32 --device cpu --epochs 1 --batch-size 32"
#: Two combinations of settings, each with two seeds.
VARIED = ("--vary", "learning_rate=0.0001,0.05", "--rank", "4", "--seeds", "2", "--head", "none")


@pytest.fixture(scope="module")
def data(tiny_run):
    return tiny_run.parent / "rows.csv"


@pytest.fixture(scope="module")
def complete(tiny_bert, data):
    """Return a function that completes the arguments of ``sweep-lora`` on small rows."""

    def complete_arguments(folder, *arguments):
        common = ("sweep-lora", "--model", tiny_bert, "--data", data, "--run", folder)
        return list(map(str, change_flags([*common, *ENCODER.split()], *arguments)))

    return complete_arguments


@pytest.fixture(scope="module")
def swept(complete, tmp_path_factory):
    """A finished sweep over two combinations with two seeds. Copy it before changing it."""
    folder = tmp_path_factory.mktemp("swept") / "run"
    assert run(complete(folder, *VARIED, "--plot", folder.parent / "rates.svg")) == 0
    return folder


@pytest.fixture
def folder(swept, tmp_path):
    return Path(shutil.copytree(swept, tmp_path / "copy"))


@pytest.fixture
def trainings(monkeypatch):
    """The learning rate and the seed of every training of a sweep in this process."""
    calls = []
    train = sweep_lora._run_training

    def count_training(digest, training, position=""):
        calls.append((training.job.settings.learning_rate, training.seed))
        return train(digest, training, position)

    monkeypatch.setattr(sweep_lora, "_run_training", count_training)
    return calls


def read_report(folder):
    return json.loads((folder / "sweep.json").read_text())


def read_summaries(folder):
    """Return the summaries of all finished trainings by learning rate and seed."""
    records = [json.loads(path.read_text()) for path in (folder / "trainings").glob("*.json")]
    curves = {
        json.dumps(curve): row["settings"]["learning_rate"]
        for row in read_report(folder)["results"]
        for curve in row["curves"]
    }
    return {
        (curves[json.dumps(record["fit"]["curve"])], record["training"]["seed"]): record["training"]
        for record in records
    }


def without_times(value):
    """Return JSON without what differs between equal trainings: seconds and folders."""
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if k not in {"seconds", "run"}}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def find_weights(folder):
    return sorted(path.parent.name for path in folder.rglob("adapter_model.safetensors"))


# -- results -----------------------------------------------------------------------------------


def test_results_are_means_over_seeds_on_dev_best_first(swept):
    report, summaries = read_report(swept), read_summaries(swept)
    assert set(summaries) == {(rate, seed) for rate in (0.0001, 0.05) for seed in (0, 1)}
    assert len(report["results"]) == 2
    for row in report["results"]:
        assert (row["split"], row["seeds"]) == ("dev", [0, 1])
        assert row["name"] == "none@concat-sent-cond+c"
        rate = row["settings"]["learning_rate"]
        scores = [summaries[rate, seed]["scores"][0]["spearman"] for seed in (0, 1)]
        assert row["spearman"] == pytest.approx(sum(scores) / 2)
    first, second = (row["spearman"] for row in report["results"])
    assert first > second
    assert (report["failures"], report["data"]["rows"]["dev"]) == ([], 12)
    assert "learning rate" in (swept.parent / "rates.svg").read_text()


def test_only_best_encoder_is_kept_as_a_run(swept, complete, tmp_path, capsys):
    report, summaries = read_report(swept), read_summaries(swept)
    rate = report["results"][0]["settings"]["learning_rate"]
    best = max((summaries[rate, seed] for seed in (0, 1)), key=lambda s: s["dev_spearman"])
    assert report["best"] == {**best, "run": str(swept / "best")}
    config = json.loads((swept / "best/training.json").read_text())["made_of"]
    assert (config["settings"]["learning_rate"], config["seed"]) == (rate, best["seed"])
    test_scores = [summaries[rate, seed]["scores"][1]["spearman"] for seed in (0, 1)]
    assert report["test"]["spearman"] == pytest.approx(sum(test_scores) / 2)
    evaluate = ("evaluate", "--run", swept / "best", "--split", "test")
    rows = {row["name"]: row for row in run_json(capsys, *evaluate)["results"]}
    assert rows[best["head"]]["spearman"] == best["scores"][1]["spearman"]
    # Other trainings leave only records and logs.
    assert find_weights(swept) == ["best"]
    assert all(path.suffix == ".json" for path in (swept / "trainings").iterdir())
    logs = {path.stem: read_log(path) for path in (swept / "logs").glob("*.jsonl")}
    assert logs.keys() == {path.stem for path in (swept / "trainings").iterdir()}
    rates = [log[0]["config"]["settings"]["learning_rate"] for log in logs.values()]
    assert sorted(rates) == [0.0001, 0.0001, 0.05, 0.05]
    assert all(log[-1]["event"] == "end" for log in logs.values())
    # The training equals that of train-lora.
    _, *common = complete(tmp_path / "alone", "--rank", 4, "--head", "none")
    flags = ("--learning-rate", rate, "--seed", best["seed"])
    alone = run_json(capsys, "train-lora", *common, *flags)
    assert without_times(alone) == without_times(report["best"])


# -- reuse of finished trainings ---------------------------------------------------------------


def test_repeated_sweep_trains_only_what_is_missing(complete, folder, trainings, capsys):
    weights = folder / "best/adapter_model.safetensors"
    before, written = read_report(folder), weights.stat().st_mtime_ns
    repeated = run_json(capsys, *complete(folder, *VARIED))
    assert trainings == []
    assert repeated["results"] == before["results"]
    assert weights.stat().st_mtime_ns == written
    # A damaged record is replaced; the best training is repeated if its record is new.
    damaged = min((folder / "trainings").glob("*.json"))
    scores = json.loads(damaged.read_text())["scores"]
    damaged.write_text('{"scores": {}}')
    assert run(complete(folder, *VARIED, "--format", "markdown")) == 0
    captured = capsys.readouterr()
    assert "The training is repeated." in captured.err
    assert "learning_rate=0.05" in captured.out
    assert len(trainings) in (1, 2)
    assert json.loads(damaged.read_text())["scores"] == scores
    # A smaller sweep has another best training, whose weights were removed. The earlier best stays,
    # with the files that were added to it.
    trainings.clear()
    (folder / "best/notes.txt").write_text("mine")
    other = before["results"][1]
    rate = other["settings"]["learning_rate"]
    result = run_json(capsys, *complete(folder, "--vary", f"learning_rate={rate}", *VARIED[2:]))
    assert trainings == [(rate, result["best"]["seed"])]
    assert result["results"] == [other]
    (earlier,) = folder.glob("*/notes.txt")
    assert find_weights(folder)[:2] == ["best", "best-2"]
    assert earlier.parent.name.startswith("best-")
    # The first sweep uses it again, without a training.
    trainings.clear()
    assert run_json(capsys, *complete(folder, *VARIED))["results"] == before["results"]
    assert (trainings, (folder / "best/notes.txt").read_text()) == ([], "mine")


def test_interrupted_copy_of_best_encoder_is_repeated(complete, tmp_path, monkeypatch):
    copy, best = shutil.copytree, tmp_path / "run/best"

    def interrupt(source, target, **options):
        Path(target).mkdir(exist_ok=True)
        shutil.copy(Path(source, "training.json"), target)
        raise KeyboardInterrupt

    varied = ("--vary", "learning_rate=0.0001,0.05", "--rank", "4", "--seeds", "1", "--keep-all")
    arguments = complete(best.parent, *varied, "--head", "none")
    monkeypatch.setattr(shutil, "copytree", interrupt)
    assert run(arguments) == 130
    assert not best.exists()
    monkeypatch.setattr(shutil, "copytree", copy)
    assert run(arguments) == 0
    assert "best" in find_weights(best.parent)


# -- other tasks -------------------------------------------------------------------------------


def test_lowest_rank_decides_for_dialogues(model, tmp_path):
    settings = {"pooling": "mean", "device": "cpu", "dtype": "float32", "epochs": 1, "rank": 2}
    result = llmcond.sweep_lora(
        task="dialogue",
        model=model,
        data=write_dialogues(tmp_path / "data"),
        run=tmp_path / "run",
        head="ccl",
        **settings,
        seeds=1,
        vary={"learning_rate+head.learning_rate": [1e-4, 1e-2]},
    )
    values = [row.main.value for row in result.results]
    assert values == sorted(values)
    assert result.results[0].primary.name == result.test.primary.name == "average_rank"
    dev, test = (score["average_rank"] for score in result.best.record["scores"])
    assert (dev, test) == (values[0], result.test.main.value)
    assert result.to_pandas()["average_rank"].tolist() == values
    config = json.loads((tmp_path / "run/best/training.json").read_text())["made_of"]
    assert config["head"]["learning_rate"] == config["settings"]["learning_rate"]


# -- the grid ----------------------------------------------------------------------------------


@pytest.fixture
def plan(tiny_bert, data, tmp_path):
    """Return a function that plans trainings and returns their settings and seeds."""

    def plan_sweep(**options):
        common = {"model": str(tiny_bert), "data": data, "run": tmp_path, "pooling": "mean"}
        planned = plan_trainings(
            SweepLoraOptions(**{"head": "none", **common, **options}), tmp_path
        )
        grid = Grid(planned, tmp_path, METRICS["spearman"], "dev", "training")
        trainings = [list(group.values()) for group in grid.groups]
        return [(group[0].settings, [training.job for training in group]) for group in trainings]

    return plan_sweep


def test_options_and_head_settings_are_varied_together(plan):
    vary = {
        "rank": "2,full",
        "learning_rate+head.learning_rate": [1e-5, 2e-5],
        "temperature": "1.5,1.7,1.9",
        "head.rank": "4",
    }
    # The scale of adapters is for those combinations that train adapters.
    options = {"seeds": 2, "seed": 5, "set": {"info_nce": 1, "dim": 8}, "alpha": 8}
    planned = plan(head="hypernet", vary=vary, **options)
    assert planned[0][1][0].settings.alpha == 8
    assert len(planned) == 2 * 2 * 3
    settings, jobs = planned[-1]
    joint = "learning_rate+head.learning_rate"
    assert settings == {"rank": 0, joint: 2e-5, "temperature": 1.9, "head.rank": 4}
    assert [job.seed for job in jobs] == [5, 6]
    for job in jobs:
        assert (job.settings.rank, job.settings.learning_rate) == (0, 2e-5)
        head = job.config["head"]
        assert (head["rank"], head["learning_rate"], head["temperature"]) == (4, 2e-5, 1.9)


def test_ensembles_of_a_group_share_no_seed(plan):
    planned = plan(vary={"ensemble": "1,3"}, seeds=3)
    assert [[job.seed for job in jobs] for _, jobs in planned] == [[0, 1, 2], [0, 3, 6]]


def test_values_are_parsed_as_the_options_are(plan):
    # The default learning rate follows the rank.
    planned = plan(vary={"rank": ["full", 8]}, seeds=1)
    assert [jobs[0].settings.learning_rate for _, jobs in planned] == [5e-5, 1e-3]
    vary = {"target": "attention,query+value", "encoder_dropout": "true,false"}
    planned = plan(vary=vary, seeds=1)
    assert [tuple(settings.values()) for settings, _ in planned] == [
        ("attention", True),
        ("attention", False),
        ("query+value", True),
        ("query+value", False),
    ]
    assert planned[-1][1][0].settings.target == ("query", "value")
    assert len(plan(vary={"learning_rate": "1e-3,0.001,1e-3"}, seeds=2)) == 1
    for sizes in ("8+4,16", [[8, 4], [16]]):
        planned = plan(vary={"matryoshka": sizes}, seeds=1)
        assert [settings for settings, _ in planned] == [{"matryoshka": s} for s in ("8+4", "16")]
        assert planned[0][1][0].objective.matryoshka == (8, 4)
    ((_, jobs),) = plan(seeds=2, ensemble=3, normalize=True)
    assert [job.seed for job in jobs] == [0, 3]  # seeds of ensembles do not overlap


def test_sampled_combinations_are_part_of_larger_sample(plan):
    vary = {"learning_rate": "1e-3,2e-3,3e-3,4e-3", "rank": "1,2,3,4"}

    def sample(trials, seed=0):
        return [settings for settings, _ in plan(vary=vary, seeds=1, trials=trials, seed=seed)]

    few, more, every = sample(3), sample(6), sample(99)
    assert (len(few), len(more), len(every)) == (3, 6, 16)
    assert all(settings in more for settings in few)
    assert sample(3, seed=1) != few


# -- invalid sweeps ----------------------------------------------------------------------------

INVALID = [
    ("--vary rank=4 --seeds 1", "there is nothing to vary"),
    ("--vary lerning_rate=1,2", "Did you mean 'learning_rate'"),
    ("--vary temperature=1.5,-1", "--vary temperature=-1: 'temperature' is -1.0"),
    ("--vary epochs=1,2", "epochs is both varied and set. Give it once."),
    ("--vary rank=1,2 --then dev", "Leave out --then"),
]


def test_invalid_sweep_is_rejected_before_first_training(
    complete, tmp_path, monkeypatch, trainings, capsys
):
    monkeypatch.chdir(tmp_path)
    for arguments, expected in INVALID:
        command = complete("run", "--head", "none", *arguments.split())
        assert expected in run_rejected(capsys, *command), arguments
    monkeypatch.setenv("WORLD_SIZE", "2")
    command = complete("run", "--head", "none", "--vary", "rank=1,2")
    assert "cannot be launched with accelerate or torchrun" in run_rejected(capsys, *command)
    assert trainings == []
    assert list(tmp_path.iterdir()) == []
