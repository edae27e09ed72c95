"""Several choices of one request: one sequence until the prompt is computed, then one for each choice.

They share the full blocks of the prompt. The last block, which each goes on to fill, is the first one's; every other
gets a copy of it in its next step. So no block is written by two sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from workers.engine.block_manager import BlockManager
from workers.request import Request, RequestStatus


def children_of(parent: Request) -> list[Request]:
    """A sequence for each choice of a request whose prompt is computed; without tokens and blocks."""
    params = replace(parent.params, n=1)
    return [
        replace(
            parent,
            params=params,
            choice=choice,
            status=RequestStatus.WAITING,
            output_token_ids=[],
            hold_blocks=False,
            block_table=[],
            unit_hashes=list(parent.unit_hashes),
            prompt_logprobs=list(parent.prompt_logprobs),
        )
        for choice in parent.choices
    ]


def share_blocks(blocks: BlockManager, parent: Request, children: Sequence[Request]) -> None:
    """Move what `children` need from the parent's block table to theirs; the rest stays the parent's.

    A child for which there is no last block gets none at all: it computes its prompt again, as after a preemption.
    """
    num_shared, num_in_last = divmod(parent.num_tokens, blocks.block_size)
    # Of these the first holds the end of the prompt, if that fills no block.
    own, parent.block_table = parent.block_table[num_shared:], parent.block_table[:num_shared]
    source = own[0] if num_in_last else None
    for child in children:
        if not own and num_in_last and blocks.can_allocate(1):
            own = blocks.allocate(1)
        if not own and num_in_last:
            child.num_computed_tokens = child.num_published_blocks = 0
            continue
        last, own = own[:1], own[1:]
        blocks.share(parent.block_table)
        child.block_table = [*parent.block_table, *last]
        if source is not None and last != [source]:
            blocks.share([source])
            child.copy_source = source
    parent.block_table += own
