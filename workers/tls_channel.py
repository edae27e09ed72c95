"""A channel between processes of a cluster, whose certificates may change while it lives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from workers.tls import TlsFolder

# A changed folder is seen so soon.
_LOOK_S = 1.0


class RotatingChannel:
    """Made anew when the folder has changed: the former one's certificate may run out. What runs on it goes on."""

    def __init__(self, tls: TlsFolder, connect: Callable[[grpc.ChannelCredentials], grpc.aio.Channel]) -> None:
        self._tls = tls
        self._connect = connect
        self._pems = tls.pems
        self._channel = connect(tls.channel_credentials())
        # Streams that never end are on them; certificates live for days.
        self._former: list[grpc.aio.Channel] = []
        self._looked_s = 0.0

    def unary_unary(self, *arguments: Any, **named: Any) -> Callable[..., Any]:
        return self._caller("unary_unary", arguments, named)

    def unary_stream(self, *arguments: Any, **named: Any) -> Callable[..., Any]:
        return self._caller("unary_stream", arguments, named)

    def stream_unary(self, *arguments: Any, **named: Any) -> Callable[..., Any]:
        return self._caller("stream_unary", arguments, named)

    def stream_stream(self, *arguments: Any, **named: Any) -> Callable[..., Any]:
        return self._caller("stream_stream", arguments, named)

    async def close(self, grace: float | None = None) -> None:
        await asyncio.gather(*(channel.close(grace) for channel in (self._channel, *self._former)))

    async def __aenter__(self) -> RotatingChannel:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def _caller(self, kind: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Callable[..., Any]:
        made: tuple[grpc.aio.Channel, Any] | None = None

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal made
            channel = self._current()
            if made is None or made[0] is not channel:
                made = channel, getattr(channel, kind)(*arguments, **named)
            return made[1](*args, **kwargs)

        return call

    def _current(self) -> grpc.aio.Channel:
        now_s = asyncio.get_running_loop().time()
        if now_s - self._looked_s >= _LOOK_S:
            self._looked_s = now_s
            self._tls.refresh()
        if self._pems is not self._tls.pems:
            self._pems = self._tls.pems
            self._former.append(self._channel)
            self._channel = self._connect(self._tls.channel_credentials())
        return self._channel
