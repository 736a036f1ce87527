"""The SavedModel gives what Python gives, in a process that knows nothing of this package, and is written whole."""

import json
import os
import pathlib
import random
import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest

import keras_transformer as kt
from keras_transformer.export import write_saved_model

if keras.backend.backend() != "tensorflow":
    pytest.skip("a SavedModel is TensorFlow's", allow_module_level=True)

import tensorflow as tf

BATCHES = [
    ["abc"],
    ["a", "cab", "dd"],
    ["abcd", "", "a b", "ddddddd", "b", "ca", "é", "abcabc", "badc", "</s>", "a\0b"],
    ["a" * 10_000, "ab"],
    [],
]


@pytest.fixture(scope="module")
def translator():
    """Some seconds of training to write letters backwards."""
    keras.utils.set_random_seed(0)
    letters = random.Random(0)
    words = ["".join(letters.choices("abcd", k=letters.randint(1, 3))) for _ in range(3000)]
    tokenizer = kt.Tokenizer.train(words, kind="char")
    batches = kt.pair_batches([(w, w[::-1]) for w in words], tokenizer, tokenizer, 256, max_length=8, shuffle=3000)
    model = kt.build_transformer(
        tokenizer.vocab_size, d_model=32, num_layers=1, num_heads=4, intermediate_dim=64, dropout=0.0
    )
    model.compile(keras.optimizers.Adam(5e-3), kt.TokenCrossentropy(), jit_compile=False)
    model.fit(batches, epochs=3, shuffle=False, verbose=0)
    translator = kt.Translator(model, tokenizer, tokenizer, max_length=9, max_source_length=12)
    assert translator(["abc", "da"]) == ["cba", "ad"]
    return translator


@pytest.fixture(scope="module")
def saved_model(translator, tmp_path_factory):
    path = tmp_path_factory.mktemp("export") / "deep" / "folder" / "translator"
    translator.export(path)
    return path


def in_fresh_process(code, path):
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), str(path)],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=300,
        cwd=path,
    )


SERVE = """
    import json, sys
    import tensorflow as tf
    import tensorflow_text
    serve = tf.saved_model.load(sys.argv[1]).signatures["serving_default"]

    def answer(texts):
        found = serve(text=tf.constant(texts, tf.string))
        found = {name: value.numpy()[:, 0].tolist() for name, value in found.items()}
        return {**found, "text": [text.decode() for text in found["text"]]}

    batches = json.load(open(sys.argv[1] + "/../batches.json"))
    inputs, outputs = serve.structured_input_signature[1], serve.structured_outputs
    result = {
        "answers": [answer(texts) for texts in [*batches, [b"a\\xffb", b"\\xc3"]]],
        "inputs": {name: [spec.dtype.name, spec.shape.as_list()] for name, spec in inputs.items()},
        "outputs": {name: spec.dtype.name for name, spec in outputs.items()},
        "modules": [name for name in ("keras_transformer", "sentencepiece") if name in sys.modules],
    }
    print(json.dumps(result))
"""


def answers(translator, texts):
    found = translator(tf.constant(texts, tf.string))
    return {
        "text": [text.decode() for text in found["text"].numpy()[:, 0]],
        "score": found["score"].numpy()[:, 0].tolist(),
        "length": found["length"].numpy()[:, 0].tolist(),
    }


def assert_same_answers(found, expected):
    assert found["text"] == expected["text"]
    assert found["length"] == expected["length"]
    np.testing.assert_allclose(found["score"], expected["score"], rtol=1e-4, atol=1e-5)


def test_a_process_with_tensorflow_and_tensorflow_text_alone_gives_pythons_answers(translator, saved_model):
    (saved_model.parent / "batches.json").write_text(json.dumps(BATCHES))
    done = in_fresh_process(SERVE, saved_model)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])

    assert result["modules"] == []
    assert result["inputs"] == {"text": ["string", [None]]}
    assert result["outputs"] == {"text": "string", "score": "float32", "length": "int32"}

    translator.save(saved_model.parent / "translator.keras")
    reloaded = keras.models.load_model(saved_model.parent / "translator.keras")
    for texts, found in zip([*BATCHES, [b"a\xffb", b"\xc3"]], result["answers"]):
        assert_same_answers(found, answers(translator, texts))
        assert_same_answers(found, answers(reloaded, texts))
        assert found["text"] == translator(texts) == reloaded(texts)
    assert result["answers"][3]["text"][0] == "" and result["answers"][3]["length"][0] == 0
    assert result["answers"][3]["score"][0] == -np.inf and result["answers"][3]["text"][1] == "ba"
    assert result["answers"][1]["text"][:2] == ["a", "bac"]


def test_without_tensorflow_text_loading_fails_as_the_documents_say(saved_model):
    done = in_fresh_process("import sys, tensorflow as tf; tf.saved_model.load(sys.argv[1])", saved_model)
    assert done.returncode != 0 and "Op type not registered 'Sentencepiece" in done.stderr
    assert "tensorflow_text" in kt.Translator.export.__doc__
    readme = pathlib.Path(__file__).parents[1] / "README.md"
    assert "import tensorflow_text" in readme.read_text(encoding="utf-8")


