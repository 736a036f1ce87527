"""Scores of what is written reach the callbacks behind, and checkpoints are averaged without touching anything else."""

import csv
import os
import re
import sys
import textwrap
import zipfile

import keras
import numpy as np
import pytest
import sacrebleu

import keras_transformer as kt
from keras_transformer.averaging import average_checkpoints
from keras_transformer.callbacks import GenerationScores

IS_TENSORFLOW = keras.backend.backend() == "tensorflow"
tensorflow_only = pytest.mark.skipif(not IS_TENSORFLOW, reason="TensorFlow's own")
SOURCES = ["eins", "zwei", "drei"]
RIGHT = ["the cat sat on the mat .", "a dog ran over the old bridge", "yes"]
SEVERAL = [[RIGHT[0], "the cat was on a mat ."], [RIGHT[1]], ["yes", "yes indeed", ""]]
WRITTEN = ["the cat sat on a mat .", "a dog over the bridge ran", "yes , indeed"]


def callback(outputs=WRITTEN, references=RIGHT, **options):
    return GenerationScores(lambda texts: list(outputs), SOURCES[: len(references)], references, **options)


def scores(outputs, references, metrics):
    logs = {}
    callback(outputs, references, metrics=metrics, prefix="").on_epoch_end(0, logs)
    return logs


def line(optimizer="sgd", loss="mse"):
    """A model of one weight, 0 at first."""
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((1,)), layer])
    model.compile(optimizer, loss, jit_compile=False)
    return model


def rising(**options):
    """A model whose weight is 1 after the first batch, 2 after the second, and so on."""
    return line(keras.optimizers.SGD(1.0, **options), loss=lambda labels, outputs: -outputs)


def fit(model, callbacks, epochs, **options):
    ones = np.ones((4, 1), "float32")
    return model.fit(ones, ones, batch_size=4, epochs=epochs, callbacks=callbacks, verbose=0, **options).history


def weight(model):
    return float(model.get_weights()[0].item())


class Seen(keras.callbacks.Callback):
    """What the callbacks behind a scorer see at each epoch's end."""

    def on_train_begin(self, logs=None):
        self.logs = []

    def on_epoch_end(self, epoch, logs=None):
        self.logs.append(dict(logs))


# ---- the scores


def test_scores_are_those_of_sacrebleu():
    found = scores(WRITTEN, RIGHT, ["bleu", "chrf", "ter"])
    assert found["bleu"] == sacrebleu.corpus_bleu(WRITTEN, [RIGHT]).score
    assert found["chrf"] == sacrebleu.corpus_chrf(WRITTEN, [RIGHT]).score
    assert found["ter"] == sacrebleu.corpus_ter(WRITTEN, [RIGHT]).score
    assert 10 < found["bleu"] < 90 and 10 < found["chrf"] < 90 and 10 < found["ter"] < 90


def test_scores_against_several_references_are_those_of_sacrebleu_with_streams():
    streams = [
        [RIGHT[0], RIGHT[1], "yes"],
        ["the cat was on a mat .", None, "yes indeed"],
        [None, None, ""],
    ]
    found = scores(WRITTEN, SEVERAL, ["bleu", "chrf", "ter"])
    assert found["bleu"] == sacrebleu.corpus_bleu(WRITTEN, streams).score
    assert found["chrf"] == sacrebleu.corpus_chrf(WRITTEN, streams).score
    assert found["ter"] == sacrebleu.corpus_ter(WRITTEN, streams).score
    assert found != scores(WRITTEN, RIGHT, ["bleu", "chrf", "ter"])


def test_a_source_with_fewer_references_is_not_compared_to_an_empty_one():
    few, many = [["a b c d"], ["e f g h"]], [["a b c d", "a b c d"], ["e f g h", "e f g h"]]
    short = ["a b", "e f g h"]  # an empty reference would be as near in length, and excuse the shortness
    uneven = [few[0], many[1]]
    assert scores(short, uneven, ["bleu", "chrf", "ter"]) == scores(short, few, ["bleu", "chrf", "ter"])


