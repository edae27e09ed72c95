"""Layers made of a checkpoint's tensors; matrices that share an input are read into one."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping

import torch

from workers.config import Quantization
from workers.layers.embedding import Embedding
from workers.layers.linear import Linear, make_linear
from workers.layers.mlp import Activation, GatedMLP
from workers.layers.norm import HeadNorm, RMSNorm
from workers.layers.quantised import GroupedMatrix, stacked
from workers.layers.ranks import Ranks
from workers.models.architecture import ArchitectureConfig
from workers.models.weights import Weights


class LayerReader:
    """Names are those after `prefix`, without their .weight or .bias."""

    def __init__(
        self,
        config: ArchitectureConfig,
        weights: Weights,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization,
        ranks: Ranks,
    ) -> None:
        """`config` and `weights`: of this rank's part."""
        self.config = config
        self.device = device
        self.ranks = ranks
        # Of the layer that it reads.
        self.index = -1
        # The embedding in its own bits, for a head that is the same.
        self._tied: GroupedMatrix | None = None
        self._weights = weights
        self._dtype = dtype
        self._quantization = quantization
        # How many matrices each kernel multiplies.
        self.kernels: Counter[str] = Counter()
        self._prefix = ""

    def layers(self) -> Iterator[LayerReader]:
        for i in range(self.config.num_layers):
            layer = copy.copy(self)
            layer.index, layer._prefix = i, f"model.layers.{i}."
            yield layer

    def linear(self, rows: Mapping[str, int], in_features: int, *, bias: bool = False) -> Linear:
        """One matrix of those named by `rows`, each with its number of rows, one under another; biases likewise."""
        weight = self._matrix(rows, in_features)
        return self._counted(make_linear(weight, self._bias(rows) if bias else None, self._quantization))

    def exact_linear(self, rows: Mapping[str, int], in_features: int) -> Linear:
        """As `linear`, in the model's dtype whatever the quantization: for what decides rather than adds up."""
        return self._counted(make_linear(self._dense(rows, in_features)))

    def embedding(self, scale: float | None = None) -> Embedding:
        config = self.config
        rows = {"model.embed_tokens": config.vocab_size}
        weight = self._matrix(rows, config.hidden_size)
        if isinstance(weight, GroupedMatrix):
            self._tied, weight = weight, weight.values().to(self._dtype)
        return Embedding(weight, scale)

    def head(self, embedding: Embedding) -> Linear:
        """From the last hidden state to logits: the embedding again where the two are tied."""
        config = self.config
        if not config.tie_word_embeddings:
            weight = self._matrix({"lm_head": config.vocab_size}, config.hidden_size)
        else:
            self._weights.skip("lm_head.weight")
            weight = self._tied if self._tied is not None else embedding.weight
        return self._counted(make_linear(weight, None, self._quantization, few_bits=False))

    def norm(self, name: str, *, offset: float = 0.0) -> RMSNorm:
        """`offset` is added to the weight."""
        return RMSNorm(self._norm_weight(name, self.config.hidden_size, offset), self.config.rms_norm_eps)

    def head_norm(self, *, offset: float = 0.0) -> HeadNorm:
        """Of q and k at once: [num_heads + num_kv_heads, head_dim]."""
        config = self.config
        q = self._norm_weight("self_attn.q_norm", config.head_dim, offset).expand(config.num_heads, -1)
        k = self._norm_weight("self_attn.k_norm", config.head_dim, offset).expand(config.num_kv_heads, -1)
        return HeadNorm(torch.cat((q, k)), config.rms_norm_eps)

    def qkv(self, *, bias: bool = False) -> Linear:
        config = self.config
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        rows = {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
        return self.linear(rows, config.hidden_size, bias=bias)

    def attention_output(self, *, bias: bool = False) -> Linear:
        config = self.config
        return self.linear({"self_attn.o_proj": config.hidden_size}, config.num_heads * config.head_dim, bias=bias)

    def gated_mlp(self, activation: Activation, *, bias: bool = False) -> GatedMLP:
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        return GatedMLP(
            self.linear({"mlp.gate_proj": inner, "mlp.up_proj": inner}, hidden, bias=bias),
            self.linear({"mlp.down_proj": hidden}, inner, bias=bias),
            activation,
        )

    def unstack(self, name: str) -> bool:
        """Whether there is a tensor `name` whose rows can now be read as `name`.0, `name`.1, ..."""
        return self._weights.unstack(self._prefix + name)

    def _matrix(self, rows: Mapping[str, int], in_features: int) -> torch.Tensor | GroupedMatrix:
        """In the checkpoint's own bits where that is wanted, and all its parts have the same."""
        names = {self._prefix + name + ".weight": size for name, size in rows.items()}
        bits = {self._weights.bits(name) for name in names} if self._quantization == "native" else {None}
        if len(bits) > 1 or None in bits:
            return self._dense(rows, in_features)
        return stacked([self._weights.take_groups(name, (size, in_features)) for name, size in names.items()])

    def _dense(self, rows: Mapping[str, int], in_features: int) -> torch.Tensor:
        sizes = list(rows.values())
        weight = self._empty(sum(sizes), in_features)
        for name, part in zip(rows, weight.split_with_sizes(sizes), strict=True):
            self._copy(name + ".weight", part)
        return weight

    def _bias(self, rows: Mapping[str, int]) -> torch.Tensor:
        sizes = list(rows.values())
        bias = self._empty(sum(sizes))
        for name, part in zip(rows, bias.split_with_sizes(sizes), strict=True):
            self._copy(name + ".bias", part)
        return bias

    def _counted(self, linear: Linear) -> Linear:
        self.kernels[linear.name] += 1
        return linear

    def _norm_weight(self, name: str, size: int, offset: float) -> torch.Tensor:
        # With an offset the stored values lie around 0, and only their sum with it in fp32 keeps their precision.
        weight = self._empty(size, dtype=torch.float32 if offset else self._dtype)
        self._copy(name + ".weight", weight)
        return weight + offset if offset else weight

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self._dtype, device=self.device)

    def _copy(self, name: str, out: torch.Tensor) -> None:
        self._weights.copy_into(self._prefix + name, out)