def test_shapes_are_one_answer_a_row(saved_model):
    serve = tf.saved_model.load(str(saved_model)).signatures["serving_default"]
    found = serve(text=tf.constant(["a", "b", "c"]))
    assert {name: (value.dtype, tuple(value.shape)) for name, value in found.items()} == {
        "text": (tf.string, (3, 1)),
        "score": (tf.float32, (3, 1)),
        "length": (tf.int32, (3, 1)),
    }


def test_a_loaded_model_survives_a_new_seed(translator, saved_model):
    serve = tf.saved_model.load(str(saved_model)).signatures["serving_default"]
    keras.utils.set_random_seed(5)
    found = serve(text=tf.constant(["abc", "da"]))
    assert found["text"][:, 0].numpy().tolist() == [b"cba", b"ad"]
    assert translator(["abc", "da"]) == ["cba", "ad"]


# ---- files


class Scaled(keras.layers.Layer):
    """A small thing to export, whose value tells which one was written."""

    def __init__(self, factor):
        super().__init__()
        self.factor = self.add_weight(shape=(), initializer=keras.initializers.Constant(factor))
        self.built = True

    def call(self, x):
        return x * self.factor


def write(path, factor):
    layer = Scaled(factor)
    write_saved_model(path, layer, {"serving_default": (layer.call, [tf.TensorSpec([None], tf.float32, name="x")])})


def value(path):
    return float(tf.saved_model.load(str(path)).signatures["serving_default"](x=tf.constant([1.0]))["output_0"][0])


def contents(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_writing_again_replaces_what_was_there_and_leaves_nothing_else(tmp_path):
    for factor in (2.0, 3.0):
        write(tmp_path / "model", factor)
        assert value(tmp_path / "model") == factor
        assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_path_may_be_a_string_and_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("model", 2.0)
    assert value("model") == 2.0 and os.listdir() == ["model"]


def test_an_empty_folder_is_written_into(tmp_path):
    (tmp_path / "model").mkdir()
    write(tmp_path / "model", 2.0)
    assert value(tmp_path / "model") == 2.0


@pytest.mark.parametrize("stage", ["before", "half"])
def test_a_failed_write_leaves_the_old_one_whole_and_nothing_else(tmp_path, monkeypatch, stage):
    write(tmp_path / "model", 2.0)
    before = contents(tmp_path)

    def fail(archive, path, **options):
        if stage == "half":
            pathlib.Path(path).mkdir()
            pathlib.Path(path, "saved_model.pb").write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(type(keras.export.ExportArchive()), "write_out", fail)
    with pytest.raises(OSError, match="disk full"):
        write(tmp_path / "model", 3.0)
    assert contents(tmp_path) == before
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    monkeypatch.undo()
    assert value(tmp_path / "model") == 2.0


@pytest.mark.parametrize(
    "make", [lambda path: path.write_text("mine"), lambda path: path.mkdir() or (path / "a").touch()]
)
def test_what_is_no_savedmodel_is_not_replaced(tmp_path, make):
    make(tmp_path / "model")
    before = contents(tmp_path)
    with pytest.raises(ValueError, match="must be a new path, an empty folder or a SavedModel.*model"):
        write(tmp_path / "model", 3.0)
    assert contents(tmp_path) == before


# ---- other ways to export


@pytest.mark.parametrize("way", ["module", "archive"])
def test_a_generator_exports_from_ids_to_ids(translator, way, tmp_path):
    generate = kt.Generator(translator.model, max_length=6)
    spec = tf.TensorSpec([None, None], tf.int32, name="source")

    def from_ids(source):
        return generate({"source": source})

    if way == "module":
        module = tf.Module()
        module.model = translator.model
        tf.saved_model.save(module, str(tmp_path), {"serving_default": tf.function(from_ids, input_signature=[spec])})
    else:
        archive = keras.export.ExportArchive()
        archive.track(translator.model)
        archive.add_endpoint("serving_default", from_ids, input_signature=[spec])
        archive.write_out(str(tmp_path), verbose=False)
    serve = tf.saved_model.load(str(tmp_path)).signatures["serving_default"]
    for texts in (["abc"], ["a", "cab", "", "dd"], ["abcdabcd"] * 9):
        source = translator.source_tokenizer.tokenize(texts, end=True).to_tensor()
        found, expected = serve(source=source), generate({"source": source})
        np.testing.assert_array_equal(found["ids"], expected["ids"])
        np.testing.assert_array_equal(found["length"], expected["length"])
        np.testing.assert_allclose(found["score"], expected["score"], rtol=1e-4, atol=1e-5)


def test_the_model_itself_exports_with_the_names_of_its_inputs(translator, tmp_path):
    translator.model.export(tmp_path / "model", verbose=False)
    serve = tf.saved_model.load(str(tmp_path / "model")).signatures["serving_default"]
    assert set(serve.structured_input_signature[1]) == {"source", "target"}
    inputs = {"source": tf.constant([[4, 5, 3], [6, 3, 0]]), "target": tf.constant([[2, 5], [2, 6]])}
    (found,) = serve(**inputs).values()
    np.testing.assert_allclose(found, translator.model(inputs), atol=1e-4)
