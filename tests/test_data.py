"""Batches of pairs: nothing is lost or doubled, shapes are few, and memory stays flat."""

import collections
import json
import logging
import os
import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import keras_transformer as kt
from keras_transformer.data import CHUNK, length_buckets

WORDS = [f"w{i}" for i in range(50)]


@pytest.fixture(scope="module")
def tokenizer():
    return kt.Tokenizer.train([" ".join(WORDS)], kind="word")


def word_pairs(number, longest=12, seed=0):
    """Pairs of 1 to `longest` words; the first word of the source is its number's, so that pairs differ."""
    random = np.random.default_rng(seed)

    def text():
        return " ".join(random.choice(WORDS, random.integers(1, longest + 1)))

    return [(text(), text()) for _ in range(number)]


def rows(dataset):
    """(source ids, target ids, labels) of each row, without padding."""
    for inputs, labels in dataset.as_numpy_iterator():
        for row in zip(inputs["source"], inputs["target"], labels):
            yield tuple(tuple(int(i) for i in side if i) for side in row)


def texts(dataset, tokenizer):
    """The pairs of strings that a dataset's rows came from."""
    read = list(rows(dataset))
    sources, targets = (tokenizer.decode(padded([row[side] for row in read])) for side in (0, 2))
    return list(zip(sources, targets))


def padded(lists):
    array = np.zeros((len(lists), max(map(len, lists))), "int32")
    for row, ids in zip(array, lists):
        row[: len(ids)] = ids
    return array


# ---- what is in a batch


def test_labels_are_the_inputs_one_to_the_left_with_start_and_end(tokenizer):
    pairs = word_pairs(40)
    for source, target, labels in rows(kt.pair_batches(pairs, tokenizer, tokenizer, 64, max_length=16)):
        assert target[0] == tokenizer.start_id and labels[-1] == tokenizer.end_id and source[-1] == tokenizer.end_id
        assert target[1:] == labels[:-1]
        assert tokenizer.end_id not in target + labels[:-1] + source[:-1]


@pytest.mark.parametrize(
    ("number", "shuffle"), [(1, 0), (5, 7), (300, 7), (300, 1000), (2 * CHUNK + 1, 0), (2 * CHUNK + 1, 7)]
)
def test_every_pair_appears_once_an_epoch(tokenizer, shuffle, number):
    pairs = word_pairs(number)
    batches = kt.pair_batches(pairs, tokenizer, tokenizer, 256, max_length=16, shuffle=shuffle)
    for _ in range(2):
        assert collections.Counter(texts(batches, tokenizer)) == collections.Counter(pairs)


@pytest.mark.parametrize("tokens_per_batch", [16, 50, 1000])
def test_batches_keep_the_token_budget_and_their_shapes_are_buckets(tokenizer, tokens_per_batch):
    batches = kt.pair_batches(word_pairs(300), tokenizer, tokenizer, tokens_per_batch, max_length=16)
    lengths = set()
    for inputs, labels in batches.as_numpy_iterator():
        assert inputs["source"].shape == inputs["target"].shape == labels.shape
        assert inputs["source"].dtype == inputs["target"].dtype == labels.dtype == np.int32
        assert labels.size <= tokens_per_batch
        lengths.add(labels.shape[1])
    assert lengths <= set(length_buckets(16)) and len(lengths) > 1


def test_a_row_goes_into_the_shortest_bucket_that_holds_it(tokenizer):
    batches = kt.pair_batches(word_pairs(300), tokenizer, tokenizer, 64, buckets=[16, 4, 9])
    for inputs, labels in batches.as_numpy_iterator():
        length = labels.shape[1]
        shorter = max([b for b in (4, 9) if b < length], default=0)
        longest = np.maximum((inputs["source"] != 0).sum(1), (labels != 0).sum(1))
        assert length in (4, 9, 16) and np.all(longest > shorter) and np.all(longest <= length)


def test_padding_is_0_and_stands_behind(tokenizer):
    for inputs, labels in kt.pair_batches(word_pairs(100), tokenizer, tokenizer, 64, max_length=16).as_numpy_iterator():
        for ids in (inputs["source"], inputs["target"], labels):
            real = ids != 0
            np.testing.assert_array_equal(real, np.arange(ids.shape[1]) < real.sum(1, keepdims=True))
        np.testing.assert_array_equal(inputs["target"] != 0, labels != 0)


@pytest.mark.parametrize("pairs", [10, 301])
@pytest.mark.parametrize("shuffle", [0, 50])
def test_cardinality_is_the_number_of_batches(tokenizer, pairs, shuffle):
    batches = kt.pair_batches(word_pairs(pairs, 20), tokenizer, tokenizer, 40, max_length=16, shuffle=shuffle)
    for _ in range(2):
        assert len(list(batches)) == int(batches.cardinality()) == len(batches)


