"""Measure the accuracy and speed of int8 activations, to show why llmcond does not offer them.

Other libraries use dynamic int8 to run small encoders on a CPU. The encoder is all-MiniLM-L6-v2 and
the texts come from the bundled sample, so the command needs no other data:

    python scripts/bench_int8.py

Accuracy is the cosine of a text's vector to its float32 vector. Most schemes are simulated: values
are rounded to the int8 grid and multiplied in float32. Scheme A is the most elaborate, and runs on
PyTorch's int8 kernels. Its weights and scales are fitted to texts of all three kinds, which are not
among the evaluated texts. Speed compares scheme A with bfloat16, llmcond's default on such a CPU.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from bench_inputs import make_inputs
from torch import Tensor
from torch.nn import functional

from llmcond import load_encoder
from llmcond.encoders.encoder import Encoder
from llmcond.encoders.engine.engine import torch_engine
from llmcond.encoders.spec import EncoderInput
from llmcond.system import native_bfloat16

#: Maps token ids, (texts, tokens), to token vectors.
Forward = Callable[[Tensor], Tensor]
#: Positions of texts of the same length, which need no padding, and their token ids.
Batches = list[tuple[list[int], Tensor]]
#: A kernel of PyTorch appends the scale and the minimum, two float32, to the bytes of each row.
TRAILER = 8
#: How much of a channel's spread moves from the activations to the weights (alpha of SmoothQuant).
MIGRATED = 0.7


def make_texts(rows: int) -> tuple[dict[str, list[str]], list[str]]:
    """Return the texts to evaluate, by kind, and different texts to fit scheme A to."""
    texts = [item.text for item in make_inputs(rows, instruct=False)]
    # Sentences end with a full stop, and their conditions have none.
    conditions = sorted({text.rpartition(". ")[2] for text in texts})
    words = sorted(set(re.findall("[a-z]+", " ".join(texts).lower())))
    kinds = {"C-STS sentences": texts[::10], "bare conditions": conditions, "single words": words}
    evaluated = {
        kind: [t for n, t in enumerate(members) if n % 3] for kind, members in kinds.items()
    }
    return evaluated, [text for members in kinds.values() for text in members[::3]]


def make_batches(encoder: Encoder, texts: Sequence[str]) -> Batches:
    """Return one batch of texts for each length in tokens."""
    rows = encoder._tokenizer([EncoderInput("", text) for text in texts])
    by_length: dict[int, list[int]] = {}
    for position, row in enumerate(rows):
        by_length.setdefault(len(row.ids), []).append(position)
    return [(batch, torch.tensor([rows[n].ids for n in batch])) for batch in by_length.values()]


@torch.inference_mode()
def encode(forward: Forward, batches: Batches) -> Tensor:
    """Return normalised mean vectors, in the order of the texts."""
    positions = [position for batch, _ in batches for position in batch]
    vectors = torch.cat([forward(ids).double().mean(1) for _, ids in batches])
    return functional.normalize(vectors, dim=1)[torch.tensor(positions).argsort()]


def stock(network: Any) -> Forward:
    """Return the forward function of a transformers network."""
    return lambda ids: network(input_ids=ids).last_hidden_state


class Group(NamedTuple):
    """Linear layers that read the same activations.

    Attributes:
        layers: the linear layers.
        after_norm: whether the activations are the output of a layer norm.
    """

    layers: list[Any]
    after_norm: bool

    @property
    def weight(self) -> Tensor:
        """The weights of all layers as one matrix."""
        return torch.cat([layer.weight for layer in self.layers])


def groups(network: Any) -> list[Group]:
    """Return the linear layers of a BertModel: four groups per block, in execution order."""
    all_groups = []
    for block in network.encoder.layer:
        mixer = block.attention.self
        all_groups += [
            Group([mixer.query, mixer.key, mixer.value], True),
            Group([block.attention.output.dense], False),
            Group([block.intermediate.dense], True),
            Group([block.output.dense], False),
        ]
    return all_groups


def measure_moments(network: Any, batches: Batches) -> list[Tensor]:
    """Return the second moments of each group's activations.

    A constant 1 is appended to the activations, so the last row of a matrix holds their means.
    """
    layer_groups = groups(network)
    moments: list[Any] = [0.0] * len(layer_groups)

    def watch(number: int, x: Tensor) -> None:
        x = functional.pad(x.flatten(0, 1), (0, 1), value=1.0)
        moments[number] = moments[number] + x.T @ x

    hooks = [
        group.layers[0].register_forward_pre_hook(lambda _, inputs, n=n: watch(n, inputs[0]))
        for n, group in enumerate(layer_groups)
    ]
    encode(stock(network), batches)
    for hook in hooks:
        hook.remove()
    return [moment / moment[-1, -1] for moment in moments]


def equalisation(group: Group, moments: Tensor) -> Tensor:
    """Return the factors of each channel that divide activations and multiply weights.

    This is SmoothQuant (arXiv 2211.10438) with the root mean square instead of the maximum.
    """
    if not group.after_norm:
        return torch.ones(len(moments) - 1)
    spread = moments.diagonal()[:-1].clamp_min(1e-6).sqrt()
    factor = spread**MIGRATED / group.weight.abs().amax(0).clamp_min(1e-4) ** (1 - MIGRATED)
    return factor / factor.log().mean().exp()


def per_tensor(x: Tensor) -> Tensor:
    """Round to 256 steps between a batch's least and greatest value, as ONNX Runtime does."""
    low, high = x.min().clamp_max(0), x.max().clamp_min(0)
    step = (high - low) / 255
    zero = (-low / step).round()
    return (((x / step).round() + zero).clamp(0, 255) - zero) * step