@pytest.mark.parametrize("references", [RIGHT, SEVERAL])
def test_right_answers_have_the_best_scores_and_empty_ones_the_worst(references):
    metrics = ["bleu", "chrf", "ter", "exact_match", "edit_rate"]
    best = {"bleu": 100, "chrf": 100, "ter": 0, "exact_match": 1, "edit_rate": 0}
    assert scores(RIGHT, references, metrics) == pytest.approx(best)
    found = scores(["", "", ""], RIGHT, metrics)
    assert found == {"bleu": 0, "chrf": 0, "ter": 100, "exact_match": 0, "edit_rate": 1}


def test_bleu_of_short_outputs_is_0_as_documented_where_chrf_is_not():
    found = scores(["yes", "no sir"], ["yes", "no sir"], ["bleu", "chrf", "exact_match"])
    assert found == pytest.approx({"bleu": 0, "chrf": 100, "exact_match": 1})


def test_many_lines_that_look_tokenized_are_scored_in_silence(caplog):
    lines = ["a small cat sat here ."] * 120
    generate = GenerationScores(lambda texts: lines, lines, lines, metrics=["bleu"])
    generate.on_epoch_end(0, {})
    assert generate.scores["val_bleu"] == pytest.approx(100) and not caplog.records


@pytest.mark.parametrize(
    ("output", "references", "rate"),
    [
        ("a b c", ["a b c"], 0),
        ("a x c", ["a b c d"], 2 / 4),
        ("a b", ["b"], 1),
        ("a b c", ["x y z w v", "a b", "a c d"], 1 / 2),  # the nearest by edits
        ("a b", ["a b x", "b"], 1 / 3),  # the first of two as near
        ("a  b\n", ["a b"], 0),
        ("", [""], 0),
        ("a b", [""], 2),
    ],
)
def test_edit_rate_is_edits_over_tokens_of_the_nearest_reference(output, references, rate):
    assert scores([output], [references], ["edit_rate"]) == {"edit_rate": rate}


def test_edit_rate_of_a_sample_is_its_edits_over_its_tokens():
    found = scores(["a", "a b c d x"], ["b", "a b c d e"], ["edit_rate", "exact_match"])
    assert found == {"edit_rate": 2 / 6, "exact_match": 0}
    assert scores(["a", "b ", "c"], [["x", "a"], "b", "c"], ["exact_match"]) == {"exact_match": pytest.approx(2 / 3)}


# ---- in `fit`


@pytest.mark.parametrize("validated", [False, True])
def test_callbacks_behind_the_history_and_the_file_see_the_scores(tmp_path, validated):
    seen, file = Seen(), tmp_path / "log.csv"
    ones = np.ones((4, 1), "float32")
    model, scorer = line(), callback(metrics=["chrf", "exact_match"])
    callbacks = [scorer, seen, keras.callbacks.CSVLogger(str(file))]
    history = fit(model, callbacks, epochs=2, validation_data=(ones, ones) if validated else None)
    chrf = sacrebleu.corpus_chrf(WRITTEN, [RIGHT]).score
    assert history["val_chrf"] == [chrf] * 2 and history["val_exact_match"] == [0] * 2
    assert [logs["val_chrf"] for logs in seen.logs] == [chrf] * 2
    assert ("val_loss" in seen.logs[0]) == validated and "loss" in seen.logs[0]
    rows = list(csv.DictReader(file.read_text().splitlines()))
    assert [float(row["val_chrf"]) for row in rows] == [chrf] * 2
    assert scorer.scores == {"val_chrf": chrf, "val_exact_match": 0}


def test_the_best_epoch_is_kept_and_training_stops_on_the_score(tmp_path):
    qualities = iter([["x"], ["the cat sat on a mat"], ["the dog sat on a mat"], ["a cat"], ["unreached"]])
    model, path = rising(), str(tmp_path / "best.weights.h5")
    scorer = GenerationScores(lambda texts: next(qualities), ["eins"], ["the cat sat on a mat"])
    monitor = {"monitor": "val_bleu", "mode": "max"}
    best = keras.callbacks.ModelCheckpoint(path, save_best_only=True, save_weights_only=True, **monitor)
    stop = keras.callbacks.EarlyStopping(patience=2, **monitor)
    history = fit(model, [scorer, best, stop], epochs=5)
    assert np.argmax(history["val_bleu"]) == 1 and len(history["val_bleu"]) == 4
    assert weight(model) == 4
    model.load_weights(path)
    assert weight(model) == 2