# ---- order


def order(batches):
    return list(rows(batches))


def test_without_shuffling_the_order_stays(tokenizer):
    pairs = word_pairs(200)
    batches = kt.pair_batches(pairs, tokenizer, tokenizer, 64, max_length=16)
    assert order(batches) == order(batches)
    one_bucket = kt.pair_batches(pairs, tokenizer, tokenizer, 64, buckets=[16])
    assert texts(one_bucket, tokenizer) == pairs


def test_a_seed_gives_one_order_that_differs_from_epoch_to_epoch(tokenizer):
    def two_epochs(seed):
        batches = kt.pair_batches(word_pairs(200), tokenizer, tokenizer, 64, max_length=16, shuffle=100, seed=seed)
        return order(batches), order(batches)

    (first, second), again, other = two_epochs(1), two_epochs(1), two_epochs(2)
    assert (first, second) == again
    assert first != second and first != other[0] and second != other[1]
    assert sorted(first) == sorted(second) == sorted(other[0])


def test_a_large_buffer_mixes_the_whole_corpus(tokenizer):
    batches = kt.pair_batches(word_pairs(500), tokenizer, tokenizer, 64, buckets=[16], shuffle=500)
    places = {pair: place for place, pair in enumerate(word_pairs(500))}
    found = [places[pair] for pair in texts(batches, tokenizer)]
    assert np.mean(found[:100]) > 150 and np.mean(found[-100:]) < 350


# ---- what may come in


@pytest.mark.parametrize(
    "make",
    [
        lambda pairs: tuple(pairs),
        lambda pairs: lambda: iter(pairs),
        lambda pairs: lambda: pairs,
        lambda pairs: dict(pairs).items(),
        lambda pairs: np.array(pairs, dtype=object),
        lambda pairs: [(source.encode(), target.encode()) for source, target in pairs],
    ],
    ids=["tuple", "function of iterators", "function of lists", "dict items", "array", "bytes"],
)
def test_pairs_may_be_anything_that_can_be_read_again(tokenizer, make):
    pairs = word_pairs(30)
    expected = order(kt.pair_batches(pairs, tokenizer, tokenizer, 64, max_length=16))
    batches = kt.pair_batches(make(pairs), tokenizer, tokenizer, 64, max_length=16)
    assert order(batches) == order(batches) == expected


@pytest.mark.parametrize("make", [iter, lambda pairs: (pair for pair in pairs), lambda pairs: map(tuple, pairs)])
def test_what_can_be_read_only_once_is_refused(tokenizer, make):
    with pytest.raises(ValueError, match="`pairs` is read once to count and again in each epoch"):
        kt.pair_batches(make(word_pairs(3)), tokenizer, tokenizer)


def test_pairs_that_are_too_long_are_dropped_counted_and_reported(tokenizer, caplog):
    pairs = [("w1", "w2"), (" ".join(WORDS[:8]), "w1"), ("w1", " ".join(WORDS[:8])), (" ".join(WORDS[:7]), "w3")]
    with caplog.at_level(logging.WARNING, "keras_transformer"):
        batches = kt.pair_batches(pairs, tokenizer, tokenizer, 64, max_length=8)
    assert caplog.messages == ["2 of 4 pairs dropped: longer than 8 tokens."]
    assert sorted(texts(batches, tokenizer)) == sorted([pairs[0], pairs[3]])
    assert int(batches.cardinality()) == 1


def test_nothing_is_reported_where_nothing_is_dropped(tokenizer, caplog):
    kt.pair_batches(word_pairs(20), tokenizer, tokenizer, 64, max_length=16)
    assert caplog.messages == []


@pytest.mark.parametrize(("pairs", "longer"), [([], 0), ([(" ".join(WORDS), "w1")] * 3, 3)])
def test_nothing_left_is_an_error(tokenizer, pairs, longer):
    with pytest.raises(ValueError, match=f"`pairs` must hold a pair of at most 8 tokens; got {longer} longer ones"):
        kt.pair_batches(pairs, tokenizer, tokenizer, max_length=8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_length": 0}, "`max_length` must be a whole number"),
        ({"tokens_per_batch": 15, "max_length": 16}, "`tokens_per_batch` must be at least .*; got 15 for 16"),
        ({"tokens_per_batch": 15, "buckets": [4, 16]}, "`tokens_per_batch` must be at least .*; got 15 for 16"),
        ({"shuffle": -1}, "`shuffle` must be a whole number of at least 0; got -1"),
        ({"shuffle": 2.5}, "`shuffle` must be a whole number of at least 0; got 2.5"),
    ],
)
def test_arguments_out_of_range_are_refused_at_once(tokenizer, arguments, message):
    with pytest.raises(ValueError, match=message):
        kt.pair_batches(word_pairs(3), tokenizer, tokenizer, **arguments)


