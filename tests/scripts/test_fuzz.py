"""Damaged inputs of every kind with fixed seeds; ``python scripts/fuzz.py`` tries more of them."""

import json
import random
import subprocess
import urllib.request
from importlib import import_module

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.paths import ROOT


@pytest.fixture
def fuzz(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return import_module("fuzz")


@pytest.fixture
def services(fuzz):
    return import_module("fuzz_services")


def test_inputs_of_each_kind_cause_no_failures(fuzz, capsys):
    code = fuzz.main(["--count", "36"])
    out = capsys.readouterr().out
    assert code == 0, out
    assert out.count("| 3 | 0 |") == len(fuzz.KINDS) == 12


def test_inputs_are_reproducible_by_seed(services):
    text = '{"a": {"b": [1, 2, {"c": null}]}, "d": "x"}'

    def sample_input(seed):
        rng = random.Random(seed)
        return services.change_json(rng, text), *services.draw_filter(rng)

    assert [sample_input(seed) for seed in range(60)] == [sample_input(seed) for seed in range(60)]
    assert len({sample_input(seed)[0] for seed in range(60)}) > 30


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("raise KeyError('x')", "KeyError: 'x'"),
        ("return 3", "exit code 3"),
        ("sys.stderr.write('Traceback (most')", "Traceback (most"),
        ("return 1", ""),  # without an error message
    ],
)
def test_exceptions_tracebacks_and_silent_errors_are_failures(
    fuzz, monkeypatch, tmp_path, body, expected
):
    names = {"sys": __import__("sys")}
    exec(f"def run(command):\n    {body}\n    return 0", names)
    monkeypatch.setattr("llmcond.cli.run", names["run"])
    monkeypatch.setitem(fuzz.KINDS, "none", lambda *_: fuzz.Command(["evaluate"]))
    assert expected in fuzz.try_input("none", 0, fuzz.Base(tmp_path))
    assert fuzz.try_input("none", 0, fuzz.Base(tmp_path))


def test_hanging_inputs_and_ended_processes_are_reported(fuzz, monkeypatch, tmp_path):
    monkeypatch.setattr(fuzz, "LIMIT_SECONDS", -1)
    worker = fuzz.Worker(tmp_path)
    try:
        worker.send("data", 0)
        assert worker.answer() == "not finished after -1 s"
        monkeypatch.setattr(fuzz, "LIMIT_SECONDS", 60)
        worker.pipe.send(("no such kind", 0, None))
        worker.input, worker.deadline = ("no such kind", 0), float("inf")
        worker.pipe.poll(60)
        assert worker.answer() == "the process ended (1)"
    finally:
        worker.kill()


# -- checks of answers and outputs -------------------------------------------------------------


def test_filters_match_as_in_sqlite(services):
    years = {row["id"] for row in services.TEXT_ROWS if (row["year"] or 0) > 2020}
    assert services.matching_ids("year > 2020") == years
    assert services.matching_ids("NOT year > 2020 OR kind IS NULL") - years


@pytest.mark.parametrize(
    ("hits", "searched", "expected"),
    [
        ([("t1", 0.9), ("t2", 0.8)], 2, ""),
        ([("t1", None), ("t2", None)], 2, "not finite numbers"),
        ([("t1", 0.8), ("t2", 0.9)], 2, "scores [0.8, 0.9]"),
        ([("t1", 0.9)], 2, "1 hits of 2 searched"),
        ([("t1", 0.9), ("t2", 0.8)], 3, "3 texts pass the filter, not 2"),
        ([("t1", 0.9), ("t3", 0.8)], 2, "['t2', 't3']"),
    ],
)
def test_wrong_hits_are_detected(services, hits, searched, expected):
    answer = {"results": [{"id": i, "score": s} for i, s in hits], "searched": searched}
    problem = services.check_hits(answer, 2, {"t1", "t2"})
    assert expected in problem
    assert bool(problem) == bool(expected)


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (200, {"similarities": [0.5]}, ""),
        (422, {"error": dict.fromkeys(("message", "type", "param", "code"))}, ""),
        (0, None, "status 0"),
        (500, {"error": {}}, "status 500"),
        (400, {"detail": "x"}, "KeyError('error')"),
        (200, {"similarities": [float("nan")]}, "NaN in JSON"),
        (200, {"similarities": [0.5, 1.5]}, "similarities of 1 pairs"),
        (200, {"similarities": [0.5], "model": "FOLDER/model"}, "a path of the disk"),
    ],
)
def test_wrong_answers_are_detected(services, fuzz, tmp_path, status, body, expected):
    check = lambda content: services.check_similarities(content, 1)  # noqa: E731
    request = services.Request(fuzz.Base(tmp_path), b"", True, check)
    content = json.dumps(body).replace("FOLDER", str(tmp_path)).encode()
    problem = request.check_answer(status, content)
    assert expected in problem
    assert bool(problem) == bool(expected)


def test_ended_server_is_a_failure(services, fuzz, tmp_path):
    (tmp_path / "log").write_text("serving on http://127.0.0.1:1")
    process = subprocess.Popen(["sleep", "60"])
    base = fuzz.Base(tmp_path, (process.pid, tmp_path / "log"))
    services.get_server(base)
    process.kill()
    process.wait()
    assert "the server ended" in services.Request(base, b"GET / HTTP/1.1", True).failure()


def test_wrong_outputs_are_detected(services, tmp_path):
    summary = {"rows": services.OUTPUT_ROWS}
    find_problem = lambda: services.check_output(tmp_path, summary, None)  # noqa: E731
    pq.write_table(pa.table({"id": range(100)}), tmp_path / "part-000000.parquet")
    assert find_problem() == "the output has 100 rows, not 130"
    pq.write_table(pa.table({"id": range(30)}), tmp_path / "part-000001.parquet")
    assert find_problem() == ""
    (tmp_path / "part-000001.parquet").write_bytes(b"junk")
    assert "cannot be read" in find_problem()
    assert services.check_output(tmp_path, {"rows": 270}, None).startswith("270 rows were reported")


@pytest.mark.parametrize(
    ("labels", "expected"),
    [("5 -1", ""), ("5 6", "are [5.0, 6.0]"), ("5", "are (1, 0)"), ("-1 -1", "are (2, 2)")],
)
def test_wrong_ratings_are_detected(services, tmp_path, labels, expected):
    (tmp_path / "rated.csv").write_text("\n".join(["label", *labels.split(), ""]))
    summary = {"rows": 2, "ill_defined": 0 if "6" in labels else 1, "unanswered": 2}
    problem = services.check_ratings(tmp_path / "rated.csv", summary)
    assert expected in problem
    assert bool(problem) == bool(expected)


def test_chat_server_records_followed_redirects(services):
    chat = services.HostileChat()
    url = f"http://127.0.0.1:{chat.server_address[1]}/7"
    urllib.request.urlopen(f"{url}/v1/models").close()
    assert not chat.strays
    urllib.request.urlopen(f"{url}/elsewhere").close()
    assert chat.strays == {"7"}
    chat.shutdown()
    chat.server_close()