@pytest.mark.parametrize(("every", "scored"), [(1, [1, 2, 3, 4, 5, 6, 7]), (3, [1, 3, 6]), (9, [1])])
def test_epochs_between_repeat_the_last_scores_and_save_nothing(tmp_path, every, scored):
    model, calls = rising(), []

    def generate(texts):
        calls.append(weight(model))
        return ["right"] * len(calls) + ["wrong"] * (9 - len(calls))

    scorer = GenerationScores(generate, ["s"] * 9, ["right"] * 9, metrics=["exact_match"], every=every)
    pattern = str(tmp_path / "{epoch}-{val_exact_match:.3f}.weights.h5")
    monitor = {"monitor": "val_exact_match", "mode": "max"}
    best = keras.callbacks.ModelCheckpoint(pattern, save_best_only=True, save_weights_only=True, **monitor)
    history = fit(model, [scorer, best], epochs=7)
    assert calls == scored
    expected = [sum(epoch <= now for epoch in scored) / 9 for now in range(1, 8)]
    assert history["val_exact_match"] == expected
    saved = {f"{epoch}-{number / 9:.3f}.weights.h5" for number, epoch in enumerate(scored, 1)}
    assert {path.name for path in tmp_path.iterdir()} == saved


def test_a_second_fit_is_scored_from_its_first_epoch_on():
    model, scorer = rising(), callback(metrics=["chrf"], every=4)
    fit(model, [scorer], epochs=1)
    scorer.generate = lambda texts: RIGHT
    assert fit(model, [scorer], initial_epoch=1, epochs=2)["val_chrf"] == pytest.approx([100])


@pytest.mark.parametrize(
    ("order", "swap_on_epoch", "expected"),
    [
        (["swap", "scores"], True, [1, 1.5, 2.25]),  # the average: half of the old one, half of the weight
        (["scores", "swap"], True, [1, 2, 3]),
        (["swap", "scores"], False, [1, 2, 3]),
    ],
)
@pytest.mark.parametrize("validated", [False, True])
def test_scores_are_of_the_averaged_weights_behind_the_swap(tmp_path, order, swap_on_epoch, expected, validated):
    model, seen, ones = rising(use_ema=True, ema_momentum=0.5), [], np.ones((4, 1), "float32")
    scorer = GenerationScores(lambda texts: seen.append(weight(model)) or texts, ["a"], ["a"], metrics=["exact_match"])
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=swap_on_epoch)
    save = keras.callbacks.ModelCheckpoint(str(tmp_path / "{epoch}.weights.h5"), save_weights_only=True)
    callbacks = {"swap": swap, "scores": scorer}
    fit(model, [*map(callbacks.get, order), save], epochs=3, validation_data=(ones, ones) if validated else None)
    assert seen == expected
    assert weight(model) == 2.25  # the average is what training leaves
    model.load_weights(tmp_path / "2.weights.h5")
    assert weight(model) == (1.5 if swap_on_epoch else 2)


@pytest.mark.parametrize(("restore", "left"), [(False, 3), (True, 1.5)])
def test_a_fit_that_stops_early_leaves_the_plain_weights_unless_the_best_are_restored(restore, left):
    model, written = rising(use_ema=True, ema_momentum=0.5), iter([["x"], ["a"], ["x"]])
    scorer = GenerationScores(lambda texts: next(written), ["a"], ["a"], metrics=["exact_match"])
    monitor = {"monitor": "val_exact_match", "mode": "max"}
    stop = keras.callbacks.EarlyStopping(patience=1, restore_best_weights=restore, **monitor)
    fit(model, [keras.callbacks.SwapEMAWeights(swap_on_epoch=True), scorer, stop], epochs=9)
    assert weight(model) == left


