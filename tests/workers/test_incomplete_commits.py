"""A commit of part of a prompt: what decode has not got whole it does not decode from, whatever the sums say."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fake_model import NUM_LAYERS
from tests.workers.test_decode import Stage, on_stage
from workers.errors import FrameError, StaleGrantError
from workers.kv_transfer.frame import Frame

PARTS: dict[str, Callable[[Frame, int], bool]] = {
    "nothing": lambda frame, end: False,
    "the first half of its tokens": lambda frame, end: frame.token_end <= end // 2,
    "the second half of its tokens": lambda frame, end: frame.token_start >= end // 2,
    "all layers but the last": lambda frame, end: frame.layer_end < NUM_LAYERS,
    "all but one frame": lambda frame, end: (frame.layer_start, frame.token_start) != (1, 0),
}


@pytest.mark.parametrize("part", PARTS)
def test_it_is_refused_though_it_counts_what_came_and_the_blocks_are_free(part):
    async def script(stage: Stage) -> None:
        request, grant = stage.reserve(10)
        frames = [frame for frame in stage.frames(request, grant) if PARTS[part](frame, grant.end)]
        await stage.receive(*frames)
        with pytest.raises(FrameError, match="incomplete"):
            stage.commit(grant, frames)
        assert stage.failures == [("r", FrameError)]
        assert not stage.engine.has_work
        stage.require_idle()
        with pytest.raises(StaleGrantError):
            stage.commit(grant, frames)

    on_stage(script)
