# serve and test set up all they need in $(VENV). On an accelerator: make serve ACCELERATOR=gpu
PYTHON ?= python3
VENV ?= .venv
ACCELERATOR ?= cpu
ARGS ?=
JOBS ?= 2
RECIPE ?=
EXTRAS ?=

python := $(VENV)/bin/python
# A stamp a set of extras: changed requirements are installed, others are not looked at again.
extras_run := $(ACCELERATOR)
extras_train := $(ACCELERATOR),train
extras_test := $(ACCELERATOR),test$(EXTRAS)
extras_dev := $(ACCELERATOR),dev

.PHONY: serve test bench train lint format

serve: $(VENV)/.run-$(ACCELERATOR)
	$(python) -m dflash_jax.serve $(ARGS)

test: $(VENV)/.test-$(ACCELERATOR)
	$(python) -m pytest --numprocesses $(JOBS) --dist loadfile $(ARGS)

bench: $(VENV)/.run-$(ACCELERATOR)
	$(python) -m dflash_jax bench $(ARGS)

train: $(VENV)/.train-$(ACCELERATOR)
	$(python) -m train $(RECIPE) $(ARGS)

lint: $(VENV)/.dev-$(ACCELERATOR)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/basedpyright --pythonpath $(python)

format: $(VENV)/.dev-$(ACCELERATOR)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

$(VENV)/.%-$(ACCELERATOR): pyproject.toml
	test -x $(python) || $(PYTHON) -m venv $(VENV)
	$(python) -m pip install --quiet --disable-pip-version-check --editable ".[$(extras_$*)]"
	touch $@