@pytest.mark.slow
def test_a_generator_writes_with_the_weights_of_the_epoch(tmp_path):
    model = kt.build_transformer(12, d_model=16, num_layers=1, num_heads=2, intermediate_dim=16, dropout=0.1)
    model.compile(keras.optimizers.Adam(0.1), kt.TokenCrossentropy(), jit_compile=False)
    sources = ["4 5 6", "7 8 9", "10 11 4"]
    ids = {"source": np.array([[int(word) for word in text.split()] + [3] for text in sources])}

    def write(generator):
        return [" ".join(map(str, row)) for row in np.array(generator(ids)["ids"])[:, 0].tolist()]

    generator, outputs = kt.Generator(model, max_length=4), []
    scorer = GenerationScores(lambda texts: outputs.append(write(generator)) or outputs[-1], sources, sources)
    save = keras.callbacks.ModelCheckpoint(str(tmp_path / "{epoch}.weights.h5"), save_weights_only=True)
    target = np.repeat(ids["source"], 8, axis=0)
    inputs = {"source": target, "target": np.pad(target[:, :-1], ((0, 0), (1, 0)), constant_values=2)}
    model.fit(inputs, target, batch_size=12, epochs=2, callbacks=[scorer, save], verbose=0)
    assert len(outputs) == 2 and outputs[0] != outputs[1]
    other = keras.models.clone_model(model)
    generator = kt.Generator(other, max_length=4)
    for epoch, written in enumerate(outputs, 1):
        other.load_weights(tmp_path / f"{epoch}.weights.h5")
        assert write(generator) == written


@pytest.mark.slow
@tensorflow_only
def test_a_translator_is_scored_as_it_is():
    tokenizer = kt.Tokenizer.train(["a b c d e"], kind="word")
    model = kt.build_transformer(tokenizer.vocab_size, d_model=8, num_layers=1, num_heads=2, intermediate_dim=8)
    translator = kt.Translator(model, tokenizer, tokenizer, max_length=6, width=1)
    logs, sources = {}, ["a b", "", "c d e"]
    scorer = GenerationScores(translator, sources, translator(sources), metrics=["exact_match"])
    scorer.on_epoch_end(0, logs)
    assert logs == {"val_exact_match": 1}


# ---- the examples


@pytest.mark.parametrize("samples", [0, 2, 9])
def test_the_first_examples_are_kept(samples):
    scorer = callback(references=SEVERAL, samples=samples)
    scorer.on_epoch_end(0)
    assert scorer.examples == list(zip(SOURCES, WRITTEN, SEVERAL))[:samples]


def events(folder):
    """(step, tag, plugin, class of data, value) of all summaries in a directory."""
    import tensorflow as tf

    for path in sorted(folder.iterdir()):
        for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
            event = tf.compat.v1.Event.FromString(record)
            for value in event.summary.value:
                kind = value.metadata
                yield (
                    event.step,
                    value.tag,
                    kind.plugin_data.plugin_name,
                    kind.data_class,
                    tf.make_ndarray(value.tensor),
                )


@tensorflow_only
def test_tensorboard_finds_scores_and_examples(tmp_path):
    outputs = iter([WRITTEN, RIGHT])
    scorer = GenerationScores(lambda texts: next(outputs), ["*a*\n# b", "", "c"], SEVERAL, samples=2, log_dir=tmp_path)
    fit(line(), [scorer], epochs=2)
    found = {(step, tag): (plugin, kind, value) for step, tag, plugin, kind, value in events(tmp_path)}
    assert set(found) == {(step, f"val_{tag}") for step in (0, 1) for tag in ("bleu", "chrf", "examples")}
    assert found[1, "val_bleu"][:2] == ("scalars", 1)
    np.testing.assert_allclose(
        [found[step, "val_chrf"][2] for step in (0, 1)], [scores(WRITTEN, SEVERAL, ["chrf"])["chrf"], 100]
    )
    plugin, kind, table = found[0, "val_examples"]
    assert (plugin, kind, table.shape) == ("text", 2, (3, 3))
    cells = [[cell.decode() for cell in row] for row in table]
    assert cells[0] == ["source", "output", "references"]
    assert cells[1] == ["    *a*\n    # b", f"    {WRITTEN[0]}", "\n".join(f"    {text}" for text in SEVERAL[0])]
    assert cells[2][2] == f"    {RIGHT[1]}"


