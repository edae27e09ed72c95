"""Topology and operations: refused at start-up or shown in readiness, with the reason."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

AVAILABLE = "workers/kv_transfer/available.py"
TRANSPORTS = "workers/kv_transfer/transports.py"
CHOICE_TESTS = "tests/workers/kv_transfer/test_choice_of_transport.py"
REGISTRATION_TESTS = "tests/router/test_registration.py"
BASELINE_TESTS = "tests/cluster/test_baseline.py"
BAD_CONFIG_TESTS = "tests/cluster/test_bad_configs.py"
ROLLOUT = "cluster/rollout.py"
ROLLOUT_TESTS = "tests/cluster/test_rollout.py"
READINESS_TESTS = "tests/router/test_readiness.py"

OPERATIONS = (
    Mutant(
        "a worker's port is its alone",
        "E3",
        "workers/rpc.py",
        '("grpc.so_reuseport", 0)',
        '("grpc.so_reuseport", 1)',
        ("tests/workers/test_ports.py::test_two_workers_do_not_share_a_port_and_the_second_says_which_is_taken",),
    ),
    Mutant(
        "a router's port is its alone",
        "E3",
        "router/server.py",
        'raise _in_use("grpc_port", host, port, "in use, or no address of this machine") from error',
        "raise",
        ("tests/router/test_openai_server.py::test_a_port_in_use_is_named_and_leaves_nothing_behind",),
    ),
    Mutant(
        "who does not say who it is counts as not there",
        "E4",
        "router/roles.py",
        "if not (stats.incarnation and stats.role):",
        "if False:",
        (
            f"{REGISTRATION_TESTS}"
            "::test_it_is_shown_as_not_ready_and_requests_are_refused_in_words_until_it_has[incarnation]",
        ),
    ),
    Mutant(
        "who comes after a worker that is gone counts as not there before it has said who it is",
        "E4",
        "router/worker_handle.py",
        "self._misses = _MAX_MISSES\n        self._lose(how)",
        "self._lose(how)",
        (f"{REGISTRATION_TESTS}::test_a_request_that_comes_before_a_worker_has_told_of_itself_waits_for_it",),
    ),
    Mutant(
        "a worker that does not know its address yet grants nothing",
        "E4",
        "workers/worker.py",
        "if not self.address:",
        "if False:",
        (f"{REGISTRATION_TESTS}::test_a_worker_whose_port_is_open_before_it_knows_its_address_grants_nothing_yet",),
    ),
    Mutant(
        "ready is who answers, not who once did",
        "E5",
        "router/pool.py",
        "w.role == role and w.reachable and",
        "w.role == role and",
        (f"{READINESS_TESTS}::test_it_turns_when_a_worker_goes_and_again_when_it_is_back",),
    ),
    Mutant(
        "readiness over HTTP is the pool's",
        "E5",
        "router/openai/probes.py",
        "is_ready, reason = pool.ready()",
        'is_ready, reason = True, ""',
        (
            f"{READINESS_TESTS}::test_it_turns_when_a_worker_goes_and_again_when_it_is_back",
            "tests/router/test_openai.py::test_ready_follows_the_pool_and_health_does_not",
        ),
    ),
    Mutant(
        "a transport that is asked for by name is the only one",
        "E6",
        AVAILABLE,
        'if config.transport != "auto":',
        "if False:",
        (
            f"{CHOICE_TESTS}::test_another_host_is_served_by_grpc_when_auto_and_refused_when_shm_is_forced",
            f"{CHOICE_TESTS}::test_a_machine_without_shared_memory_says_so_at_once",
            f"{CHOICE_TESTS}::test_two_that_have_none_in_common_are_refused_by_name",
        ),
    ),
    Mutant(
        "the best transport is one that the receiver accepts",
        "E6",
        TRANSPORTS,
        "if name in answer.transports:",
        "if True:",
        (f"{CHOICE_TESTS}::test_two_that_have_none_in_common_are_refused_by_name",),
    ),
    Mutant(
        "the colocated baseline has as many workers, cores and blocks",
        "E11",
        "cluster/configs/colocated.yaml",
        "colocated:\n  replicas: 2",
        "colocated:\n  replicas: 1",
        (f"{BASELINE_TESTS}::test_the_baseline_has_the_resources_of_the_default",),
    ),
    Mutant(
        "what cannot start is refused before anything is started",
        "",
        "cluster/up.py",
        "    report.require_none()\n",
        "",
        (f"{BAD_CONFIG_TESTS}::test_each_is_refused_in_one_line_that_names_the_key_and_nothing_is_started",),
    ),
    Mutant(
        "a worker that comes back on another node is watched there",
        "-",
        "router/pool.py",
        "await asyncio.gather(*(worker.start() for worker in workers))",
        "pass",
        ("tests/router/test_moved_workers.py::test_a_stream_that_lost_its_only_worker_goes_on_where_that_comes_back",),
    ),
    Mutant(
        "what a worker on another node has cached is followed there",
        "-",
        "router/pool.py",
        "        self._followers |= {worker: asyncio.create_task(follow(worker, self.index)) for worker in workers}\n",
        "",
        ("tests/router/test_moved_workers.py::test_what_a_moved_worker_has_cached_is_known_again_and_the_rest_stays",),
    ),
    Mutant(
        "places are refused where no Ray is joined",
        "-",
        "cluster/config.py",
        "self.address is None and (problem := misplaced(kinds))",
        "(problem := '')",
        (
            "tests/cluster/test_placement.py"
            "::test_places_that_cannot_be_are_refused[router: {resources: {door: 1}}-router.resources chooses among "
            "the nodes of a running Ray: set address]",
        ),
    ),
    Mutant(
        "a worker that drains gets no new requests",
        "",
        "router/pool.py",
        " and not w.member.draining]",
        "]",
        ("tests/router/test_changing_workers.py::test_a_draining_worker_ends_what_it_has_and_gets_nothing_new",),
    ),
    Mutant(
        "requests wait for the only worker of a role that drains",
        "",
        "router/pool.py",
        "now_s if w.member.draining else w.gone_since_s",
        "w.gone_since_s",
        ("tests/router/test_changing_workers.py::test_requests_wait_for_the_only_worker_of_a_role_that_drains",),
    ),
    Mutant(
        "routers know that a worker has left before it is ended",
        "",
        ROLLOUT,
        "        elif self._told:\n            self._controller.leave(name)",
        "        else:\n            self._controller.leave(name)",
        (f"{ROLLOUT_TESTS}::test_routers_know_that_a_worker_is_gone_before_it_is",),
    ),
    Mutant(
        "a worker leaves when those that stay are there",
        "",
        ROLLOUT,
        "self._told and self._may_go(name) and",
        "self._told and",
        (f"{ROLLOUT_TESTS}::test_a_worker_leaves_only_when_those_that_stay_in_its_role_are_there",),
    ),
    Mutant(
        "what does not come back stops a rolling restart",
        "D3",
        "cluster/controller.py",
        "watched.answered, watched.health = None, False, Health.STARTING",
        "watched.answered, watched.health = None, False, Health.ANSWERS",
        (f"{ROLLOUT_TESTS}::test_a_restart_stops_where_one_does_not_come_back",),
    ),
    Mutant(
        "a router that was not reached is told again who its workers are",
        "",
        "cluster/directory.py",
        "if has_succeeded(telling[0]):",
        "if True:",
        ("tests/cluster/test_beats.py::test_a_router_that_was_not_reached_is_told_again",),
    ),
    Mutant(
        "processes hear while they load that they are somebody's",
        "",
        "cluster/ray_calls.py",
        "            self.meanwhile()\n",
        "            time.sleep(0.01)\n",
        ("tests/cluster/test_beats.py::test_whoever_starts_hears_meanwhile_that_it_is_somebodys",),
        hangs=True,
    ),
    Mutant(
        "a worker can be started anew again and again",
        "",
        "cluster/roster.py",
        "self.num_restarts.update(list(found))",
        "self.num_restarts.update(found)",
        (f"{ROLLOUT_TESTS}::test_what_was_started_anew_can_be_again",),
    ),
)
