"""Which routers a client may ask, which of them it asks now, and for how long it goes on asking."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import grpc
import grpc.aio

from workers.backoff import pause_s
from workers.errors import ConfigError, DeadlineError, KVFerryError, UnavailableError
from workers.rpc import ACCEPTED_KEY, error_from_rpc

# A router that died is started anew within a few seconds, and one that fell silent is replaced after ten.
_RESUME_S = 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0
# What gRPC says where something listened, and would not speak.
_TURNED_AWAY = ("socket closed", "connection reset", "handshake", "ssl")
_SHOW_A_CERTIFICATE = (
    "something listens there: if it is a router with security.tls, give certificates that it accepts (tls, KVFERRY_TLS)"
)

Metadata = tuple[tuple[str, str], ...]


class Routers:
    """Any of them can answer. All calls of a client go to the same one until it fails."""

    def __init__(self, target: str, api_key: str | None = None) -> None:
        """`api_key`: None: what KVFERRY_API_KEY says, if anything."""
        api_key = api_key or os.environ.get("KVFERRY_API_KEY")
        self.addresses: Sequence[str] = [address.strip() for address in target.split(",") if address.strip()]
        if not self.addresses:
            raise ConfigError("target is empty; give host:port, or several of them with commas between", param="target")
        # What every call carries.
        self.metadata: Metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        # Whether a router was ever there. Where none was, none is waited for.
        self.heard = False
        self.current = 0
        self.closed = False

    def leave(self, at: int) -> None:
        """The one there does not answer; who else has noticed is no matter."""
        if self.current == at:
            self.current = (at + 1) % len(self.addresses)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Once they are closed, what is asked of them and what was under way raise UnavailableError, not grpc's own."""
        try:
            yield
        except (KVFerryError, ValueError, grpc.aio.UsageError, asyncio.CancelledError) as exc:
            if not self.closed or (isinstance(exc, asyncio.CancelledError) and _is_being_cancelled()):
                raise
            raise closed_error() from exc

    def error(self, exc: grpc.RpcError, at: int) -> KVFerryError:
        """The typed error behind a failed call."""
        assert isinstance(exc, (grpc.Call, grpc.aio.AioRpcError))
        self.heard = self.heard or was_accepted(exc)
        error = error_from_rpc(exc)
        if "kvferry-error" in dict(exc.trailing_metadata() or ()):
            self.heard = True
        elif isinstance(error, UnavailableError):
            said = (exc.details() or "").lower()
            turned_away = any(word in said for word in _TURNED_AWAY)
            mend = _SHOW_A_CERTIFICATE if turned_away else "start one with `kvferry up`, or give its target"
            return UnavailableError(f"no router answers at {self.addresses[at]}; {mend}")
        return error


def was_accepted(exc: grpc.RpcError) -> bool:
    """Whether a router had the request."""
    assert isinstance(exc, (grpc.Call, grpc.aio.AioRpcError))
    return ACCEPTED_KEY in dict(exc.initial_metadata() or ())


def closed_error() -> UnavailableError:
    """Openai's clients raise an APIConnectionError then, too."""
    return UnavailableError("the client is closed; make a new one")


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class Patience:
    """Of one call: it goes to one router after the other, again and again, while that may be of use."""

    def __init__(
        self,
        routers: Routers,
        key: str,
        timeout_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        rounds: int | None = None,
    ) -> None:
        """`rounds`: ask each router so often at most; None: for 30 s after the last answer."""
        self._routers = routers
        self._key = key
        self._clock = clock
        self._deadline_s = None if timeout_s is None else clock() + timeout_s
        self._rounds = rounds
        self._give_up_s: float | None = None
        self._num_failed = 0
        # Why the last try came to no router.
        self._unreached: UnavailableError | None = None
        # Where to ask.
        self.at = routers.current

    def time_left_s(self) -> float | None:
        return None if self._deadline_s is None else self._deadline_s - self._clock()

    def heard(self) -> None:
        """A router answers."""
        self._routers.heard = True
        self._give_up_s, self._num_failed, self._unreached = None, 0, None

    def pause_s(self, exc: grpc.RpcError) -> float:
        """How long to wait before asking again. Raises the error if that would be of no use, or has been for long."""
        error, now_s = self._routers.error(exc, self.at), self._clock()
        if isinstance(error, DeadlineError) and self._unreached is not None and not was_accepted(exc):
            # The time ran out within yet another try.
            raise self._unreached from None
        if not isinstance(error, UnavailableError):
            if isinstance(error, DeadlineError) and not was_accepted(exc):
                # Its host may be gone, and drop what is sent there: the next call asks another.
                self._routers.leave(self.at)
            raise error from None
        self._unreached = error
        self._routers.leave(self.at)
        self.at = self._routers.current
        if self._give_up_s is None:
            self._give_up_s = now_s + _RESUME_S
        give_up_s = self._give_up_s if self._deadline_s is None else min(self._give_up_s, self._deadline_s)
        self._num_failed += 1
        num_rounds, rest = divmod(self._num_failed, len(self._routers.addresses))
        if rest and now_s < give_up_s:
            return 0.0
        wait_s = pause_s(_FIRST_PAUSE_S, num_rounds, self._key, _LONGEST_PAUSE_S) if num_rounds else 0.0
        if not self._routers.heard or num_rounds == self._rounds or now_s + wait_s > give_up_s:
            raise error from None
        return wait_s
