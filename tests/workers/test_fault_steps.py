"""Workers that are killed at a named step of a hand-off: it is that step, and the answer is whole."""

from __future__ import annotations

from typing import get_args

import pytest

from cluster.sim.loop import run
from tests.factories import SEEDED, SimCluster, prompt_of, sim_cluster
from tests.fake_model import expected_tokens
from workers.fault_config import Kill

NUM_TOKENS = 20
PROMPT = prompt_of(NUM_TOKENS)
NOTHING = {"granted": 1, "computed": 0, "sampled": 0, "received": 0, "running": 0, "decoded": 0, "answered": 0}
ALL_KV = {"computed": NUM_TOKENS, "sampled": 1, "received": NUM_TOKENS}
# Who is killed, and how far the only request has got by then.
STEPS = {
    "reserve": ("d0", NOTHING),
    "prefill": ("p0", NOTHING),
    "frame": ("d0", {"granted": 1, "received": 0, "running": 0}),
    "token_1": ("p0", {"granted": 1, "computed": NUM_TOKENS, "sampled": 1, "running": 0, "answered": 0}),
    "commit": ("d0", {**ALL_KV, "granted": 1, "running": 0, "decoded": 0}),
    "committed": ("d0", {**ALL_KV, "granted": 0, "running": 1, "decoded": 0}),
    "output": ("d0", {**ALL_KV, "granted": 0, "running": 1, "decoded": 1, "answered": 1}),
}


def progress(cluster: SimCluster, num_answered: int) -> dict[str, float]:
    """Tokens computed and sampled by prefill; received and decoded by decode; requests there."""
    prefill, decode = (cluster.workers[name] for name in ("p0", "d0"))
    stats = decode.stats()
    return {
        "granted": stats.num_waiting_for_kv,
        "computed": prefill.engine.num_prompt_tokens_computed,
        "sampled": prefill.engine.num_output_tokens,
        "received": decode.decode.num_bytes_received / decode.layout.token_bytes,
        "running": stats.num_running + stats.num_waiting,
        "decoded": decode.engine.num_output_tokens,
        "answered": num_answered,
    }


@pytest.mark.parametrize("at", STEPS)
def test_a_worker_is_killed_at_the_step_that_is_named_and_nothing_is_lost(at, monkeypatch):
    name, expected = STEPS[at]
    seen: list[dict[str, float]] = []

    async def main() -> None:
        async with sim_cluster(2, 2, idle_within_s=25, faults=(Kill(fault="kill", at=at, worker=name),)) as cluster:
            tokens: list[int] = []

            def kill() -> None:
                seen.append(progress(cluster, len(tokens)))
                cluster.hosts[name].kill()

            monkeypatch.setattr("workers.faults.kill_process", kill)
            async for output in cluster.router.generate(PROMPT, SEEDED, "r"):
                tokens += output.token_ids
            await cluster.kill(name)
            assert tokens == expected_tokens(PROMPT, SEEDED)

    run(main())
    (moment,) = seen
    assert moment | expected == moment


def test_every_step_is_among_them():
    assert set(STEPS) == set(get_args(Kill.model_fields["at"].annotation))