@tensorflow_only
def test_without_samples_the_scores_alone_are_written(tmp_path):
    scorer, found = callback(samples=0, log_dir=str(tmp_path), prefix="dev/"), []
    look = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: found.append(list(events(tmp_path))))
    fit(line(), [scorer, look], epochs=2)
    assert {tag for _, tag, *_ in found[0]} == {"dev/bleu", "dev/chrf"}  # they are there while training goes on
    assert len(found[1]) == len(list(events(tmp_path))) == 4


# ---- refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"generate": "model"}, "`generate` must be a function from a list of strings to another; got 'model'"),
        ({"sources": []}, r"`sources` must be a list of at least one string; got \[\]"),
        ({"sources": "eins"}, "`sources` must be a list of at least one string; got 'eins'"),
        ({"sources": [b"a", b"b", b"c"]}, r"`sources` must be a list of at least one string; got \[b'a'"),
        ({"references": RIGHT[:2]}, "`references` must be a list of 3, a string or .* each source; got .* of length 2"),
        ({"references": "yes"}, "`references` must be a list of 3, .*; got 'yes' of length 3"),
        ({"references": [*RIGHT[:2], []]}, r"`references` must be a list of at least one string; got \[\]"),
        ({"references": [*RIGHT[:2], None]}, "`references` must be .*; got None"),
        ({"metrics": ["bleu", "rouge"]}, r"`metrics` must be a list of some of \['bleu', .*; got \['bleu', 'rouge'\]"),
        ({"metrics": "bleu"}, "`metrics` must be a list of some of .*; got 'bleu'"),
        ({"metrics": []}, r"`metrics` must be a list of some of .*; got \[\]"),
        ({"samples": -1}, "`samples` must be a whole number of at least 0; got -1"),
        ({"every": 0}, "`every` must be a whole number of at least 1; got 0"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, message):
    arguments = {"generate": list, "sources": SOURCES, "references": RIGHT, **change}
    with pytest.raises(ValueError, match=message):
        GenerationScores(**arguments)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (RIGHT[:2], r"`generate` must return 3 strings for 3; got 2: \['the cat"),
        ([], r"got 0: \[\]"),
        ("yes", "got 0: 'yes'"),
        ([b"a", "b", "c"], r"got 0: \[b'a'"),
        (None, "got 0: None"),
    ],
)
def test_a_generate_that_returns_something_else_is_refused(outputs, message):
    scorer = GenerationScores(lambda texts: outputs, SOURCES, RIGHT)
    with pytest.raises(ValueError, match=message):
        scorer.on_epoch_end(0, {})


@pytest.mark.parametrize(
    ("options", "package"),
    [
        ({"metrics": ["ter"]}, "sacrebleu"),
        ({"metrics": ["edit_rate"]}, "rapidfuzz"),
        ({"metrics": ["exact_match"], "log_dir": "logs"}, "tensorflow"),
    ],
)
def test_a_missing_package_is_named_before_training(monkeypatch, options, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f"need {package}: pip install {package}"):
        callback(**options)
    assert callback(metrics=["exact_match"]).metrics == ["exact_match"]


# ---- the mean of checkpoints


def tied_transformer(**options):
    """A compiled model, its optimizer built as training does it."""
    sizes = {"d_model": 8, "num_layers": 1, "num_heads": 2, "intermediate_dim": 8, **options}
    model = kt.build_transformer(12, **sizes)
    model.compile("adam", kt.TokenCrossentropy(), jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    return model


def train(model, rng):
    """What training does to a file's variables: the model's and the optimizer's are others."""
    for variable in [*model.weights, *model.optimizer.variables]:
        variable.assign(variable + keras.ops.cast(rng.integers(1, 9, variable.shape) / 7, variable.dtype))


def values(variables):
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]


