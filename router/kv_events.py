"""What workers tell of their prefix caches, kept in the router's prefix index for as long as it is known to be true."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any, NoReturn

import grpc.aio

from protos import worker_pb2
from router.prefix_index import PrefixIndex
from router.worker_handle import WorkerHandle
from workers.engine.block_hash import HASH_BYTES
from workers.errors import KVFerryError, UnavailableError
from workers.rpc import error_from_rpc

logger = logging.getLogger(__name__)

EventStream = grpc.aio.UnaryStreamCall[Any, worker_pb2.StreamKVEventsResponse]

# Before a stream that ended, or was never there, is tried again.
_RETRY_S = 0.2


async def follow(worker: WorkerHandle, index: PrefixIndex) -> NoReturn:
    """Keep `index` up with one worker; what it held is dropped the moment that it, or a message of it, is lost."""
    while True:
        incarnation = worker.stats.incarnation
        try:
            if worker.reachable and worker.stats.hash_block_size:
                stream = worker.kv_events()
                with worker.ends_call(stream):
                    await _read(stream, incarnation, index)
        except KVFerryError as error:
            logger.info("KV events of %s: %s", worker.address, error.message)
        except Exception:  # Nobody else would follow.
            logger.exception("KV events of %s cannot be read", worker.address)
        finally:
            index.drop(incarnation)
        await asyncio.sleep(_RETRY_S)


async def _read(stream: EventStream, incarnation: str, index: PrefixIndex) -> None:
    """Raises KVFerryError when the stream breaks, lacks a message or is another's."""
    expected = 0
    try:
        async for message in stream:
            if (message.incarnation, message.number) != (incarnation, expected):
                raise UnavailableError(f"message {expected} of {incarnation} is missing")
            expected += 1
            if message.reset:
                index.drop(incarnation)
            index.leave(incarnation, _hashes(message.left))
            index.enter(incarnation, _hashes(message.entered))
    except grpc.aio.AioRpcError as exc:
        raise error_from_rpc(exc) from exc
    finally:
        stream.cancel()


def _hashes(joined: bytes) -> Iterator[bytes]:
    return (joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES))
