# Two commands for users: `make demo` and `make test`. Each makes its own virtual environment in .venv and installs what
# it needs under constraints.txt. PYTHON chooses the interpreter: `make demo PYTHON=python3.12`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
EXTRAS := $(VENV)/.extras
PIP := $(BIN)/python -m pip install --progress-bar off --disable-pip-version-check -c constraints.txt

# Without bytecode every process compiles what it imports anew, and the tests start many.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-all lint style fast bench chaos docs data clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(READY) data ## Train in three ways, in turns, on an emulated uneven cluster; ends with a table and a page (3 minutes)
	$(BIN)/python scripts/demo.py

test: style data ## Check style and run the tests (6 to 8 minutes on 2 cores, and the installation)
	$(BIN)/python -m pytest -m "not slow"

test-all: $(EXTRAS) data ## Run what `make test` leaves out: types, long tests, the fuzzers with more seeds (about 30 minutes)
	$(BIN)/mypy
	@$(BIN)/evenly data fetch mnist cifar10 shakespeare || echo "the tests of experiments take small files of the same form"
	$(BIN)/python -m pytest -m slow -n 3

fast: $(READY) ## Only the tests that need neither root nor a lab nor a quiet machine
	$(BIN)/python -m pytest -m "not lab and not alone and not slow"

lint: style ## Style, types and import contracts
	$(BIN)/mypy

style: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

bench: $(READY) data ## Run every benchmark in its quick form
	$(BIN)/python benchmarks/exchange.py --quick
	$(BIN)/python benchmarks/fashion.py --quick

chaos: $(READY) data ## Kill, stop and cut off nodes of an elastic run at random, and measure what it costs (7 minutes, root)
	$(BIN)/python benchmarks/chaos.py

docs: $(READY) ## Build the documentation into site/
	$(BIN)/zensical build --strict

data: ## Fetch Fashion-MNIST as a system package, where this user may
	@sh scripts/system-packages.sh

clean: ## Remove what the commands above made
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache .hypothesis

# pip writes into a log, of which the last package is shown: on a terminal in one line that is renewed every second,
# elsewhere in a new line every ten seconds. Interrupted, pip ends too, though it runs in the background.
define INSTALL
log=$(VENV)/install.log; \
[ -t 1 ] && { every=1; begin='\r\033[K'; end=''; } || { every=10; begin=''; end='\n'; }; \
$(PIP) -e '.[dev,docs,plot]' > $$log 2>&1 & pip=$$!; \
trap 'kill $$pip; exit 130' INT TERM; \
seconds=0; \
while sleep 1; kill -0 $$pip 2> /dev/null; do \
	seconds=$$((seconds + 1)); \
	[ $$((seconds % every)) = 0 ] || continue; \
	at=$$(grep -E '^ *(Collecting|Downloading|Using cached|Building|Installing)' $$log | tail -n 1 \
		| sed -E 's/^ +//; s/https?:[^ ]*\///; s/( from |:| \(from).*//' | cut -c 1-70); \
	printf "$$begin  %s s: %s$$end" $$seconds "$${at:-starting}"; \
done; \
printf "$$begin"; \
wait $$pip || { grep -v '^Looking in' $$log | tail -n 25; exit 1; }
endef

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "evenly needs Python 3.11 or newer, and $(PYTHON) is older. Give another: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@echo "1 of 2: making a virtual environment in $(VENV) (a few seconds)"
	@clear=--clear; [ "$$($(BIN)/python -V 2> /dev/null)" = "$$($(PYTHON) -V)" ] && clear=; \
	$(PYTHON) -m venv $$clear $(VENV) || { \
		echo "$(PYTHON) cannot make a virtual environment. On Debian: apt-get install python3-venv"; exit 1; }
	@echo "2 of 2: installing into it what pyproject.toml names, torch first of all (about two minutes)"
	@$(INSTALL)
	@$(BIN)/python -m compileall -q -j 0 src
	@touch $(READY)
	@echo "installed"

$(EXTRAS): $(READY)
	@echo "installing what only long tests need: clients of loggers, pytorch_optimizer, Lightning, Accelerate, transformers (a minute)"
	@$(PIP) --quiet -e '.[loggers,optim,lightning,accelerate,transformers]'
	@touch $(EXTRAS)
