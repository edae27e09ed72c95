"""What an answer that may be calls of tools is to its client: text, calls with ids, and why it ended."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from router.openai.tool_calls import Piece
from router.openai.tool_syntax import ToolSyntax
from workers.request import FinishReason


class ToolReader:
    """One answer's text and calls as they come."""

    def __init__(self, syntax: ToolSyntax, parallel: bool) -> None:
        self._parser = syntax.parser()
        self._new_id = syntax.new_id
        self._parallel = parallel
        self._calls = False

    def read(self, text: str, ended: bool) -> Iterator[tuple[Piece, str]]:
        """Each piece, with the id of the call that it begins."""
        yield from self._allowed(self._parser.push(text))
        if ended:
            yield from self._allowed(self._parser.flush())

    def reason(self, finish_reason: FinishReason | None) -> str | None:
        return "tool_calls" if self._calls and finish_reason is FinishReason.STOP else finish_reason

    def _allowed(self, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, str]]:
        for piece in pieces:
            if piece.call is None:
                yield piece, ""
            elif self._parallel or piece.call == 0:
                self._calls = True
                yield piece, self._new_id() if piece.name is not None else ""
