"""Strings in, strings out: the same from Python, from a `.keras` file and from a SavedModel without this package."""

import base64
import json
import pathlib
import random
import subprocess
import sys

import keras
import numpy as np
import pytest

import keras_transformer as kt

pytestmark = [
    pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="SavedModels are TensorFlow's"),
    pytest.mark.slow,
]

LETTERS = "abcdefgh"
LONG = LETTERS * 1250  # 10,000 letters
INVALID = [b"\xff\xfe", b"ab\xc3", b"\xe2\x82cd"]

SERVING = """
import base64, json, sys
import tensorflow as tf

folder, requests, calls = sys.argv[1:]
try:
    tf.saved_model.load(folder)
    without_text = ""
except Exception as error:
    without_text = str(error)

import tensorflow_text  # registers the ops of the tokenizers

signatures = tf.saved_model.load(folder).signatures
serve, with_options = signatures["serving_default"], signatures["with_options"]

def spec(tensor):
    return tensor.dtype.name, tensor.shape.as_list()

def strings(texts):
    return tf.constant([base64.b64decode(text) for text in texts], tf.string)

def answer(texts):
    return plain(serve(text=strings(texts)))

def answer_call(text, prefix, **numbers):
    specs = with_options.structured_input_signature[1]
    numbers = {name: tf.constant(value, specs[name].dtype) for name, value in numbers.items()}
    try:
        return plain(with_options(text=strings(text), prefix=strings(prefix), **numbers))
    except tf.errors.InvalidArgumentError as error:
        return str(error)

def plain(found):
    return {
        "text": [base64.b64encode(text).decode() for text in found["text"][:, 0].numpy().tolist()],
        "score": found["score"][:, 0].numpy().tolist(),
        "length": found["length"][:, 0].numpy().tolist(),
    }

with open(calls) as file:
    called = [answer_call(**call) for call in json.load(file)]
with open(requests) as file:
    answers = {name: answer(texts) for name, texts in json.load(file).items()}
args, kwargs = serve.structured_input_signature
print(json.dumps({
    "without_text": without_text,
    "modules": sorted(sys.modules),
    "inputs": [len(args), {name: spec(tensor) for name, tensor in kwargs.items()}],
    "outputs": {name: spec(tensor) for name, tensor in serve.structured_outputs.items()},
    "answers": answers,
    "called": called,
}))
"""


def random_words(count, seed):
    draw = random.Random(seed)
    return ["".join(draw.choices(LETTERS, k=draw.randint(1, 6))) for _ in range(count)]


WORDS = random_words(200, seed=1)
BATCHES = {
    "one": WORDS[:1],
    "three": WORDS[:3],
    "two hundred": WORDS,
    "empty string": [""],
    "invalid bytes": INVALID,
    "too long": [LONG],
    "mixed": [WORDS[0], "", LONG, *INVALID, WORDS[1], LONG + "a", "unseen Ω 🦊", WORDS[2]],
}


NEUTRAL = {
    "max_length": 12,
    "min_length": 0,
    "max_length_ratio": float("inf"),
    "min_length_ratio": 0.0,
    "length_penalty": 0.6,
    "repetition_penalty": 1.0,
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "seed": 0,
}
CALLS = [
    {},
    {"length_penalty": 0.0, "max_length": 3},
    {"min_length": 9, "repetition_penalty": 1.5},
    {"max_length_ratio": 0.5},
    {"min_length_ratio": 1.5},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 2.0, "seed": 6, "top_k": 5},
    {"temperature": 2.0, "seed": 7, "top_p": 0.7, "min_p": 0.05},
    {"prefix": ["h", "ab", "", "cc", "d", "e", "fg"]},
]
WRONG = [
    {"temperature": -1.0},
    {"top_p": 0.0},
    {"min_p": 1.5},
    {"top_k": -1},
    {"max_length": 13},
    {"max_length": 0},
    {"length_penalty": -0.1},
    {"repetition_penalty": 0.0},
]
ASKED = WORDS[:7]


