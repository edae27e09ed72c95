"""Mutual TLS between the processes of a cluster, from a folder of PEM files: ca.crt, tls.crt and tls.key, as
`kvferry certs` and cert-manager write them. All three are read again when they change.

Who belongs to a cluster has a certificate with the cluster's name, something.kvferry, among its names. Clients have one
of the same authority without it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from workers.errors import ConfigError
from workers.security_config import SecurityConfig

CA, CERTIFICATE, KEY = "ca.crt", "tls.crt", "tls.key"
MEMBER_SUFFIX = ".kvferry"
# A changed folder is seen so soon; an old connection gets as long to end its calls.
_LOOK_S, _GRACE_S = 1.0, 60.0


@dataclass(frozen=True, slots=True)
class Pems:
    ca: bytes
    certificate: bytes
    key: bytes


class TlsFolder:
    def __init__(self, folder: Path) -> None:
        """Raises ConfigError when a file is not there or no certificate of a member of a cluster."""
        self.path = folder
        self.pems = self._read()
        self.member = _member_of(self.pems.certificate, folder / CERTIFICATE)
        self._stamp = self._stamp_now()

    def refresh(self) -> bool:
        """Read again what has changed; whether anything has. What cannot be read yet, half-written maybe, waits."""
        stamp = self._stamp_now()
        if stamp == self._stamp:
            return False
        try:
            pems = self._read()
            if _member_of(pems.certificate, self.path / CERTIFICATE) != self.member:
                return False
        except ConfigError:
            return False
        self._stamp, changed, self.pems = stamp, pems != self.pems, pems
        return changed

    def channel_credentials(self) -> grpc.ChannelCredentials:
        pems = self.pems
        return grpc.ssl_channel_credentials(pems.ca, pems.key, pems.certificate)

    def server_credentials(self) -> grpc.ServerCredentials:
        """Of a server to which only those come who have a certificate of the same authority."""

        def latest() -> grpc.ServerCertificateConfiguration:
            # Called with each new connection, on a thread of gRPC's.
            self.refresh()
            return self._server_configuration()

        return grpc.dynamic_ssl_server_credentials(
            self._server_configuration(), latest, require_client_authentication=True
        )

    def _server_configuration(self) -> grpc.ServerCertificateConfiguration:
        pems = self.pems
        return grpc.ssl_server_certificate_configuration([(pems.key, pems.certificate)], pems.ca)

    def _read(self) -> Pems:
        files = []
        for name in (CA, CERTIFICATE, KEY):
            try:
                files.append((self.path / name).read_bytes())
            except OSError as exc:
                raise ConfigError(
                    f"security.tls: {self.path / name}: {exc.strerror}; `kvferry certs {self.path}` makes such files",
                    param="security.tls",
                ) from None
        return Pems(*files)

    def _stamp_now(self) -> tuple[int, ...]:
        try:
            return tuple((self.path / name).stat().st_mtime_ns for name in (CA, CERTIFICATE, KEY))
        except OSError:
            return ()


def tls_of(security: SecurityConfig) -> TlsFolder | None:
    """None: plain text. Raises ConfigError."""
    return TlsFolder(Path(security.tls)) if security.tls else None


def _member_of(certificate: bytes, path: Path) -> str:
    from cryptography import x509

    try:
        read = x509.load_pem_x509_certificate(certificate)
        names = read.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound) as exc:
        raise ConfigError(f"security.tls: {path}: {exc}; `kvferry certs` makes one", param="security.tls") from None
    members = [name for name in names.get_values_for_type(x509.DNSName) if name.endswith(MEMBER_SUFFIX)]
    if len(members) != 1:
        raise ConfigError(
            f"security.tls: {path} names {len(members)} clusters; one of its DNS names must end in {MEMBER_SUFFIX}",
            param="security.tls",
        )
    return members[0]


class MembersOnly(grpc.aio.ServerInterceptor):
    """Refuses every call of who is not of this cluster, whatever authority signed for it."""

    def __init__(self, member: str) -> None:
        self._member = member.encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        return handler and self._guarded(handler)

    def _guarded(self, handler: Any) -> Any:
        """The same handler behind a look at who calls: an interceptor alone is not told."""
        kind = {
            (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
            (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
            (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
            (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
        }
        name, make = kind[handler.request_streaming, handler.response_streaming]
        behaviour = getattr(handler, name)

        async def answer(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            await self._require_member(context)
            return await behaviour(request, context)

        async def stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            await self._require_member(context)
            answers = behaviour(request, context)
            if hasattr(answers, "__aiter__"):
                async for one in answers:
                    yield one
            else:
                await answers

        return make(
            stream if handler.response_streaming else answer,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    async def _require_member(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        if self._member not in context.auth_context().get("x509_subject_alternative_name", ()):
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED, f"this is {self._member.decode()}; the certificate shown is not of it"
            )


class RotatingChannel:
    """A channel that is made anew when the folder has changed: the old one's certificate may run out."""

    def __init__(self, tls: TlsFolder, connect: Callable[[grpc.ChannelCredentials], grpc.aio.Channel]) -> None:
        self._tls = tls
        self._connect = connect
        self._pems = tls.pems
        self._channel = connect(tls.channel_credentials())
        self._looked_s = 0.0
        self._closing: set[asyncio.Task[None]] = set()

    def unary_unary(self, *arguments: Any, **named: Any) -> Callable[..., Any]:
        return self._caller("unary_unary", arguments, named)

    def unary_stream(self, *arguments: Any, **named: Any) -> Callable[..., Any]:
        return self._caller("unary_stream", arguments, named)

    def stream_unary(self, *arguments: Any, **named: Any) -> Callable[..., Any]:
        return self._caller("stream_unary", arguments, named)

    def stream_stream(self, *arguments: Any, **named: Any) -> Callable[..., Any]:
        return self._caller("stream_stream", arguments, named)

    async def close(self, grace: float | None = None) -> None:
        for task in self._closing:
            task.cancel()
        await self._channel.close(grace)

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
        loop = asyncio.get_running_loop()
        if loop.time() - self._looked_s >= _LOOK_S:
            self._looked_s = loop.time()
            self._tls.refresh()
        if self._pems is not self._tls.pems:
            self._pems, old = self._tls.pems, self._channel
            self._channel = self._connect(self._tls.channel_credentials())
            task = loop.create_task(old.close(_GRACE_S))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        return self._channel