STRANGE = [
    ("", ""),
    ("a", ""),
    ("", "b"),
    (" a  b ", "\n\t"),
    ("nul\0", "\0"),
    ("日本語", "🙂"),
    ("</s>", "<pad>"),
]


def test_empty_and_strange_strings_survive():
    characters = kt.Tokenizer.train(["ab"], kind="char")
    assert sorted(texts(kt.pair_batches(STRANGE, characters, characters, 64, buckets=[32]), characters)) == sorted(
        STRANGE
    )


def test_bytes_that_are_not_utf8_become_replacement_characters():
    characters = kt.Tokenizer.train(["ab"], kind="char")
    batches = kt.pair_batches([(b"a\xff", b"\xc3("), ("a", "b")], characters, characters, 64, buckets=[16])
    assert texts(batches, characters) == [("a�", "�("), ("a", "b")]


# ---- buckets


@given(st.integers(1, 2000), st.floats(1.01, 3.0), st.integers(1, 64))
def test_buckets_rise_to_max_length_and_by_no_more_than_the_growth(max_length, growth, least):
    lengths = length_buckets(max_length, growth, least)
    assert lengths == sorted(set(lengths)) and lengths[-1] == max_length and lengths[0] == min(least, max_length)
    assert all(b <= max(a + 2, a * growth) for a, b in zip(lengths, lengths[1:]))


def test_buckets_are_few():
    assert length_buckets(128) == [8, 10, 12, 14, 16, 19, 22, 26, 31, 37, 44, 52, 62, 74, 88, 105, 126, 128]
    assert length_buckets(5) == [5]


# ---- in training


def small_model(vocab_size):
    source, target = (keras.Input((None,), dtype="int32", name=name) for name in ("source", "target"))
    embedding = kt.TokenEmbedding(vocab_size, 8)
    x = keras.layers.GlobalAveragePooling1D()(embedding(source))
    y = keras.layers.Add()([embedding(target), keras.layers.Reshape((1, 8))(x)])
    return keras.Model({"source": source, "target": target}, embedding(y, reverse=True))


def fit_and_count_traces(tokenizer, batches, epochs):
    traces = []

    @keras.saving.register_keras_serializable("keras_transformer_tests")
    class Counting(kt.TokenCrossentropy):
        def __call__(self, *args, **kwargs):
            traces.append(1)
            return super().__call__(*args, **kwargs)

    model = small_model(tokenizer.vocab_size)
    model.compile("sgd", Counting(), metrics=[kt.TokenLoss()], jit_compile=False)
    history = model.fit(batches, epochs=epochs, shuffle=False, verbose=0)
    assert len(history.history["token_loss"]) == epochs
    return len(traces)


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="JAX compiles for each shape")
def test_fit_traces_once_whatever_the_number_of_lengths(tokenizer):
    many = kt.pair_batches(word_pairs(100), tokenizer, tokenizer, 64, max_length=16, shuffle=10)
    one = kt.pair_batches(word_pairs(100), tokenizer, tokenizer, 64, buckets=[16])
    assert len({labels.shape for _, labels in many}) > 3
    assert fit_and_count_traces(tokenizer, many, 3) == fit_and_count_traces(tokenizer, one, 1)


def test_fit_and_evaluate_see_all_batches_in_each_epoch(tokenizer):
    batches = kt.pair_batches(word_pairs(100), tokenizer, tokenizer, 64, max_length=16, shuffle=10)
    model = small_model(tokenizer.vocab_size)
    model.compile("sgd", kt.TokenCrossentropy(), metrics=[kt.TokenLoss()], jit_compile=False)
    model.fit(batches, epochs=2, shuffle=False, validation_data=batches, verbose=0)
    assert int(model.optimizer.iterations) == 2 * int(batches.cardinality())
    found = model.evaluate(batches, verbose=0, return_dict=True)["token_loss"]
    whole = kt.pair_batches(word_pairs(100), tokenizer, tokenizer, 16 * 100, buckets=[16])
    np.testing.assert_allclose(model.evaluate(whole, verbose=0, return_dict=True)["token_loss"], found, rtol=1e-5)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus():
    code = """
        import json, resource
        import keras_transformer as kt
        tokenizer = kt.Tokenizer.train([" ".join(map(str, range(100)))], kind="word")

        def megabytes_after(number):
            batches = kt.pair_batches(
                lambda: ((f"{i % 100} {i % 7}", f"{i % 13}") for i in range(number)), tokenizer, tokenizer, shuffle=1000
            )
            count = sum(int((labels == 3).sum()) for _, labels in batches.as_numpy_iterator())
            assert count == number, count
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

        print(json.dumps([megabytes_after(20_000), megabytes_after(300_000)]))
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    few, many = json.loads(done.stdout.splitlines()[-1])
    assert many - few < 50
