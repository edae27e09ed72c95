"""Who has no business at a port: what it gets out of it. Real sockets."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
_REQUEST = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
_TIMEOUT_S = 5
# The first bytes of a TLS record that says why it ends.
_ALERT = b"\x15\x03"


def context_of(folder: Path, *, certificate: bool = True) -> ssl.SSLContext:
    """Of who trusts ca.crt in `folder`, and shows what else is there."""
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    if certificate:
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    return context


def foreign_context(trusted: Path, shown: Path) -> ssl.SSLContext:
    """Of who shows a certificate of another authority, and does not mind whom it speaks to."""
    context = context_of(trusted, certificate=False)
    context.load_cert_chain(shown / "tls.crt", shown / "tls.key")
    return context


def got_from(port: int, context: ssl.SSLContext | None, host: str = "127.0.0.1") -> bytes:
    """What a port answers to a stranger, of HTTP/1.1 or of gRPC; nothing: it was refused. None: in plain text."""
    answers = [_got(host, port, context, alpn, said) for alpn, said in (("http/1.1", _REQUEST), ("h2", _PREFACE))]
    return b"".join(answer for answer in answers if not answer.startswith(_ALERT))


def _got(host: str, port: int, context: ssl.SSLContext | None, alpn: str, said: bytes) -> bytes:
    try:
        with socket.create_connection((host, port), _TIMEOUT_S) as plain:
            if context is None:
                plain.sendall(said)
                return plain.recv(100)
            context.check_hostname = False
            context.set_alpn_protocols([alpn])
            with context.wrap_socket(plain) as wrapped:
                # TLS 1.3 tells of a certificate that is not accepted with the first read.
                wrapped.sendall(said)
                return wrapped.recv(100)
    except (ssl.SSLError, ConnectionError, TimeoutError):
        return b""
