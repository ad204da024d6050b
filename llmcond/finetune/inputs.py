"""Encoder inputs that are encoded again in each training step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from llmcond.arrays import Positions
from llmcond.encoders.engine.engine import Engine
from llmcond.encoders.engine.routing import embed_routed, router_inputs
from llmcond.encoders.engine.tokenizing import InputTokenizer, Tokens
from llmcond.encoders.spec import EncoderInput


@dataclass(frozen=True)
class TokenizedInputs:
    """Encoder inputs, each tokenised once, and the texts of their routers.

    Attributes:
        items: the inputs.
        tokens: tokens of each input.
        queries: tokens of the router texts of the inputs, by text.
    """

    items: Sequence[EncoderInput]
    tokens: Sequence[Tokens]
    queries: Mapping[str, Tokens]

    @classmethod
    def of(cls, items: Sequence[EncoderInput], tokenizer: InputTokenizer) -> TokenizedInputs:
        """Tokenise inputs."""
        routers = router_inputs(items)
        router_tokens = tokenizer(list(routers.values()))
        return cls(items, tokenizer(items), dict(zip(routers, router_tokens, strict=True)))

    def __len__(self) -> int:
        return len(self.items)

    def embed(self, engine: Engine, which: Positions) -> Tensor:
        """Encode some inputs, (u,), with gradients; return (u, dim) vectors."""
        tokens = [self.tokens[i] for i in which]
        if not self.queries:
            return engine.embed(tokens)
        return embed_routed(engine, [self.items[i] for i in which], tokens, self.queries)