def assert_all_equal(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        np.testing.assert_array_equal(one, other)


@pytest.fixture
def checkpoints(tmp_path, rng):
    """A model, and three of its checkpoints: (model, their paths, their weights)."""
    model, weights = tied_transformer(), []
    train(model, rng)
    paths = [tmp_path / name for name in ("1.weights.h5", "2.keras", "3.weights.h5")]
    for path in paths:
        train(model, rng)
        model.save(path) if path.suffix == ".keras" else model.save_weights(path)
        weights.append(model.get_weights())
    train(model, rng)
    return model, paths, weights


def test_the_mean_of_three_files_is_the_mean_of_their_weights(checkpoints):
    model, paths, weights = checkpoints
    average_checkpoints(model, paths)
    means = [np.mean(np.array(three, "float64"), axis=0).astype("float32") for three in zip(*weights)]
    assert_all_equal(model.get_weights(), means)
    assert any(np.any(mean != last) for mean, last in zip(means, weights[-1]))


def test_one_file_gives_that_file_and_the_order_of_many_does_not_matter(checkpoints):
    model, paths, weights = checkpoints
    for path, expected in zip(paths, weights):
        average_checkpoints(model, [str(path)])
        assert_all_equal(model.get_weights(), expected)
    average_checkpoints(model, paths)
    forward = model.get_weights()
    average_checkpoints(model, paths[::-1])
    for one, other in zip(model.get_weights(), forward):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", [".weights.h5", ".keras"])
def test_the_optimizer_and_the_seeds_are_left_as_they_are(tmp_path, rng, kind):
    model = tied_transformer()
    path = tmp_path / f"model{kind}"
    train(model, rng)
    model.save(path) if kind == ".keras" else model.save_weights(path)
    train(model, rng)
    seeds = [variable for variable in model.variables if "seed" in variable.path]
    before = values(model.optimizer.variables), values(seeds)
    average_checkpoints(model, [path])
    assert len(before[0]) > 2 and len(before[1]) > 2
    assert_all_equal(values(model.optimizer.variables), before[0])
    assert_all_equal(values(seeds), before[1])


def test_a_model_that_is_not_compiled_takes_the_checkpoints_of_one_that_is(checkpoints):
    _, paths, weights = checkpoints
    model = kt.build_transformer(12, d_model=8, num_layers=1, num_heads=2, intermediate_dim=8)
    average_checkpoints(model, paths[-1:])
    assert_all_equal(model.get_weights(), weights[-1])


def test_the_embedding_stays_tied(checkpoints):
    model, paths, _ = checkpoints
    average_checkpoints(model, paths)
    other = tied_transformer()
    other.set_weights(model.get_weights())
    ids = {"source": np.array([[4, 5]]), "target": np.array([[2, 4]])}
    assert sum("embedding" in variable.path for variable in model.weights) == 1
    np.testing.assert_array_equal(other(ids), model(ids))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "mixed_bfloat16"])
def test_variables_keep_their_dtype(tmp_path, dtype):
    keras.config.set_dtype_policy(dtype)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    paths = [tmp_path / f"{value}.weights.h5" for value in (1, 2, 6)]
    for path, value in zip(paths, (1, 2, 6)):
        model.set_weights([np.full((1, 1), value)])
        model.save_weights(path)
    average_checkpoints(model, paths)
    (variable,) = model.weights
    assert variable.dtype == ("float32" if dtype.startswith("mixed") else dtype)
    assert float(keras.ops.convert_to_numpy(variable).item()) == 3


def test_the_sum_is_taken_in_float64(tmp_path):
    model = line()
    numbers = [2.0**24, 1.0, 1.0, -(2.0**24)]  # a float32 sum would lose the ones
    paths = [tmp_path / f"{place}.weights.h5" for place in range(4)]
    for path, value in zip(paths, numbers):
        model.set_weights([np.full((1, 1), value)])
        model.save_weights(path)
    average_checkpoints(model, paths)
    assert weight(model) == 0.5


class Counter(keras.layers.Layer):
    def build(self, shape):
        self.count = self.add_weight(dtype="int32", initializer="zeros", trainable=False)

    def call(self, x):
        return x