def per_token(x: Tensor) -> Tensor:
    """Round to 255 steps around zero, up to a token's greatest magnitude."""
    step = x.abs().amax(-1, keepdim=True) / 127
    return (x / step).round() * step


def per_token_asymmetric(x: Tensor) -> Tensor:
    """Round to 256 steps between a token's least and greatest value."""
    low, high = x.aminmax(dim=-1, keepdim=True)
    step = (high - low) / 255
    return ((x - low) / step).round() * step + low


def simulate(
    network: Any, round_values: Callable[[Tensor], Tensor], moments: Sequence[Tensor] | None = None
) -> Forward:
    """Return a network whose linear layers round their inputs and weights.

    Args:
        network: a BertModel.
        round_values: rounds activations.
        moments: moments of the activations of each group, to equalise before rounding.
    """
    network = copy.deepcopy(network)
    for number, group in enumerate(groups(network)):
        factors = equalisation(group, moments[number]) if moments else torch.ones(())
        for layer in group.layers:
            # Rows of a weight are rounded separately, like tokens.
            layer.weight.copy_(per_token(layer.weight * factors))
            layer.register_forward_pre_hook(
                lambda _, inputs, by=factors: (round_values(inputs[0] / by),)
            )
    return stock(network)


def gptq(weight: Tensor, moments: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 weights and their scales by GPTQ (arXiv 2210.17323).

    Weights that are rounded later compensate for the errors of earlier ones.
    """
    scale = weight.abs().amax(1) / 127
    order = moments.diagonal().argsort(descending=True)
    left, damped = weight[:, order], moments[order][:, order].double()
    damped += 0.01 * damped.diagonal().mean() * torch.eye(len(order))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    inverse = torch.linalg.cholesky(inverse, upper=True).float()
    integers = torch.empty_like(left)
    for step in range(len(order)):
        integers[:, step] = (left[:, step] / scale).round().clamp(-127, 127)
        error = (left[:, step] - integers[:, step] * scale) / inverse[step, step]
        left[:, step:].addr_(error, inverse[step, step:], alpha=-1)
    return integers[:, order.argsort()], scale


class Int8Linear:
    """A group of linear layers on int8 kernels, with asymmetric activations per token.

    Args:
        group: the linear layers.
        moments: second moments of their activations, which the weights are rounded for.
    """

    def __init__(self, group: Group, moments: Tensor) -> None:
        factors = equalisation(group, moments)
        weight, mean = group.weight * factors, moments[-1, :-1] / factors
        # The bias compensates for a constant error, so GPTQ minimises only the varying part.
        varying = moments[:-1, :-1] / factors / factors[:, None] - torch.outer(mean, mean)
        integers, self.scale = gptq(weight, varying)
        rounded = integers * self.scale[:, None]
        self.bias = torch.cat([layer.bias for layer in group.layers]) + (weight - rounded) @ mean
        self.sums, self.size, self.inverse = rounded.sum(1), len(factors), 1 / factors
        self.zeros = torch.zeros(len(self.scale), dtype=torch.int64)
        # Zero weights are appended, so that the trailers of the rows do not contribute.
        packed = functional.pad(integers, (0, TRAILER)).to(torch.int8).contiguous()
        self.weight = torch.ops.onednn.qlinear_prepack(packed, [1_024, self.size + TRAILER])

    def __call__(self, x: Tensor, plus: Tensor) -> Tensor:
        """Return x W^T + plus; the caller includes the bias in ``plus``."""
        # This kernel is intended for embeddings, but it rounds rows to bytes in one pass.
        rows = torch.ops.quantized.embedding_bag_byte_prepack(x)
        trailer = rows[:, self.size :].view(torch.float32)
        product = torch.ops.onednn.qlinear_pointwise(
            rows, 1.0, 0, self.weight, self.scale, self.zeros, None,
            1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        return torch.addr(plus, trailer[:, 1], self.sums).addcmul_(product, trailer[:, :1])


class Int8Bert:
    """A BertModel's forward pass on int8 kernels, for texts without padding."""

    def __init__(self, network: Any, moments: Sequence[Tensor]) -> None:
        self.embeddings, self.blocks = network.embeddings, list(network.encoder.layer)
        self.heads = network.config.num_attention_heads
        linears = map(Int8Linear, groups(network), moments)
        self.linears = list(zip(linears, linears, linears, linears, strict=True))

    @torch.inference_mode()
    def __call__(self, ids: Tensor) -> Tensor:
        """Return token vectors."""
        x = self.embeddings(input_ids=ids)
        shape, x = x.shape, x.flatten(0, 1)
        for block, (qkv, mixed, wide, narrow) in zip(self.blocks, self.linears, strict=True):
            y = qkv(x * qkv.inverse, qkv.bias).view(*shape[:2], 3, self.heads, -1)
            y = functional.scaled_dot_product_attention(*y.permute(2, 0, 3, 1, 4))
            y = mixed(y.transpose(1, 2).reshape(x.shape), x + mixed.bias)
            x = block.attention.output.LayerNorm(y)
            y = functional.gelu(wide(x * wide.inverse, wide.bias))
            x = block.output.LayerNorm(narrow(y, x + narrow.bias))
        hidden: Tensor = x.view(shape)
        return hidden


def compare(
    forwards: dict[str, Forward], encoder: Encoder, exact: Forward, texts: dict[str, list[str]]
) -> list[dict[str, Any]]:
    """Return statistics of the cosines to float32 vectors, by scheme and kind of text."""
    batches = {kind: make_batches(encoder, members) for kind, members in texts.items()}
    expected = {kind: encode(exact, of_kind) for kind, of_kind in batches.items()}
    rows: list[dict[str, Any]] = []
    for name, forward in forwards.items():
        row: dict[str, Any] = {"scheme": name}
        for kind, of_kind in batches.items():
            cosine = (encode(forward, of_kind) * expected[kind]).sum(1)
            low = {"least": cosine.min().item(), "percentile_1": cosine.quantile(0.01).item()}
            worst = texts[kind][int(cosine.argmin())]
            row[kind] = {**low, "mean": cosine.mean().item(), "n": len(cosine), "worst": worst}
        rows.append(row)
    return rows


@torch.inference_mode()
def race(int8: Forward, bfloat16: Forward, words: int, threads: int, rounds: int) -> dict[str, Any]:
    """Time both networks in turn on random token ids; return the median ratio of their speeds."""
    torch.set_num_threads(threads)
    ids = torch.randint(words, (51, 20), generator=torch.Generator().manual_seed(0))
    ratios = []
    for _ in range(rounds + 2):
        stamps = [time.perf_counter()]
        for forward in (bfloat16, int8):
            forward(ids)
            stamps.append(time.perf_counter())
        ratios.append((stamps[1] - stamps[0]) / (stamps[2] - stamps[1]))
    low, median, high = np.quantile(ratios[2:], (0.25, 0.5, 0.75)).tolist()
    return {"threads": threads, "ratio": median, "quartiles": [low, high]}


def run(rows: int, layers: int | None, rounds: int) -> dict[str, Any]:
    """Build all schemes, and measure their accuracy and the speed of scheme A."""
    encoder = load_encoder("minilm", dtype="float32", device="cpu", runtime="torch")
    network = torch_engine(encoder).model.network
    network.encoder.layer = network.encoder.layer[:layers]
    evaluated, fitted_on = make_texts(rows)
    moments = measure_moments(network, make_batches(encoder, fitted_on))
    half = copy.deepcopy(network).bfloat16()
    bfloat16, scheme_a = stock(half), Int8Bert(network, moments)
    forwards: dict[str, Forward] = {
        "bfloat16": bfloat16,
        "int8 weights per channel, to nearest": simulate(network, lambda x: x),
        "+ activations per tensor (ONNX Runtime, dynamic)": simulate(network, per_tensor),
        "+ activations per token, symmetric": simulate(network, per_token),
        "+ activations per token, asymmetric": simulate(network, per_token_asymmetric),
        "the same, equalised (SmoothQuant)": simulate(network, per_token_asymmetric, moments),
        "the same, weights by GPTQ: scheme A, on int8 kernels": scheme_a,
    }
    accuracy = compare(forwards, encoder, stock(network), evaluated)
    words = network.config.vocab_size
    speed = [race(scheme_a, bfloat16, words, threads, rounds) for threads in (1, 2)]
    cpu = torch.backends.cpu.get_cpu_capability()
    return {"torch": torch.__version__, "cpu": cpu, "accuracy": accuracy, "speed": speed}


def print_tables(result: dict[str, Any]) -> None:
    """Print the figures as Markdown tables."""
    kinds = [key for key in result["accuracy"][0] if key != "scheme"]
    heads = [f"{kind} ({result['accuracy'][0][kind]['n']})" for kind in kinds]
    print(f"minilm, torch {result['torch']}, {result['cpu']}\n")
    print("Cosine to float32: smallest / 1st percentile / mean\n")
    print(f"| scheme | {' | '.join(heads)} |\n|---{'|---' * len(kinds)}|")
    for row in result["accuracy"]:
        cells = [
            f"{row[kind]['least']:.4f} / {row[kind]['percentile_1']:.4f} / {row[kind]['mean']:.4f}"
            for kind in kinds
        ]
        print(f"| {row['scheme']} | {' | '.join(cells)} |")
    print("\nSpeed of scheme A, 51 texts of 20 tokens, bfloat16 being 1\n")
    print("| threads | median (quartiles) |\n|---|---|")
    for row in result["speed"]:
        low, high = row["quartiles"]
        print(f"| {row['threads']} | {row['ratio']:.2f} ({low:.2f} to {high:.2f}) |")


def main() -> None:
    """Parse the command line, measure, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--rows",
        type=int,
        default=3_000,
        help="number of rows of the sample to take texts from (default: 3000)",
    )
    parser.add_argument("--layers", type=int, help="number of layers to keep (default: all)")
    parser.add_argument(
        "--rounds",
        type=int,
        default=25,
        help="number of turns, whose median ratio counts (default: 25)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object on the last line"
    )
    options = parser.parse_args()
    if not native_bfloat16():
        raise SystemExit(
            "bench_int8 compares int8 with bfloat16, which this CPU lacks in hardware."
        )
    result = run(options.rows, options.layers, options.rounds)
    print_tables(result)
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
