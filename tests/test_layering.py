"""How the package hangs together: who imports whom, what an import costs, and the names that files are saved under."""

import ast
import os
import pathlib
import subprocess
import sys

import keras
import pytest

import keras_transformer as kt

PACKAGE = pathlib.Path(kt.__file__).parent
MODULES = {path.stem: ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.glob("*.py")}
ARROWS = {
    "adapters": {"checks"},
    "policies": set(),
    "checks": set(),
    "noise": set(),
    "scopes": {"checks"},
    "positions": {"checks", "noise", "scopes"},
    "masks": {"checks"},
    "relative": {"checks", "positions"},
    "scoring": {"checks", "masks"},
    "loops": set(),
    "blockwise": {"loops", "noise", "scoring"},
    "attention": {"blockwise", "noise", "scopes", "scoring"},
    "heads": {"attention", "checks", "masks", "policies", "scopes", "scoring"},
    "multi_head": {"checks", "heads", "masks", "relative", "scopes"},
    "feed_forward": {"checks", "heads", "noise", "policies"},
    "remat": {"scopes"},
    "crossentropy": {"loops"},
    "embeddings": {"checks", "crossentropy"},
    "blocks": {"checks", "feed_forward", "masks", "multi_head", "noise", "policies", "remat"},
    "pooling": {"checks", "masks", "scoring"},
    "stacks": {"blocks", "noise", "positions"},
    "models": {"checks", "embeddings", "positions", "stacks"},
    "readers": {"blocks", "checks", "embeddings", "noise", "pooling", "stacks"},
    "transfer": {"checks"},
    "families": {"embeddings", "models", "noise", "positions", "stacks"},
    "tensors": set(),
    "pretrained": {"checks", "families", "tensors", "transfer"},
    "wordpiece": {"checks", "tokenizer"},
    "filters": {"checks"},
    "search": {"checks", "filters", "noise"},
    "decoding": {"search"},
    "parts": {"scopes"},
    "generator": {"checks", "filters", "parts", "scopes", "search"},
    "averaging": set(),
    "callbacks": {"checks"},
    "resume": {"checks"},
    "training": {"checks", "crossentropy"},
    "sources": {"checks"},
    "batches": {"checks"},
    "data": {"batches", "checks", "tokenizer"},
    "export": set(),
    "tokenizer": {"checks"},
    "calls": {"checks"},
    "writer": {"calls", "checks", "export", "generator", "noise", "tokenizer"},
    "text": {"calls", "checks", "tokenizer", "writer"},
}
TENSORFLOW = {"tensorflow", "tensorflow_text", "sentencepiece"}
READ_TEXT = {"batches", "callbacks", "calls", "data", "export", "sources", "text", "tokenizer", "wordpiece", "writer"}


def imports(tree):
    """The modules that code imports, with whether it does so inside a function."""
    inside = {id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "keras_transformer":
            yield from ((f"keras_transformer.{alias.name}", id(node) in inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module, id(node) in inside


def test_the_table_names_every_module():
    assert set(ARROWS) == set(MODULES) - {"__init__"}


@pytest.mark.parametrize("module", ARROWS)
def test_imports_go_along_the_arrows(module):
    own = {name.split(".")[1] for name, _ in imports(MODULES[module]) if name.startswith("keras_transformer.")}
    assert own <= ARROWS[module]


@pytest.mark.parametrize("module", ARROWS)
def test_tensorflow_is_imported_only_in_functions_of_what_reads_text(module):
    found = [(name, inside) for name, inside in imports(MODULES[module]) if name.split(".")[0] in TENSORFLOW]
    assert all(inside for _, inside in found)
    assert not found or module in READ_TEXT


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.name)
def test_a_file_is_read_in_one_sitting(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 300


def test_all_lists_what_the_root_imports():
    imported = {alias.name for n in ast.walk(MODULES["__init__"]) if isinstance(n, ast.ImportFrom) for alias in n.names}
    assert imported == set(kt.__all__)


@pytest.mark.parametrize("name", [n for n in kt.__all__ if isinstance(getattr(kt, n), type)])
def test_saved_names_are_those_of_the_classes(name):
    cls = getattr(kt, name)
    if issubclass(cls, (keras.layers.Layer, keras.losses.Loss, keras.metrics.Metric)):
        registered = keras.saving.get_registered_name(cls)
        assert registered == f"keras_transformer>{name}"
        assert keras.saving.get_registered_object(registered) is cls


def python(code, **environment):
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environment}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_import_loads_no_tokenizer_and_is_quick():
    code = """
import sys, time, keras
start = time.perf_counter()
import keras_transformer
print(time.perf_counter() - start)
assert not {"tensorflow_text", "sentencepiece"} & set(sys.modules)
"""
    assert min(float(python(code)) for _ in range(2)) < 0.3


def test_layers_work_on_jax_without_tensorflow():
    pytest.importorskip("jax")
    code = """
import sys
sys.modules["tensorflow"] = None
import keras, numpy as np
import keras_transformer as kt
model = kt.build_transformer(vocab_size=10, d_model=8, num_layers=1, num_heads=2, intermediate_dim=8)
found = kt.Generator(model, max_length=3)({"source": np.array([[4, 3]])})
print(found["ids"].shape)
"""
    assert python(code, KERAS_BACKEND="jax").strip() == "(1, 1, 3)"
