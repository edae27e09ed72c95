"""All there is of durable jobs in one router: the database, the loop that answers, and both APIs' doors to it."""

from __future__ import annotations

import grpc.aio
from fastapi import FastAPI

from protos import router_pb2_grpc
from router.batches.answers import HttpAnswerer
from router.batches.batches import Batches, add_batch_routes
from router.batches.file_store import FileStore
from router.batches.files import add_file_routes
from router.config import JobsConfig
from router.jobs.answers import NATIVE, NativeAnswerer
from router.jobs.database import Database
from router.jobs.queue import JobQueue
from router.jobs.runner import Answerer, Jobs
from router.jobs.service import JobService
from router.jobs.store import JobStore
from router.tenants import KeyRing
from router.text import TextService

_BATCH_ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


class JobDesk:
    def __init__(self, config: JobsConfig, text: TextService, incarnation: str, keys: KeyRing | None) -> None:
        """Raises ConfigError for a jobs.url of which nothing can come; that the database is there is not needed."""
        assert config.url, "who starts a router chooses where its jobs are"
        self._config = config
        self._database = Database(config.url)
        self._answerers: dict[str, Answerer] = {NATIVE: NativeAnswerer(text)}
        queue = JobQueue(self._database, incarnation, config)
        self._jobs = Jobs(queue, self._answerers, config, keys, text.metrics)
        self._store = JobStore(self._database, config)
        self._files = FileStore(self._database, config.ttl_s, config.max_tenant_file_bytes)

    def open_to_grpc(self, server: grpc.aio.Server) -> None:
        service = JobService(self._store, self._jobs, self._config)
        router_pb2_grpc.add_JobServiceServicer_to_server(service, server)

    def open_to_http(self, app: FastAPI) -> None:
        """Last, as a batch may ask for any route that is there."""
        paths = {getattr(route, "path", "") for route in app.routes}
        endpoints = [endpoint for endpoint in _BATCH_ENDPOINTS if endpoint in paths]
        self._answerers.update(dict.fromkeys(endpoints, HttpAnswerer(app)))
        batches = Batches(self._store, self._files, endpoints, self._config.max_num_prompts)
        add_file_routes(app, self._files, self._config.max_file_bytes)
        add_batch_routes(app, batches, self._jobs)

    def start(self) -> None:
        """Begin to answer, once both APIs are there."""
        self._jobs.start()

    async def stop(self) -> None:
        """Answer no more; what is there can be read until `close`."""
        await self._jobs.stop()

    async def close(self) -> None:
        await self._database.close()