def test_whole_numbers_are_taken_from_the_last_file(tmp_path):
    model = keras.Sequential([keras.Input((1,)), Counter(), keras.layers.Dense(1, use_bias=False)])
    paths = [tmp_path / f"{value}.weights.h5" for value in (1, 2, 9)]
    for path, value in zip(paths, (1, 2, 9)):
        model.set_weights([np.array(value), np.full((1, 1), value)])
        model.save_weights(path)
    average_checkpoints(model, paths)
    assert [array.item() for array in model.get_weights()] == [9, 4]


def stack(*sizes):
    model = keras.Sequential([keras.Input((2,)), *map(keras.layers.Dense, sizes)])
    model.compile("adam", "mse", jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    return model


FILES = {
    "none.weights.h5": lambda path: None,
    "text.weights.h5": lambda path: path.write_text("no weights"),
    "text.keras": lambda path: path.write_text("no model"),
    "empty.keras": lambda path: zipfile.ZipFile(path, "w").close(),
    "cut.weights.h5": lambda path: (stack(3, 4).save_weights(path), os.truncate(path, path.stat().st_size // 2)),
    "wide.weights.h5": lambda path: stack(3, 5).save_weights(path),
    "wide.keras": lambda path: stack(3, 5).save(path),
    "few.weights.h5": lambda path: stack(3).save_weights(path),
    "many.weights.h5": lambda path: stack(3, 4, 5).save_weights(path),
    "many.keras": lambda path: stack(3, 4, 5).save(path),
}


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("none.weights.h5", FileNotFoundError, "`paths` must be files that exist; got "),
        ("text.weights.h5", ValueError, "`paths` must be files of weights that Keras wrote; got "),
        ("text.keras", ValueError, "`paths` must be files of weights that Keras wrote; got "),
        ("empty.keras", ValueError, "`paths` must be files of weights that Keras wrote; got "),
        ("cut.weights.h5", ValueError, "`paths` must be files of weights that Keras wrote; got .*truncated"),
        ("wide.weights.h5", ValueError, r"`paths` must be checkpoints of this model; got .* is \(3, 5\), not \(3, 4\)"),
        ("wide.keras", ValueError, r"the shape of layers/dense_1/vars/0 is \(3, 5\), not \(3, 4\)"),
        ("few.weights.h5", ValueError, r"the shape of layers/dense_1/vars/0 is None, not \(3, 4\)"),
        ("many.weights.h5", ValueError, r"the shape of layers/dense_2/vars/0 is \(4, 5\), not None"),
        ("many.keras", ValueError, r"the shape of layers/dense_2/vars/0 is \(4, 5\), not None"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_and_the_model_is_untouched(tmp_path, rng, name, error, message):
    model, fitting = stack(3, 4), tmp_path / "fitting.weights.h5"
    model.save_weights(fitting)
    FILES[name](tmp_path / name)
    train(model, rng)
    before = values([*model.variables, *model.optimizer.variables])
    with pytest.raises(error, match=message) as raised:
        average_checkpoints(model, [fitting, tmp_path / name])
    assert name in str(raised.value)
    assert_all_equal(values([*model.variables, *model.optimizer.variables]), before)


@pytest.mark.parametrize("paths", [[], "model.weights.h5", ["model.h5"], ["1.weights.h5", "2.txt"]])
def test_paths_must_be_a_list_of_files_of_a_known_kind(paths):
    message = f"`paths` must be a list of at least one `.weights.h5` or `.keras` file; got {paths!r}"
    with pytest.raises(ValueError, match=re.escape(message)):
        average_checkpoints(line(), paths)


@pytest.mark.parametrize("public", [GenerationScores, average_checkpoints])
def test_the_example_runs_by_itself(monkeypatch, public):
    monkeypatch.setattr(kt, public.__name__, public, raising=False)
    (block,) = re.findall(r"^ *```python\n(.*?)^ *```", public.__doc__, re.DOTALL | re.MULTILINE)
    exec(compile(textwrap.dedent(block), public.__name__, "exec"), {"__name__": "example"})
