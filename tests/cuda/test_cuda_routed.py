"""Routed pooling on the stand-in for a GPU: same vectors as on the CPU, in one operation."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from helpers.standin import StandIn

from llmcond.benchmark.checks import CheckEnvironment, distance
from llmcond.benchmark.shapes import csts_inputs
from llmcond.encoders.encoder import Encoder
from llmcond.encoders.engine.forward import pool_routed
from llmcond.encoders.engine.interface import Routes
from llmcond.encoders.spec import EncoderInput, Router


def _make_inputs(n: int, conditions: Sequence[str]) -> list[EncoderInput]:
    texts = [
        dataclasses.replace(item, text=f"{item.text} {index}")
        for index, item in enumerate(csts_inputs(n, False))
    ]
    routers = [Router(condition, 0.05, True, True) for condition in conditions]
    return [dataclasses.replace(text, router=router) for text in texts for router in routers]


def test_pooling_with_different_routers_and_settings_matches_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, 9, 8, generator=generator)
    spans = [(0, 9), (2, 5), (3, 4), (1, 8)]
    routes = [
        Routes(torch.randn(k, 8, generator=generator), Router("", temperature, centre, standardize))
        for k, temperature, centre, standardize in [
            (3, 0.05, True, True),
            (1, 1.0, False, True),
            (2, 0.1, True, True),
            (3, 0.5, False, False),
        ]
    ]
    hidden_cpu = hidden.clone().requires_grad_()
    expected = pool_routed(hidden_cpu, spans, routes)
    expected.square().sum().backward()

    with StandIn():
        hidden_gpu = hidden.clone().to("cuda").requires_grad_()
        actual = pool_routed(hidden_gpu, spans, routes)
        actual.square().sum().backward()
        vectors, gradient = actual.detach().cpu(), hidden_gpu.grad.cpu()

    assert actual.shape == (9, 8)
    torch.testing.assert_close(vectors, expected.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient, hidden_cpu.grad, atol=1e-3, rtol=1e-3)


def test_encoder_matches_cpu(tmp_path: Path) -> None:
    inputs = _make_inputs(20, ["the place", "how many people there are"])
    on_cpu = (
        Encoder(CheckEnvironment("cpu", tmp_path).resolve("minilm"))
        .encode_with_counts(inputs)
        .vectors
    )

    with StandIn():
        on_gpu = (
            Encoder(CheckEnvironment("cuda:0", tmp_path).resolve("minilm"))
            .encode_with_counts(inputs)
            .vectors
        )

    assert distance(on_gpu, on_cpu) <= 1e-4
    assert np.abs(on_gpu[0] - on_gpu[1]).max() > 1e-3  # the router has an effect


def test_launches_do_not_grow_with_inputs_or_routers(tmp_path: Path) -> None:
    launches = []
    with StandIn() as gpu:
        encoder = Encoder(CheckEnvironment("cuda:0", tmp_path).resolve("minilm", "bfloat16"))
        for inputs in (
            _make_inputs(16, ["a"]),
            _make_inputs(128, ["a"]),
            _make_inputs(16, list("abcdefgh")),
        ):
            queries = encoder.queries({item.router.text for item in inputs if item.router})
            gpu.reset()
            encoder.encode_with_counts(inputs, queries)
            launches.append(gpu.n_launches)

    assert max(launches) <= 1.1 * launches[0], launches
