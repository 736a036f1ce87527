# Two commands are enough on a machine with Python 3.11+ and make: `make demo` and `make test`.

PYTHON ?= python3
BIN := .venv/bin
QUIET := TF_CPP_MIN_LOG_LEVEL=3

.PHONY: demo test lint clean

demo: .venv/.examples
	$(QUIET) $(BIN)/python examples/pronounce.py train
	$(QUIET) $(BIN)/python examples/pronounce.py say transformer attention keras

test: .venv/.test
	$(QUIET) KERAS_BACKEND=tensorflow $(BIN)/python -m pytest -q $(PARALLEL)
	$(QUIET) KERAS_BACKEND=jax $(BIN)/python -m pytest -q $(PARALLEL) -m "not slow" $(JAX_TESTS)

# in some processes, each of which begins with neighbours and takes tests from another when it has none left
PARALLEL := -n auto --maxprocesses 4 --dist worksteal

# what runs on every backend; text, data and export are TensorFlow's
JAX_TESTS := $(patsubst %,tests/test_%.py,noise positions relative attention blockwise variants remat embeddings \
    crossentropy blocks models readers transfer adapters packing search generator training callbacks resume)

lint: .venv/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

.venv/.examples .venv/.test: setup.py
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or newer is needed: make PYTHON=python3.11"'
	test -d .venv || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable '.[$(if $(findstring test,$@),test$(comma)jax,examples)]'
	touch $@

comma := ,

clean:
	rm -rf .venv build *.egg-info
