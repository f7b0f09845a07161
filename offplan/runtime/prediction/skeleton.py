"""A prediction layer as a transformers model of one layer, without its weights.

The model's class builds the layer as it builds its last ones. Embedding and projection stand where
the class has its embedding, the layer's norm where it has the last norm. There is no head: what is
behind the norm comes out, which enters the model's own head.
"""

from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from offplan.checkpoint.prediction import PredictionLayers
from offplan.runtime.loading.skeleton import build_skeleton, decoder_layers, name_stored


class JoinedInput(nn.Module):
    """Makes a layer's input of tokens, and of the hidden states before each of them."""

    def __init__(self, norm: nn.Module, hidden_size: int, eps: float, dtype: torch.dtype) -> None:
        """Have norms like ``norm``, on the current device; ``follow`` gives it what it reads."""
        super().__init__()
        make: Any = type(norm)
        self.embedding_norm = make(hidden_size, eps=eps).to(dtype)
        self.hidden_norm = make(hidden_size, eps=eps).to(dtype)
        self.projection = nn.Linear(2 * hidden_size, hidden_size, bias=False, dtype=dtype)
        self.hidden: torch.Tensor
        """Hidden states before the tokens of the next pass, [1, new or more, hidden]."""

    def follow(self, embedding: nn.Module, hidden: torch.Tensor) -> None:
        """Embed tokens by a model's own embedding, and read hidden states of steps in ``hidden``.

        The latter lie at one address, for captured passes to read.
        """
        vars(self)["embedding"] = embedding  # not registered: it is the model's
        self.hidden = hidden

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the layer's input for tokens, int64 of [1, new]."""
        embedded = cast(nn.Module, vars(self)["embedding"])(tokens)
        hidden = self.hidden[:, : tokens.shape[1]]
        joined = torch.cat([self.embedding_norm(embedded), self.hidden_norm(hidden)], -1)
        made: torch.Tensor = self.projection(joined)
        return made


def build_prediction(layers: PredictionLayers) -> PreTrainedModel:
    """Build a prediction layer with every tensor on the meta device; raises CheckpointError."""
    skeleton = build_skeleton(layers.model)
    decoder: Any = skeleton.get_decoder()
    config = skeleton.config.get_text_config()
    with torch.device("meta"):
        dtype = getattr(torch, layers.model.dtype)
        joined = JoinedInput(decoder.norm, config.hidden_size, config.rms_norm_eps, dtype)
    paths = {id(module): name for name, module in skeleton.named_modules()}
    embedding, norm = paths[id(skeleton.get_input_embeddings())], paths[id(decoder.norm)]
    (layer,) = decoder_layers(skeleton)
    skeleton.set_input_embeddings(joined.eval().requires_grad_(False))
    skeleton.set_output_embeddings(nn.Identity())
    named = {
        layers.embedding_norm: f"{embedding}.embedding_norm",
        layers.hidden_norm: f"{embedding}.hidden_norm",
        layers.projection: f"{embedding}.projection",
        layers.norm: norm,
        layers.block.prefix: paths[id(layer)],
    }
    name_stored(skeleton, named)
    return skeleton
