"""HTTP/1.1 as the router reads it: httptools, which unlike h11 knows no limit for the head of a request."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# As uvicorn's for h11.
MAX_HEAD_BYTES = 64 << 10


class HttpProtocol(HttpToolsProtocol):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_head_bytes = 0
        self._in_head = False

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response(f"the request line and headers are over {MAX_HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._num_head_bytes = True, 0

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._in_head = False
