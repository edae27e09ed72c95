"""A mixture of experts out of a checkpoint, in either layout that there is."""

from __future__ import annotations

from dataclasses import dataclass

from workers.layers.experts import Experts
from workers.layers.mlp import Activation, GatedMLP
from workers.models.layer_reader import LayerReader

_STACKED_GATE_UP = "mlp.experts.gate_up_proj"
_STACKED_DOWN = "mlp.experts.down_proj"


@dataclass(frozen=True)
class ExpertNames:
    """Of the tensors as published: BLOCK.gate, and BLOCK.experts.N.GATE, .UP and .DOWN."""

    block: str
    gate: str
    up: str
    down: str


def read_experts(read: LayerReader, names: ExpertNames, activation: Activation) -> Experts:
    """As published, or with all experts' matrices stacked as transformers keeps them."""
    experts, hidden = read.config.experts, read.config.hidden_size
    assert experts is not None, "read_architecture finds the experts of a family that has them"
    inner = experts.intermediate_size
    stacked = read.unstack(_STACKED_GATE_UP) and read.unstack(_STACKED_DOWN)
    block = "mlp" if stacked else names.block

    def expert(i: int) -> GatedMLP:
        at = f"{block}.experts.{i}."
        gate_up, down = {at + names.gate: inner, at + names.up: inner}, at + names.down
        if stacked:
            gate_up, down = {f"{_STACKED_GATE_UP}.{i}": 2 * inner}, f"{_STACKED_DOWN}.{i}"
        return GatedMLP(read.linear(gate_up, hidden), read.linear({down: hidden}, inner), activation)

    router = read.exact_linear({block + ".gate": experts.num_experts}, hidden)
    all_experts = [expert(i) for i in range(experts.num_experts)]
    return Experts(router, all_experts, experts.num_experts_per_tok, experts.norm_topk_prob)
