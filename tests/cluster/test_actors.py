from __future__ import annotations

import json
import subprocess
import sys

PINNED = """
import json, os, sys, threading
from pathlib import Path
from cluster.actors import WorkerProcess
from workers.config import WorkerConfig
started = threading.Event()
threading.Thread(target=started.wait, daemon=True).start()
core = max(os.sched_getaffinity(0))
report = os.fdopen(os.dup(1), "w")
WorkerProcess(WorkerConfig(cpu_affinity=(core,), num_threads=1), Path(sys.argv[1]), None)
print("to the log")
os.system("echo natively")
threads = [sorted(os.sched_getaffinity(int(thread))) for thread in os.listdir("/proc/self/task")]
json.dump([core, threads, os.environ["OMP_NUM_THREADS"], "torch" in sys.modules], report)
"""


def test_a_worker_keeps_all_threads_to_its_cores_and_writes_to_its_log(tmp_path):
    log = tmp_path / "logs" / "w.log"
    result = subprocess.run([sys.executable, "-c", PINNED, str(log)], capture_output=True, text=True, check=True)
    core, threads, omp, torch_loaded = json.loads(result.stdout)
    assert threads == [[core]] * len(threads)
    assert len(threads) > 1
    assert (omp, torch_loaded) == ("1", False)
    assert sorted(log.read_text().splitlines()) == ["natively", "to the log"]
