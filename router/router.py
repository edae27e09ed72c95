"""(contract only; being written)"""
from __future__ import annotations
from collections.abc import AsyncGenerator, Sequence
from workers.request import SamplingParams, TokenOutput


class Router:
    """Token ids in, token outputs out."""

    num_queued: int
    num_running: int
    incarnation: str

    def generate(self, prompt_token_ids: Sequence[int], params: SamplingParams, request_id: str) -> AsyncGenerator[TokenOutput, None]:
        """Outputs with ascending index; the last has finish_reason and the whole timeline. Closing it aborts the request.

        The caller has validated params against the model. Raises KVFerryError.
        """
        raise NotImplementedError