@pytest.fixture(scope="module")
def translator():
    """Learned for some seconds to write words backwards."""
    keras.config.set_dtype_policy("float32")
    keras.utils.set_random_seed(0)
    words = random_words(3000, seed=0)
    tokenizer = kt.Tokenizer.train(words, kind="char")
    batches = kt.pair_batches(
        [(w, w[::-1]) for w in words], tokenizer, tokenizer, tokens_per_batch=1024, max_length=8, buckets=[8]
    )
    model = kt.build_transformer(
        tokenizer.vocab_size, d_model=32, num_layers=1, num_heads=2, intermediate_dim=64, dropout=0.0
    )
    model.compile(keras.optimizers.Adam(1e-2), kt.TokenCrossentropy(), jit_compile=False)
    model.fit(batches, epochs=6, shuffle=False, verbose=0)
    return kt.Translator(model, tokenizer, tokenizer, max_length=12, max_source_length=64)


@pytest.fixture(scope="module")
def saved(translator, tmp_path_factory):
    """A folder with the translator as a `.keras` file and as a SavedModel."""
    folder = tmp_path_factory.mktemp("saved")
    translator.save(folder / "translator.keras")
    translator.export(folder / "translator")
    return folder


@pytest.fixture(scope="module")
def served(saved):
    """What a process says that has TensorFlow and tensorflow-text, and a SavedModel."""
    requests = {name: [base64.b64encode(as_bytes(t)).decode() for t in texts] for name, texts in BATCHES.items()}
    (saved / "requests.json").write_text(json.dumps(requests))
    calls = [{"text": ASKED, "prefix": [""] * len(ASKED), **NEUTRAL, **call} for call in (*CALLS, *WRONG)]
    for call in calls:
        call.update({name: [base64.b64encode(t.encode()).decode() for t in call[name]] for name in ("text", "prefix")})
    (saved / "calls.json").write_text(json.dumps(calls))
    (saved / "serving.py").write_text(SERVING)
    command = [sys.executable, "-I", "serving.py", "translator", "requests.json", "calls.json"]
    run = subprocess.run(command, cwd=saved, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def as_bytes(text):
    return text if isinstance(text, bytes) else text.encode()


def answered(served, name):
    """Lists of texts, scores and lengths."""
    return decoded(served["answers"][name])


def decoded(found):
    texts = [base64.b64decode(text).decode("utf-8", "replace") for text in found["text"]]
    return texts, np.array(found["score"]), np.array(found["length"])


def called(translator, texts):
    """The same of a translator that is called with a tensor."""
    import tensorflow as tf

    found = translator(tf.constant([as_bytes(text) for text in texts]))
    columns = [np.asarray(found[name])[:, 0] for name in ("text", "score", "length")]
    return [text.decode("utf-8", "replace") for text in columns[0].tolist()], *columns[1:]


def test_the_translator_has_learned_something_to_compare(translator):
    right = np.mean([written == word[::-1] for word, written in zip(WORDS, translator(WORDS))])
    assert right > 0.5


def test_serving_needs_neither_this_package_nor_keras_of_it(served):
    assert "tensorflow_text" in served["modules"]
    assert not [name for name in served["modules"] if name.startswith("keras_transformer")]


def test_without_tensorflow_text_loading_names_the_missing_op(served):
    assert "not registered" in served["without_text"] and "entencepiece" in served["without_text"]


@pytest.fixture(scope="module")
def reloaded(saved):
    return keras.models.load_model(saved / "translator.keras")


@pytest.mark.parametrize("batch", BATCHES)
def test_python_the_keras_file_and_the_saved_model_write_the_same(translator, reloaded, served, batch):
    texts, scores, lengths = answered(served, batch)
    assert len(texts) == len(BATCHES[batch])
    for one in (translator, reloaded):
        assert one(BATCHES[batch]) == texts
        other_texts, other_scores, other_lengths = called(one, BATCHES[batch])
        assert other_texts == texts
        np.testing.assert_allclose(other_scores, scores, rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(other_lengths, lengths)


def test_a_batch_answers_each_text_as_if_it_were_alone(served):
    texts, scores, lengths = answered(served, "two hundred")
    for name in ("one", "three"):
        few_texts, few_scores, few_lengths = answered(served, name)
        count = len(few_texts)
        assert few_texts == texts[:count]
        np.testing.assert_allclose(few_scores, scores[:count], rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(few_lengths, lengths[:count])


def test_a_text_that_is_too_long_is_refused_alone(served):
    assert [list(column) for column in answered(served, "too long")] == [[""], [-np.inf], [0]]
    texts, scores, lengths = answered(served, "mixed")
    is_long = np.array([len(text) > 9000 for text in BATCHES["mixed"]])
    assert [text for text, long in zip(texts, is_long) if long] == [""] * 2
    assert np.all(scores[is_long] == -np.inf) and np.all(lengths[is_long] == 0)
    assert np.all(np.isfinite(scores[~is_long])) and np.all(lengths[~is_long] >= 1)
    places = [BATCHES["mixed"].index(word) for word in WORDS[:3]]
    assert [texts[place] for place in places] == answered(served, "three")[0]
    np.testing.assert_allclose(scores[places], answered(served, "three")[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("number", range(len(CALLS)), ids=[", ".join(call) or "nothing" for call in CALLS])
def test_options_act_in_the_saved_model_as_in_python(translator, served, number):
    texts, scores, lengths = decoded(served["called"][number])
    call = CALLS[number]
    assert translator(ASKED, **call) == texts
    outputs = [outputs[0] for outputs in translator.n_best(ASKED, **call)]
    np.testing.assert_allclose([output.score for output in outputs], scores, rtol=1e-4, atol=1e-4)
    assert [len(output.tokens) for output in outputs] == lengths.tolist()
    if "prefix" in call:
        assert all(text.startswith(prefix) for text, prefix in zip(texts, call["prefix"]))
    elif call:
        assert texts != decoded(served["called"][0])[0]


@pytest.mark.parametrize("number", range(len(WRONG)), ids=[str(call) for call in WRONG])
def test_wrong_options_are_refused_in_the_saved_model_and_in_python(translator, served, number):
    (name,) = WRONG[number]
    assert f"`{name}` is out of range" in served["called"][len(CALLS) + number]
    with pytest.raises(ValueError, match=f"`{name}` must be"):
        translator(ASKED, **WRONG[number])


def test_the_signature_is_text_to_text_score_and_length(served):
    assert served["inputs"] == [0, {"text": ["string", [None]]}]
    assert served["outputs"] == {
        "text": ["string", [None, 1]],
        "score": ["float32", [None, 1]],
        "length": ["int32", [None, 1]],
    }


def loaded_answers(folder, texts):
    import tensorflow as tf

    found = tf.saved_model.load(str(folder)).signatures["serving_default"](text=tf.constant(texts))
    return [text.decode() for text in found["text"][:, 0].numpy().tolist()]


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_second_export_replaces_the_folder(translator, tmp_path):
    folder = tmp_path / "deep" / "er" / "model"
    (folder / "variables").mkdir(parents=True)
    for name in ("saved_model.pb", "variables/of the old one", "of the old one"):
        (folder / name).write_text("x")
    translator.export(folder)
    assert {"saved_model.pb", "variables"} <= set(names_in(folder)) and "of the old one" not in names_in(folder)
    assert "of the old one" not in names_in(folder / "variables")
    assert names_in(folder.parent) == ["model"]
    assert loaded_answers(folder, WORDS[:3]) == translator(WORDS[:3])


def test_what_is_no_saved_model_is_not_replaced(translator, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "text").write_text("x")
    for path in (tmp_path / "notes", tmp_path / "notes" / "text"):
        with pytest.raises(ValueError, match="`filepath` must be a new path, an empty folder or a SavedModel"):
            translator.export(path)
    assert names_in(tmp_path) == ["notes"] and names_in(tmp_path / "notes") == ["text"]


def fail_while_writing(monkeypatch):
    def write_out(self, filepath, **options):
        pathlib.Path(filepath).mkdir()
        pathlib.Path(filepath, "half").write_text("x")
        raise OSError("disk full")

    monkeypatch.setattr(type(keras.export.ExportArchive()), "write_out", write_out)


def fail_while_renaming(monkeypatch):
    rename = pathlib.Path.rename

    def rename_but_the_new(self, target):
        if self.name == "new":
            raise OSError("disk full")
        return rename(self, target)

    monkeypatch.setattr(pathlib.Path, "rename", rename_but_the_new)


@pytest.mark.parametrize("fail", [fail_while_writing, fail_while_renaming])
def test_a_failed_export_leaves_the_old_folder_and_nothing_else(translator, saved, tmp_path, monkeypatch, fail):
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(saved / "translator", folder)
    fail(monkeypatch)
    with pytest.raises(OSError, match="disk full"):
        translator.export(folder)
    assert names_in(tmp_path) == ["model"]
    assert loaded_answers(folder, WORDS[:3]) == translator(WORDS[:3])
