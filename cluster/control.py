"""What `kvferry up` is asked while its cluster runs: scale, flip, restart, and how far it is.

A Unix socket in the cluster's folder, for its user alone. The orders wait for the controller's thread, which
alone knows and changes the cluster.
"""

from __future__ import annotations

import functools
import logging
import os
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

import grpc

from cluster.roster import Roster
from protos import control_pb2, control_pb2_grpc
from workers.errors import ConfigError, DeadlineError, KVFerryError, UnavailableError
from workers.rpc import error_from_rpc, error_trailers

logger = logging.getLogger(__name__)

R = TypeVar("R")

_ANSWER_TIMEOUT_S = 30.0
_MAX_EVENTS = 1000
_OPTIONS = (("grpc.enable_http_proxy", 0),)


class Events:
    """What the controller said, numbered from 0; the latest are kept."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._kept: deque[control_pb2.Event] = deque(maxlen=_MAX_EVENTS)
        self._num_said = 0

    def __call__(self, text: str) -> None:
        self._kept.append(control_pb2.Event(number=self._num_said, unix_s=time.time(), text=text))
        self._num_said += 1
        self._say(text)

    def since(self, number: int) -> list[control_pb2.Event]:
        return [event for event in self._kept if event.number >= number]


class Progress(Protocol):
    """How far a rollout is."""

    @property
    def settled(self) -> bool: ...

    @property
    def under_way(self) -> Mapping[str, str]: ...


class Control:
    """One cluster's orders: given by any thread, carried out by the one that calls `carry_out`."""

    def __init__(self, roster: Roster, progress: Progress, events: Events) -> None:
        self._roster = roster
        self._progress = progress
        self._events = events
        self._orders: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()

    def carry_out(self) -> None:
        """All orders that wait."""
        while not self._orders.empty():
            order, answer = self._orders.get()
            try:
                answer.set_result(order())
            except KVFerryError as error:
                answer.set_exception(error)
            except Exception as exc:  # The cluster goes on, whoever asked is told.
                logger.exception("an order failed")
                answer.set_exception(KVFerryError(f"internal error: {type(exc).__name__}: {exc}"))

    def scale(self, replicas: Mapping[str, int]) -> None:
        """Raises ConfigError, as all of them."""
        self._ask(lambda: self._roster.scale(replicas))

    def flip(self, worker: str, role: str) -> None:
        self._ask(lambda: self._roster.flip(worker, role))

    def restart(self, names: Sequence[str]) -> list[str]:
        return self._ask(lambda: self._roster.restart(names))

    def progress(self, from_event: int) -> control_pb2.GetProgressResponse:
        return self._ask(
            lambda: control_pb2.GetProgressResponse(
                settled=self._progress.settled,
                under_way=self._progress.under_way,
                events=self._events.since(from_event),
            )
        )

    def _ask(self, order: Callable[[], R]) -> R:
        answer: Future[R] = Future()
        self._orders.put((order, answer))
        try:
            return answer.result(_ANSWER_TIMEOUT_S)
        except TimeoutError:
            raise DeadlineError(f"the controller has not answered within {_ANSWER_TIMEOUT_S:g} s") from None


@contextmanager
def listening(control: Control, socket: Path) -> Iterator[None]:
    """It can be asked there, inside the `with`. What a killed one left there goes."""
    server = grpc.server(ThreadPoolExecutor(4, thread_name_prefix="control"), options=_OPTIONS)
    control_pb2_grpc.add_ControlServiceServicer_to_server(_Service(control), server)
    socket.unlink(missing_ok=True)
    with _target(socket) as target:
        try:
            server.add_insecure_port(target)
            socket.chmod(0o600)
            server.start()
            yield
        finally:
            server.stop(None).wait()
            socket.unlink(missing_ok=True)


@contextmanager
def connected(socket: Path) -> Iterator[control_pb2_grpc.ControlServiceStub]:
    """Inside the `with`, failed calls raise KVFerryError."""
    with _target(socket) as target, grpc.insecure_channel(target, options=_OPTIONS) as channel:
        try:
            yield control_pb2_grpc.ControlServiceStub(channel)
        except grpc.RpcError as exc:
            error = error_from_rpc(exc)
            if isinstance(error, UnavailableError):
                raise UnavailableError("the cluster's controller does not answer; see `kvferry status`") from None
            raise error from None


@contextmanager
def _target(socket: Path) -> Iterator[str]:
    """Of gRPC. The path of a socket has at most 107 characters, and its folder may lie anywhere."""
    folder = os.open(socket.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"unix:/proc/self/fd/{folder}/{socket.name}"
    finally:
        os.close(folder)


def _typed(method: Callable[[Any, Any], R]) -> Callable[[Any, Any, grpc.ServicerContext], R]:
    @functools.wraps(method)
    def answer(service: Any, request: Any, context: grpc.ServicerContext) -> R:
        try:
            return method(service, request)
        except KVFerryError as error:
            _abort(context, error)

    return answer


def _abort(context: grpc.ServicerContext, error: KVFerryError) -> NoReturn:
    context.set_trailing_metadata(error_trailers(error))
    context.abort(error.grpc_code, error.message)
    raise AssertionError("abort raises")


class _Service(control_pb2_grpc.ControlServiceServicer):
    def __init__(self, control: Control) -> None:
        self._control = control

    @_typed
    def Scale(self, request: control_pb2.ScaleRequest) -> control_pb2.ScaleResponse:
        self._control.scale(dict(request.replicas))
        return control_pb2.ScaleResponse()

    @_typed
    def Flip(self, request: control_pb2.FlipRequest) -> control_pb2.FlipResponse:
        self._control.flip(request.worker, request.role)
        return control_pb2.FlipResponse()

    @_typed
    def Restart(self, request: control_pb2.RestartRequest) -> control_pb2.RestartResponse:
        return control_pb2.RestartResponse(workers=self._control.restart(list(request.names)))

    @_typed
    def GetProgress(self, request: control_pb2.GetProgressRequest) -> control_pb2.GetProgressResponse:
        return self._control.progress(request.from_event)


def parse_replicas(assignments: Sequence[str]) -> dict[str, int]:
    """Of prefill=3 decode=2. Raises ConfigError."""
    replicas: dict[str, int] = {}
    for assignment in assignments:
        role, equals, count = assignment.partition("=")
        if not (equals and count.isdigit()):
            raise ConfigError(f"{assignment!r} is not ROLE=NUMBER, as in prefill=3", param="replicas")
        replicas[role] = int(count)
    return replicas
