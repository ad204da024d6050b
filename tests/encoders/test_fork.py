"""Forked processes: what was loaded before the fork works in the child, or raises at once."""

import multiprocessing
import os
import warnings
from dataclasses import replace

import numpy as np
import pytest

import llmcond
from llmcond.base.errors import LlmcondError
from llmcond.encoders.encoder import load_encoder

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    # Tests with one thread lack the pool of PyTorch's threads.
    pytest.mark.usefixtures("two_threads"),
]
TEXTS = [f"A man rides horse number {number}." for number in range(40)]
#: Nothing in a child takes as long, even on a busy machine; a child that waits for threads that do
#: not exist never ends.
PATIENCE = 60


def result_in_child(work):
    """Return the result of ``work`` in a forked process, or the message of its error."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def report():
        try:
            sender.send(work())
        except LlmcondError as error:
            sender.send(str(error))

    process = context.Process(target=report)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python and Lance warn of forks
        process.start()
    if not receiver.poll(PATIENCE):
        process.kill()
        pytest.fail("the forked process hangs")
    result = receiver.recv()
    process.join(PATIENCE)
    return result


@pytest.mark.parametrize(
    ("runtime", "used"), [("openvino", True), ("torch", True), ("torch", False)]
)
def test_encoder_works_in_forked_process(runtime, used):
    if runtime == "openvino":
        pytest.importorskip("openvino")
    encoder = load_encoder("minilm", device="cpu", dtype="float32", runtime=runtime)
    texts = TEXTS[:8]
    expected = encoder.encode(texts) if used else None

    def compare():
        first, second = encoder.encode(texts), encoder.encode(texts[::-1])[::-1]
        return np.abs(first - (second if expected is None else expected)).max()

    # A process that is forked from the forked process works too.
    assert result_in_child(lambda: max(compare(), result_in_child(compare))) < 1e-5
    # The parent is not affected.
    np.testing.assert_array_equal(encoder.encode(texts), encoder.encode(texts))


def test_encoder_on_gpu_is_rejected_at_once(minilm):
    encoder = load_encoder("minilm", device="cpu", dtype="float32")
    encoder.resolved = replace(encoder.resolved, device="cuda:0")  # as on a machine with a GPU
    message = result_in_child(lambda: encoder.encode(TEXTS))
    assert "minilm was loaded on cuda:0 before this process was forked" in message
    assert "get_context('spawn')" in message


def test_lance_is_rejected_in_forked_process_at_once(tmp_path):
    index = llmcond.Index.build(tmp_path / "index", TEXTS, device="cpu")
    index.search("dogs", condition="the animal")
    texts, out = index.folder / "texts.lance", tmp_path / "vectors.lance"
    for use in (
        lambda: index.search("cats", condition="the animal"),
        lambda: index.add(["A new text."]),
        lambda: llmcond.extract(model="minilm", run=tmp_path / "run"),
        lambda: llmcond.embed(texts=texts, out=out, condition="c"),
    ):
        assert "does not work after a fork. Start processes with" in result_in_child(use)
