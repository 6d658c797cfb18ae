# Everything a contributor needs; `make` alone lists it.
#   make test PYTHON=python3.12 ARGS='-k bootstrap'

DEV := .venv-dev
PY := $(DEV)/bin/python
# The system's own first: the tests' unprivileged user must be able to read the interpreter.
PYTHON := /usr/bin/python3 python3.13 python3.12 python3.11 python3
PROGRAMS := bwrap git tmux valgrind dockerd docker zsh fish busybox docker-compose ip curl openssl ssh sshd
PACKAGES := bubblewrap git tmux valgrind docker.io docker-compose busybox-static zsh fish python3 python3-venv linux-libc-dev \
    iproute2 curl openssl openssh-client openssh-server python3-pip python3-requests python3-httpx
# Large: what `make test-runtimes` runs inside sandboxes.
RUNTIMES := node npm gcc cmake go cargo javac chromium gdb strace
RUNTIME_PACKAGES := nodejs npm gcc libc6-dev make cmake golang-go cargo default-jdk-headless chromium gdb strace
ARGS :=
RUNTIME_TESTS := tests/kernel/test_runtimes.py tests/kernel/test_network_clients.py \
    tests/service/dashboard
# Debian keeps the database server's programs apart by version, not on PATH.
SERVER := /usr/lib/postgresql/*/bin/postgres
# Real servers; the browser's are above, since Playwright keeps a loop of its own.
SERVICE_TESTS := tests/service tests/client tests/cli/test_remote.py
# They start a dockerd of their own, as root.
ENGINE_TESTS := tests/docker tests/compose/test_started.py
# They run agents from npm: those of CI, or with AGENTS=all every one of the lock.
AGENT_TESTS := tests/agents/test_agents.py tests/agents/test_fullscreen.py tests/agents/test_claude_hook.py
AGENTS := main
# They build Kubernetes once, and start a cluster as root. CLUSTER=api: only what needs an API server
# without nodes; CLUSTER=nodes: only the rest.
CLUSTER_TESTS := tests/cluster
CLUSTER ?= all
MARKED_all :=
MARKED_api := -m 'not nodes and not chaos'
MARKED_nodes := -m 'nodes and not chaos'
CLUSTER_PROGRAMS := etcd containerd runc ctr dpkg-source ps /usr/lib/go-1.19/bin/go \
    /usr/lib/cni/bridge /usr/lib/cni/host-local $(SERVER)
CLUSTER_PACKAGES := etcd-server containerd runc containernetworking-plugins golang-1.19-go dpkg-dev procps \
    postgresql
# For `make fuzz` and `make chaos`: how long, how many, and the seed to begin with (empty: any).
SECONDS := 120
RUNS := 240
SEED :=

# Whether an interpreter will do: new enough, able to make a venv with pip, and as root not below
# a closed directory such as /root (pyenv), where the tests' user could not reach it.
define PROBE
import ensurepip, os, sys
path = os.path.realpath(sys.executable)
print(path)
while os.getuid() == 0 and path != "/":
    path = os.path.dirname(path)
    os.stat(path).st_mode & 1 or sys.exit(1)
sys.exit(sys.version_info < (3, 11))
endef
export PROBE

.PHONY: help
help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

.PHONY: test
test: dev ## install what tests need and run all of them but the next five
	@$(PY) -m pytest -n 2 $(addprefix --ignore=,$(RUNTIME_TESTS) $(ENGINE_TESTS) $(SERVICE_TESTS) $(AGENT_TESTS) $(CLUSTER_TESTS)) $(ARGS)

.PHONY: test-service
test-service: dev ## the sandbox service and its clients
	@$(MAKE) --no-print-directory deps PROGRAMS='$(SERVER) ps' PACKAGES='postgresql procps'
	@$(PY) -m pytest -n 2 $(SERVICE_TESTS) $(addprefix --ignore=,$(RUNTIME_TESTS)) $(ARGS)

.PHONY: test-docker
test-docker: dev ## start a container engine, and run what needs one
	@$(PY) -m pytest -n 2 $(ENGINE_TESTS) $(ARGS)

.PHONY: test-runtimes
test-runtimes: dev ## install language runtimes and a browser, and run them in sandboxes
	@$(MAKE) --no-print-directory deps PROGRAMS='$(RUNTIMES)' PACKAGES='$(RUNTIME_PACKAGES)'
	@$(PY) -m pytest -n 2 $(RUNTIME_TESTS) $(ARGS)

.PHONY: test-agents
test-agents: dev ## install agents from npm, and attack through them; AGENTS=all for more
	@$(MAKE) --no-print-directory deps PROGRAMS='node npm' PACKAGES='nodejs npm'
	@$(PY) tests/agents/install.py $(if $(filter all,$(AGENTS)),--all)
	@AGENT_SANDBOX_AGENTS=$(AGENTS) $(PY) -m pytest $(AGENT_TESTS) $(ARGS)

.PHONY: test-cluster
test-cluster: dev ## build Kubernetes once, and run what needs a cluster; CLUSTER=api for less
	$(if $(filter all api nodes,$(CLUSTER)),,$(error CLUSTER is all, api or nodes))
	@$(MAKE) --no-print-directory deps PROGRAMS='$(CLUSTER_PROGRAMS)' PACKAGES='$(CLUSTER_PACKAGES)'
	@[ "$$(id -u)" != 0 ] || $(PY) tests/cluster/build.py $(if $(filter api,$(CLUSTER)),--api)
	@$(PY) -m pytest $(CLUSTER_TESTS) $(MARKED_$(CLUSTER)) $(ARGS)

.PHONY: fuzz
fuzz: dev ## feed random input to everything that parses; SECONDS=600 for longer, SEED=n again
	@AGENT_SANDBOX_FUZZ_SECONDS=$(SECONDS) AGENT_SANDBOX_FUZZ_SEED=$(SEED) \
	    $(PY) -m pytest -n 2 tests/fuzz $(ARGS)

.PHONY: chaos
chaos: dev ## kill parts of sandboxes at random moments; RUNS=2000 for longer, SEED=n again
	@AGENT_SANDBOX_CHAOS_RUNS=$(RUNS) AGENT_SANDBOX_CHAOS_SEED=$(SEED) \
	    $(PY) -m pytest -n 2 -m chaos tests/chaos $(wildcard tests/service/chaos) $(ARGS)

.PHONY: check
check: dev ## lint, formatting, types
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy --strict

.PHONY: bench
bench: dev ## what a start costs, next to bare bwrap
	@$(PY) bench/launch.py
	@$(PY) bench/scan.py
	@$(PY) bench/saves.py
	@$(PY) bench/docker.py
	@$(PY) bench/network.py
	@$(PY) bench/service.py

.PHONY: docs-test
docs-test: dev ## the documentation says what the code does
	@$(PY) -m pytest tests/test_docs.py $(ARGS)

.PHONY: deps
deps: ## install the system packages that tests need (as root on Debian), or name them
	@missing=; \
	for program in $(PROGRAMS); do \
	    command -v $$program >/dev/null || missing="$$missing $$program"; \
	done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    /usr/bin/python3 -c 'import ensurepip' 2>/dev/null || missing="$$missing python3-venv"; \
	    [ -z "$$missing" ] || { apt-get update && \
	        DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $(PACKAGES); }; \
	elif [ -n "$$missing" ]; then \
	    echo "make: missing:$$missing; tests that need them skip (Debian: apt-get install $(PACKAGES))" >&2; \
	fi

.PHONY: dev
dev: deps
	@if [ -x $(PY) ] && [ "$$(cat $(DEV)/stamp 2>&1)" = '$(PYTHON)' ] && \
	    ! [ requirements-dev.lock -nt $(DEV)/stamp ]; then exit; fi; \
	for python in $(PYTHON); do \
	    found=$$($$python -I -c "$$PROBE" 2>/dev/null) && break; \
	done || { echo 'make: no Python 3.11 or newer with venv that every user can read' >&2; exit 1; }; \
	$$found -m venv --clear $(DEV) && \
	$(PY) -m pip install -q --disable-pip-version-check --require-hashes -r requirements-dev.lock && \
	echo '$(PYTHON)' >$(DEV)/stamp

.PHONY: lock
lock: ## renew the pins of the development tools (needs uv)
	uv pip compile --no-config --upgrade --group dev --universal --python-version 3.11 \
	    --generate-hashes --custom-compile-command 'make lock' --output-file requirements-dev.lock

.PHONY: clean
clean: ## remove what was made here
	rm -rf .venv .venv-dev build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests -name __pycache__ -prune -exec rm -rf {} +
