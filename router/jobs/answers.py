"""Answers to a job's prompts as the native API has them."""

from __future__ import annotations

from contextlib import aclosing

from protos import router_pb2 as pb
from router.grpc_service import prepare, response_of
from router.jobs.records import Answer, Claim, Used
from router.text import TextService
from workers.errors import KVFerryError
from workers.timeline import Timeline
from workers.wire import timeline_from_pb

NATIVE = "generate"


class NativeAnswerer:
    """A prompt is a GenerateRequest, an answer a JobResult."""

    def __init__(self, text: TextService) -> None:
        self._text = text

    async def answer(self, claim: Claim) -> Answer:
        request = pb.GenerateRequest.FromString(claim.body)
        request.request_id = claim.request_id
        request.ClearField("output_token_ids")
        prepared = await prepare(self._text, request)
        whole: dict[int, pb.GenerateResponse] = {}
        async with aclosing(self._text.stream(prepared)) as chunks:
            async for chunk in chunks:
                _append(whole.setdefault(chunk.choice, pb.GenerateResponse()), response_of(claim.request_id, chunk))
        choices = [choice for _, choice in sorted(whole.items())]
        result = pb.JobResult(index=claim.index, choices=choices)
        return Answer(result.SerializeToString(), used=_used(choices))

    def failure(self, claim: Claim, error: KVFerryError) -> Answer:
        told = pb.JobError(
            type=type(error).__name__, message=error.message, param=error.param or "", code=error.code or ""
        )
        return Answer(pb.JobResult(index=claim.index, error=told).SerializeToString(), failed=True)


def _append(whole: pb.GenerateResponse, piece: pb.GenerateResponse) -> None:
    text = whole.text + piece.text
    whole.MergeFrom(piece)
    whole.index, whole.text = 0, text


def _used(choices: list[pb.GenerateResponse]) -> Used:
    """What several choices have in common, their prompt, counts once."""
    first = choices[0].usage
    return Used(
        first.num_prompt_tokens,
        sum(choice.usage.num_completion_tokens for choice in choices),
        first.num_cached_tokens,
        sum((timeline_from_pb(choice.timeline) for choice in choices), Timeline()),
    )
