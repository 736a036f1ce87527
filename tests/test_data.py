"""Batches of pairs and texts: nothing is lost or doubled, little is padding, shapes are few, and memory stays flat."""

import collections
import itertools
import logging
import pathlib
import re
import textwrap
import tracemalloc

import keras
import numpy as np
import pytest
from fresh import PEAK, run_in_fresh_process
from hypothesis import given, settings
from hypothesis import strategies as st

import keras_transformer as kt
from keras_transformer.batches import best_buckets
from keras_transformer.data import CHUNK

tf = pytest.importorskip("tensorflow")

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


def sides(batch):
    """(source ids, target ids, labels) of a batch of pairs; (tokens, labels) of one of texts."""
    inputs, labels = batch
    return (inputs["source"], inputs["target"], labels) if isinstance(inputs, dict) else (inputs, labels)


def rows(dataset):
    """`sides` of each row, without padding."""
    for batch in dataset.as_numpy_iterator():
        for row in zip(*sides(batch)):
            yield tuple(tuple(int(i) for i in side if i) for side in row)


def unpacked(dataset):
    """(source ids, target ids, labels) of each pair in packed rows, told apart by starts (2) and ends (3)."""
    for source, target, labels in rows(dataset):
        starts = [i for i, token in enumerate(target) if token == 2]
        ends = [[0, *(i + 1 for i, token in enumerate(side) if token == 3)] for side in (source, labels)]
        assert starts == ends[1][:-1] and len(ends[0]) == len(ends[1])
        assert (ends[0][-1], ends[1][-1]) == (len(source), len(labels))
        for s, t in zip(itertools.pairwise(ends[0]), itertools.pairwise(ends[1])):
            yield source[slice(*s)], target[slice(*t)], labels[slice(*t)]


def texts(dataset, tokenizer):
    """The pairs of strings that a dataset's rows came from."""
    return decoded(rows(dataset), tokenizer)


def decoded(rows, tokenizer):
    read = list(rows)
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
@pytest.mark.parametrize("buckets", [2, 5, 16])
def test_batches_keep_the_token_budget_and_few_shapes(tokenizer, tokens_per_batch, buckets):
    batches = kt.pair_batches(word_pairs(300), tokenizer, tokenizer, tokens_per_batch, max_length=16, buckets=buckets)
    lengths = set()
    for inputs, labels in batches.as_numpy_iterator():
        assert inputs["source"].shape == inputs["target"].shape == labels.shape
        assert inputs["source"].dtype == inputs["target"].dtype == labels.dtype == np.int32
        assert labels.size <= tokens_per_batch
        lengths.add(labels.shape[1])
    assert 1 < len(lengths) <= buckets and max(lengths) <= 16


@pytest.mark.parametrize("shuffle", [0, 40])
def test_a_row_goes_into_the_shortest_bucket_that_holds_it_but_for_less_than_a_batch(tokenizer, shuffle):
    batches = kt.pair_batches(word_pairs(300), tokenizer, tokenizer, 64, buckets=[16, 4, 9], shuffle=shuffle)
    promoted = collections.Counter()
    for batch in batches.as_numpy_iterator():
        length = batch[1].shape[1]
        longest = np.max([(ids != 0).sum(1) for ids in sides(batch)], axis=0)
        own = [min(b for b in (4, 9, 16) if b >= row) for row in longest]
        assert length in (4, 9, 16) and max(own) <= length
        promoted.update(b for b in own if b < length)
    assert all(number < 64 // b for b, number in promoted.items())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shuffle", [0, 50])
@pytest.mark.parametrize("number", [1, 7, 300])
def test_all_batches_but_the_last_are_full(tokenizer, number, shuffle, packed):
    batches = kt.pair_batches(
        word_pairs(number), tokenizer, tokenizer, 50, max_length=16, shuffle=shuffle, packed=packed
    )
    *full, last = (labels for _, labels in batches.as_numpy_iterator())
    assert all(len(labels) == 50 // labels.shape[1] for labels in full)
    assert 1 <= len(last) <= 50 // last.shape[1]


def test_padding_is_0_and_stands_behind(tokenizer):
    for inputs, labels in kt.pair_batches(word_pairs(100), tokenizer, tokenizer, 64, max_length=16).as_numpy_iterator():
        for ids in (inputs["source"], inputs["target"], labels):
            real = ids != 0
            np.testing.assert_array_equal(real, np.arange(ids.shape[1]) < real.sum(1, keepdims=True))
        np.testing.assert_array_equal(inputs["target"] != 0, labels != 0)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("pairs", [10, 301])
@pytest.mark.parametrize("shuffle", [0, 50])
def test_cardinality_is_the_number_of_batches(tokenizer, pairs, shuffle, packed):
    batches = kt.pair_batches(
        word_pairs(pairs, 20), tokenizer, tokenizer, 40, max_length=16, shuffle=shuffle, packed=packed
    )
    for _ in range(3):
        assert len(list(batches)) == int(batches.cardinality()) == len(batches)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("number", [1, 301])
@pytest.mark.parametrize("buckets", [1, 16, [7, 12, 16]])
def test_padding_is_the_share_that_is_padding(tokenizer, number, packed, buckets):
    pairs = word_pairs(number, 15)
    made = [
        kt.pair_batches(pairs, tokenizer, tokenizer, 64, 16, shuffle=50, buckets=buckets, packed=packed),
        kt.text_batches([text for text, _ in pairs], tokenizer, 64, 16, shuffle=50, buckets=buckets, packed=packed),
    ]
    for batches in made:
        ids = np.concatenate([side.ravel() for batch in batches.as_numpy_iterator() for side in sides(batch)])
        np.testing.assert_allclose(batches.padding, np.mean(ids == 0), atol=1e-12)


def test_more_buckets_pad_less(tokenizer):
    padding = [
        kt.pair_batches(word_pairs(2000, 30), tokenizer, tokenizer, 64, 32, buckets=buckets).padding
        for buckets in (1, 2, 4, 16)
    ]
    assert sorted(padding, reverse=True) == padding and padding[0] - padding[-1] > 0.1


def test_the_share_of_padding_is_logged(tokenizer, caplog):
    with caplog.at_level(logging.INFO, "keras_transformer"):
        batches = kt.pair_batches([("w1 w2", "w3"), ("w1", "w2")], tokenizer, tokenizer, 64, buckets=[4])
    assert caplog.messages == [f"1 batches of 1 lengths, {100 * batches.padding:.1f} % padding."]
    np.testing.assert_allclose(batches.padding, 1 - 13 / 24)


# ---- packing


@pytest.mark.parametrize("shuffle", [0, 50])
@pytest.mark.parametrize("number", [1, 2, 300, CHUNK + 1])
def test_packed_rows_hold_each_pair_once(tokenizer, number, shuffle):
    pairs = word_pairs(number)
    batches = kt.pair_batches(pairs, tokenizer, tokenizer, 100, max_length=40, shuffle=shuffle, packed=True)
    for _ in range(2):
        read = list(unpacked(batches))
        assert all(target == (2, *labels[:-1]) for _, target, labels in read)
        assert collections.Counter(decoded(read, tokenizer)) == collections.Counter(pairs)
    for batch in batches.as_numpy_iterator():
        assert {ids.shape for ids in sides(batch)} == {(len(batch[1]), 40)} and len(batch[1]) <= 100 // 40


def test_packing_wastes_little(tokenizer):
    pairs = [(text, text) for text, _ in word_pairs(CHUNK, 30)]
    whole, packed = (
        kt.pair_batches(pairs, tokenizer, tokenizer, 256, max_length=64, buckets=1, packed=packed)
        for packed in (False, True)
    )
    assert packed.padding < 0.05 < 0.4 < whole.padding
    # source and target of other lengths leave more, for both must fit
    assert kt.pair_batches(word_pairs(CHUNK, 30), tokenizer, tokenizer, 256, 64, packed=True).padding < 0.15


def test_pairs_that_are_too_long_are_not_packed(tokenizer, caplog):
    pairs = [("w1", "w2"), (" ".join(WORDS[:8]), "w1"), ("w1", " ".join(WORDS[:8])), ("w5", "w3")]
    batches = kt.pair_batches(pairs, tokenizer, tokenizer, 64, max_length=8, packed=True)
    assert caplog.messages == ["2 of 4 rows dropped: longer than 8 tokens."]
    assert sorted(decoded(unpacked(batches), tokenizer)) == sorted([pairs[0], pairs[3]])
    assert len(list(rows(batches))) == 1


@pytest.mark.parametrize("packed", [False, True])
def test_a_whole_chunk_may_be_too_long(tokenizer, packed):
    pairs = [(" ".join(WORDS), "w1")] * CHUNK + [("w1", "w2")]
    batches = kt.pair_batches(pairs, tokenizer, tokenizer, 64, max_length=8, packed=packed)
    assert texts(batches, tokenizer) == [("w1", "w2")]


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


@pytest.mark.parametrize("packed", [False, True])
def test_set_epoch_gives_the_order_of_that_epoch_whatever_was_read_before(tokenizer, packed):
    def make():
        return kt.pair_batches(word_pairs(200), tokenizer, tokenizer, 64, 16, shuffle=50, seed=3, packed=packed)

    uninterrupted = make()
    epochs = [order(uninterrupted) for _ in range(4)]
    assert len(set(map(tuple, epochs))) == 4
    other = make()
    for epoch in (2, 0, 3):
        other.set_epoch(epoch)
        assert order(other) == epochs[epoch]
    assert len(list(other.take(2))) == 2  # of epoch 4
    other.set_epoch(1)
    assert order(other) == epochs[1] and order(other) == epochs[2]
    uninterrupted.set_epoch(0)
    assert order(uninterrupted) == epochs[0]


@pytest.mark.slow
def test_set_epoch_gives_the_same_order_in_a_new_process():
    code = """
        import hashlib, json, sys
        import keras_transformer as kt
        tokenizer = kt.Tokenizer.train([" ".join(map(str, range(100)))], kind="word")
        pairs = [(f"{i % 100} {i % 7}", f"{i % 13}") for i in range(500)]
        batches = kt.pair_batches(pairs, tokenizer, tokenizer, 256, shuffle=100)
        if sys.argv[1] == "resumed":
            batches.set_epoch(1)
        else:
            list(batches)
        digest = hashlib.sha256(b"".join(b.tobytes() for _, b in batches.as_numpy_iterator()))
        print(json.dumps(digest.hexdigest()))
    """
    assert run_in_fresh_process(code, "uninterrupted") == run_in_fresh_process(code, "resumed")


@pytest.mark.parametrize("epoch", [-1, 1.5, None])
def test_only_epochs_can_be_set(tokenizer, epoch):
    batches = kt.pair_batches(word_pairs(3), tokenizer, tokenizer)
    with pytest.raises(ValueError, match="`epoch` must be a whole number of at least 0; got"):
        batches.set_epoch(epoch)


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
        lambda pairs: [list(pair) for pair in pairs],
        lambda pairs: tf.data.Dataset.from_tensor_slices(tuple(map(list, zip(*pairs)))),
        lambda pairs: tf.data.Dataset.from_tensor_slices(pairs),
    ],
    ids=["tuple", "function of iterators", "function of lists", "dict items", "array", "bytes", "lists", "dataset"]
    + ["dataset of string vectors"],
)
def test_pairs_may_be_anything_that_can_be_read_again(tokenizer, make):
    pairs = word_pairs(30)
    expected = order(kt.pair_batches(pairs, tokenizer, tokenizer, 64, max_length=16))
    batches = kt.pair_batches(make(pairs), tokenizer, tokenizer, 64, max_length=16)
    assert order(batches) == order(batches) == expected


@pytest.mark.parametrize(
    "pair",
    [("w1",), ("w1", "w2", "w3"), (), "ab", b"ab", {"en": "w1", "es": "w2"}],
    ids=["one", "three", "none", "string of two letters", "bytes of two letters", "dict of two"],
)
def test_what_is_no_pair_is_refused(tokenizer, pair):
    with pytest.raises(ValueError, match="`pairs` must hold pairs of a source and a target; got "):
        kt.pair_batches([("w1", "w2"), pair], tokenizer, tokenizer)


def test_an_error_of_a_source_is_the_callers(tokenizer, tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text("w1\tw2\nw3\n", encoding="utf-8")
    with pytest.raises(ValueError, match="line 2: a line must have 2 fields between tabs; got 1"):
        kt.pair_batches(kt.read_tsv(path), tokenizer, tokenizer)


def test_a_corpus_that_shrinks_is_an_error(tokenizer):
    pairs = word_pairs(30)
    batches = kt.pair_batches(pairs, tokenizer, tokenizer, 64, max_length=16)
    assert texts(batches, tokenizer)
    del pairs[3:]
    with pytest.raises(tf.errors.FailedPreconditionError, match="expected to contain"):
        list(batches)


@pytest.mark.parametrize("make", [iter, lambda pairs: (pair for pair in pairs), lambda pairs: map(tuple, pairs)])
def test_what_can_be_read_only_once_is_refused(tokenizer, make):
    with pytest.raises(ValueError, match="`pairs` is read once to count and again in each epoch"):
        kt.pair_batches(make(word_pairs(3)), tokenizer, tokenizer)


def test_pairs_that_are_too_long_are_dropped_counted_and_reported(tokenizer, caplog):
    pairs = [("w1", "w2"), (" ".join(WORDS[:8]), "w1"), ("w1", " ".join(WORDS[:8])), (" ".join(WORDS[:7]), "w3")]
    with caplog.at_level(logging.WARNING, "keras_transformer"):
        batches = kt.pair_batches(pairs, tokenizer, tokenizer, 64, max_length=8)
    assert caplog.messages == ["2 of 4 rows dropped: longer than 8 tokens."]
    assert sorted(texts(batches, tokenizer)) == sorted([pairs[0], pairs[3]])
    assert int(batches.cardinality()) == 1


def test_nothing_is_reported_where_nothing_is_dropped(tokenizer, caplog):
    kt.pair_batches(word_pairs(20), tokenizer, tokenizer, 64, max_length=16)
    assert caplog.messages == []


@pytest.mark.parametrize(("pairs", "longer"), [([], 0), ([(" ".join(WORDS), "w1")] * 3, 3)])
def test_nothing_left_is_an_error(tokenizer, pairs, longer):
    with pytest.raises(ValueError, match=f"There must be a row of at most 8 tokens; got {longer} longer ones"):
        kt.pair_batches(pairs, tokenizer, tokenizer, max_length=8)
    with pytest.raises(ValueError, match=f"There must be a row of at most 8 tokens; got {longer} longer ones"):
        kt.pair_batches(pairs, tokenizer, tokenizer, max_length=8, packed=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_length": 0}, "`max_length` must be a whole number"),
        ({"tokens_per_batch": 15, "max_length": 16}, "`tokens_per_batch` must be at least .*; got 15 for 16"),
        ({"tokens_per_batch": 15, "buckets": [4, 16]}, "`tokens_per_batch` must be at least .*; got 15 for 16"),
        ({"shuffle": -1}, "`shuffle` must be a whole number of at least 0; got -1"),
        ({"shuffle": 2.5}, "`shuffle` must be a whole number of at least 0; got 2.5"),
        ({"seed": -1}, "`seed` must be a whole number of at least 0; got -1"),
        ({"buckets": 0}, "`buckets` must be a whole number of at least 1; got 0"),
        ({"buckets": [0, 8]}, "`buckets` must be a whole number of at least 1; got 0"),
        ({"buckets": []}, "`buckets` must be the most lengths, or a list of lengths; got an empty one"),
    ],
)
def test_arguments_out_of_range_are_refused_at_once(tokenizer, arguments, message):
    with pytest.raises(ValueError, match=message):
        kt.pair_batches(word_pairs(3), tokenizer, tokenizer, **arguments)
    with pytest.raises(ValueError, match=message):
        kt.text_batches(WORDS, tokenizer, **arguments)


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


def positions_needed(counts, buckets):
    return sum(count * min(b for b in buckets if b >= length) for length, count in enumerate(counts) if count)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8).filter(any), st.integers(1, 9))
def test_no_other_buckets_need_less(rows_of_length, number):
    counts = np.array([0, *rows_of_length])
    lengths = np.flatnonzero(counts).tolist()
    buckets = best_buckets(counts, number)
    assert buckets == sorted(set(buckets)) and set(buckets) <= set(lengths)
    assert buckets[-1] == lengths[-1] and len(buckets) <= number
    least = min(
        positions_needed(counts, [*chosen, lengths[-1]])
        for some in range(min(number, len(lengths)))
        for chosen in itertools.combinations(lengths[:-1], some)
    )
    assert positions_needed(counts, buckets) == least


def test_as_many_buckets_as_lengths_pad_nothing():
    assert best_buckets(np.array([0, 3, 0, 0, 1, 0, 2, 0]), 16) == [1, 4, 6]


def test_very_many_lengths_cost_little_memory_and_little_more_padding(monkeypatch):
    def positions(buckets, counts):
        return sum(count * buckets[np.searchsorted(buckets, length)] for length, count in enumerate(counts))

    counts = np.random.default_rng(0).integers(0, 50, 3001)
    counts[-1] = 1
    tracemalloc.start()
    buckets = best_buckets(counts, 16)
    megabytes = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    monkeypatch.setattr("keras_transformer.batches.MOST_CHOICES", 3001)
    assert positions(buckets, counts) < 1.001 * positions(best_buckets(counts, 16), counts)
    assert buckets[-1] == 3000 and len(buckets) <= 16 and megabytes < 40


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


# ---- texts for a language model


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shuffle", [0, 50])
@settings(max_examples=10, deadline=None)
@given(lengths=st.lists(st.integers(0, 20), min_size=1, max_size=30), max_length=st.integers(1, 12))
def test_pieces_join_to_the_texts_again(tokenizer, packed, shuffle, lengths, max_length):
    starts = itertools.accumulate(lengths, initial=0)
    corpus = [" ".join(WORDS[(start + i) % 50] for i in range(n)) for start, n in zip(starts, lengths)]
    batches = kt.text_batches(corpus, tokenizer, 24, max_length, shuffle=shuffle, packed=packed)
    pieces = []
    for tokens, labels in rows(batches):
        starts = [i for i, token in enumerate(tokens) if token == 2]
        assert starts[0] == 0 and len(tokens) == len(labels) <= max_length
        for start, stop in itertools.pairwise([*starts, len(tokens)]):
            pieces.append(labels[start:stop])
            assert tokens[start + 1 : stop] == labels[start : stop - 1] and 3 not in labels[start : stop - 1]
    whole = [(*ids, 3) for ids in tokenizer.tokenize(corpus).to_list()]
    cut = [ids[i : i + max_length] for ids in whole for i in range(0, len(ids), max_length)]
    assert collections.Counter(pieces) == collections.Counter(cut)
    if not packed and len({len(piece) for piece in cut}) == 1 and not shuffle:
        assert pieces == cut


def test_pieces_of_one_text_follow_each_other(tokenizer):
    text = " ".join(WORDS)
    batches = kt.text_batches([text], tokenizer, 16, buckets=[8])
    joined = [token for _, labels in rows(batches) for token in labels]
    assert tokenizer.decode([joined]) == [text] and joined[-1] == 3
    assert all(tokens == (2, *labels[:-1]) for tokens, labels in rows(batches))


def test_a_list_of_lengths_says_where_texts_are_cut(tokenizer, caplog):
    for longest in (4, 300):
        batches = kt.text_batches([" ".join(WORDS)] * 6, tokenizer, 400, max_length=128, buckets=[2, longest])
        assert sum(len(labels) for _, labels in rows(batches)) == 6 * 51
        assert max(labels.shape[1] for _, labels in batches) == longest
    assert caplog.messages == []


@pytest.mark.parametrize(
    "make",
    [
        tuple,
        lambda texts: lambda: iter(texts),
        lambda texts: np.array(texts),
        lambda texts: [text.encode() for text in texts],
        lambda texts: tf.data.Dataset.from_tensor_slices(texts),
    ],
    ids=["tuple", "function", "array", "bytes", "dataset"],
)
@pytest.mark.parametrize("packed", [False, True])
def test_texts_may_be_anything_that_can_be_read_again(tokenizer, make, packed):
    corpus = [text for text, _ in word_pairs(30)]
    expected = order(kt.text_batches(corpus, tokenizer, 64, max_length=16, packed=packed))
    batches = kt.text_batches(make(corpus), tokenizer, 64, max_length=16, packed=packed)
    assert order(batches) == order(batches) == expected


@pytest.mark.parametrize("text", [("w1", "w2"), ("w1",), 7, None])
def test_what_is_no_text_is_refused(tokenizer, text):
    with pytest.raises(ValueError, match="`texts` must hold strings; got "):
        kt.text_batches(["w1", text], tokenizer)


def test_texts_that_can_be_read_only_once_are_refused(tokenizer):
    with pytest.raises(ValueError, match="`texts` is read once to count and again in each epoch"):
        kt.text_batches(iter(WORDS), tokenizer)


def test_no_texts_are_an_error(tokenizer):
    with pytest.raises(ValueError, match="There must be a row of at most 128 tokens; got 0 longer ones"):
        kt.text_batches([], tokenizer)


# ---- texts with hidden tokens


def corpus(number, longest=12, seed=0):
    return [text for text, _ in word_pairs(number, longest, seed)]


def masked(tokenizer, corpus, rate=0.15, **options):
    """(tokens, labels, the tokens before any was hidden) of one batch after the other, each padded to 16."""
    batches = kt.masked_batches(corpus, tokenizer, **{"tokens_per_batch": 64, "buckets": [16], "rate": rate, **options})
    tokens, labels = (np.concatenate(side) for side in zip(*batches.as_numpy_iterator()))
    assert tokens.dtype == labels.dtype == np.int32
    return tokens, labels, framed(tokenizer, corpus)


def framed(tokenizer, corpus):
    rows = [[2, *ids, 3] for ids in tokenizer.tokenize(corpus).to_list()]
    return np.array([[*row, *[0] * (16 - len(row))] for row in rows])


@pytest.mark.parametrize("rate", [0.15, 0.5, 1])
def test_the_rate_says_how_many_tokens_are_chosen(tokenizer, rate):
    _, labels, whole = masked(tokenizer, corpus(2000), rate)
    is_word = whole > 3
    np.testing.assert_allclose((labels[is_word] != 0).mean(), rate, atol=0.02 if rate < 1 else 0)


@pytest.mark.parametrize("mask_id", [None, 1, 9])
def test_labels_are_the_tokens_that_were_chosen_and_only_those_change(tokenizer, mask_id):
    tokens, labels, whole = masked(tokenizer, corpus(500), 0.4, mask_id=mask_id)
    is_chosen = labels != 0
    np.testing.assert_array_equal(labels[is_chosen], whole[is_chosen])
    np.testing.assert_array_equal(tokens[~is_chosen], whole[~is_chosen])
    assert not np.any(np.isin(labels[is_chosen], [0, 1, 2, 3, mask_id]))


def test_of_the_chosen_8_in_10_are_hidden_1_is_another_and_1_the_same(tokenizer):
    tokens, labels, _ = masked(tokenizer, corpus(2000), 0.8)
    found, was = tokens[labels != 0], labels[labels != 0]
    assert len(was) > 9000
    np.testing.assert_allclose((found == 1).mean(), 0.8, atol=0.02)
    np.testing.assert_allclose((found == was).mean(), 0.1 + 0.1 / 50, atol=0.015)
    others = found[(found != 1) & (found != was)]
    np.testing.assert_allclose(len(others) / len(was), 0.1 - 0.1 / 50, atol=0.015)
    assert set(others.tolist()) == set(range(4, 54))  # any word, no special token
    assert np.bincount(others).max() < 3 * len(others) / 50


@pytest.mark.parametrize("mask_id", [1, 9])
def test_starts_ends_unknown_words_and_padding_are_never_chosen(tokenizer, mask_id):
    tokens, labels, whole = masked(
        tokenizer, ["w1 zebra w2", "zebra", "", "w3 w4 w5 w6"] * 50, 1, mask_id=mask_id, shuffle=0
    )
    is_special = whole < 4
    assert {0, 1, 2, 3} <= set(whole[is_special].tolist())
    np.testing.assert_array_equal(tokens[is_special], whole[is_special])
    assert np.all(labels[is_special] == 0)


def test_what_stands_for_a_mask_is_no_random_token(tokenizer):
    tokens, labels, whole = masked(tokenizer, corpus(1000), 1, mask_id=9)
    is_own = whole == 9
    assert is_own.any() and np.all(labels[is_own] == 0) and np.all(tokens[is_own] == 9)
    np.testing.assert_allclose((tokens[labels != 0] == 9).mean(), 0.8, atol=0.02)
    assert not np.any(np.isin(tokens[labels != 0], [0, 1, 2, 3]))


@pytest.mark.parametrize("shuffle", [0, 50])
def test_the_choice_is_another_in_each_epoch_and_the_same_from_run_to_run(tokenizer, shuffle):
    def make(seed=3):
        return kt.masked_batches(corpus(100), tokenizer, 64, 16, shuffle=shuffle, seed=seed, rate=0.5)

    def read(batches):
        return [(tokens.tolist(), labels.tolist()) for tokens, labels in batches.as_numpy_iterator()]

    uninterrupted = make()
    epochs = [read(uninterrupted) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    other = make()
    for epoch in (2, 0, 1):
        other.set_epoch(epoch)
        assert read(other) == epochs[epoch]
    assert read(make()) == epochs[0] != read(make(seed=4))


def test_batches_of_one_epoch_choose_differently(tokenizer):
    tokens, labels, _ = masked(tokenizer, ["w1 w2 w3 w4 w5 w6 w7 w8 w9 w10 w11 w12"] * 64, 0.5)
    assert len({tuple(row) for row in (labels != 0).tolist()}) > 60


@pytest.mark.parametrize("max_length", [3, 8])
def test_long_texts_are_cut_into_pieces_with_a_start_and_an_end(tokenizer, caplog, max_length):
    batches = kt.masked_batches([" ".join(WORDS)], tokenizer, 64, buckets=[max_length], rate=1e-9)
    rows = [row[row != 0].tolist() for tokens, _ in batches.as_numpy_iterator() for row in tokens]
    assert all(row[0] == 2 and row[-1] == 3 and len(row) <= max_length for row in rows)
    assert tokenizer.decode([[i for row in rows for i in row[1:-1]]]) == [" ".join(WORDS)]
    assert caplog.messages == []


def test_a_tokenizer_with_bytes_hides_and_replaces_them_too():
    characters = kt.Tokenizer.train(["ab"], kind="char")
    (tokens, labels), *_ = kt.masked_batches(["日本語"] * 20, characters, 4096, rate=1).as_numpy_iterator()
    assert np.all((labels != 0).sum(1) == 9) and np.all((tokens == 1).sum(1) <= 9) and 1 in tokens


@pytest.mark.parametrize(
    ["wrong", "rule"],
    [
        ({"rate": 0}, "`rate` must be above 0 and at most 1; got 0"),
        ({"rate": 1.1}, "`rate` must be above 0 and at most 1; got 1.1"),
        ({"rate": None}, "`rate` must be one number; got None"),
        ({"mask_id": -1}, "`mask_id` must be a whole number of at least 0; got -1"),
        ({"mask_id": 54}, "`mask_id` must be an id of the vocabulary of 54; got 54"),
        ({"max_length": 2}, "`max_length` must be a whole number of at least 3; got 2"),
        ({"buckets": [1, 2]}, "`max_length` must be a whole number of at least 3; got 2"),
        ({"max_length": 0}, "`max_length` must be a whole number of at least"),
        ({"tokens_per_batch": 15, "max_length": 16}, "`tokens_per_batch` must be at least"),
        ({"shuffle": -1}, "`shuffle` must be a whole number of at least 0; got -1"),
        ({"seed": -1}, "`seed` must be a whole number of at least 0; got -1"),
        ({"texts": ["w1", ("w1", 2)]}, "`texts` must hold strings; got ('w1', 2)"),
        ({"texts": "w1"}, "`texts` must be an iterable or a function that returns an iterator; got 'w1'"),
        ({"texts": iter(WORDS)}, "`texts` is read once to count and again in each epoch"),
        ({"texts": []}, "There must be a row of at most 128 tokens; got 0 longer ones"),
    ],
)
def test_what_cannot_be_masked_is_refused(tokenizer, wrong, rule):
    with pytest.raises(ValueError, match=re.escape(rule)):
        kt.masked_batches(**{"texts": WORDS, "tokenizer": tokenizer, **wrong})


# ---- texts with a class


def examples(number, longest=12):
    """Texts, and as their class the number of their first word."""
    return [(text, WORDS.index(text.split()[0])) for text in corpus(number, longest)]


@pytest.mark.parametrize("shuffle", [0, 50])
@pytest.mark.parametrize("buckets", [1, 16, [5, 14]])
@pytest.mark.parametrize("number", [1, 301])
def test_classes_stay_with_their_texts(tokenizer, number, buckets, shuffle):
    given = examples(number)
    batches = kt.labeled_batches(given, tokenizer, 64, 16, shuffle=shuffle, buckets=buckets)
    for _ in range(2):
        read = []
        for tokens, classes in batches.as_numpy_iterator():
            assert tokens.dtype == classes.dtype == np.int32 and classes.shape == (len(tokens),)
            assert np.all(tokens[:, 0] == 2) and np.all((tokens == 3).sum(1) == 1) and tokens.size <= 64
            read += zip(tokenizer.decode(tokens), classes.tolist())
        assert collections.Counter(read) == collections.Counter(given)
    assert len(list(batches)) == int(batches.cardinality())


@pytest.mark.parametrize("number", [1, 301])
@pytest.mark.parametrize("buckets", [1, 16, [7, 14]])
def test_padding_is_the_share_of_tokens_that_are_padding(tokenizer, number, buckets):
    given = examples(number)
    labeled = kt.labeled_batches(given, tokenizer, 64, 14, shuffle=50, buckets=buckets)
    hidden = kt.masked_batches([text for text, _ in given], tokenizer, 64, 14, shuffle=50, buckets=buckets)
    for batches in (labeled, hidden):
        ids = np.concatenate([tokens.ravel() for tokens, _ in batches.as_numpy_iterator()])
        np.testing.assert_allclose(batches.padding, np.mean(ids == 0), atol=1e-12)


def test_examples_that_are_too_long_are_cut(tokenizer):
    given = [("w1", 4), (" ".join(WORDS[:9]), 5), (" ".join(WORDS[:6]), 6)]
    ((tokens, classes),) = kt.labeled_batches(given, tokenizer, 64, max_length=8, buckets=1)
    rows = dict(zip(classes.numpy().tolist(), tokens.numpy().tolist()))
    assert rows[5] == rows[6] == [2, *tokenizer([" ".join(WORDS[:6])]).numpy()[0], 3]
    assert rows[4][2:] == [3, 0, 0, 0, 0, 0]


def test_the_mask_of_the_vocabulary_hides():
    masked = kt.Tokenizer.train(["to be or not to be"] * 9, 300, kind="bpe", user_defined_symbols=["[MASK]"])
    assert masked.mask_id == 4 and masked.tokenize(["[MASK]"]).to_list() == [[4]]
    ((tokens, labels),) = kt.masked_batches(["to be or not to be"] * 20, masked, rate=0.5, buckets=1)
    assert np.mean(tokens.numpy()[labels.numpy() != 0] == 4) > 0.6 and not np.any(labels.numpy() == 4)


@pytest.mark.parametrize(
    "make",
    [
        tuple,
        lambda given: lambda: iter(given),
        lambda given: [[text.encode(), np.int64(number)] for text, number in given],
        lambda given: dict(given).items(),
        lambda given: tf.data.Dataset.from_tensor_slices(tuple(map(list, zip(*given)))),
    ],
    ids=["tuple", "function", "bytes and NumPy numbers", "dict items", "dataset"],
)
def test_examples_may_be_anything_that_can_be_read_again(tokenizer, make):
    given = list(dict(examples(30)).items())

    def read(batches):
        return [(tokens.tolist(), classes.tolist()) for tokens, classes in batches.as_numpy_iterator()]

    batches = kt.labeled_batches(make(given), tokenizer, 64, 16)
    assert read(batches) == read(batches) == read(kt.labeled_batches(given, tokenizer, 64, 16))


def test_an_order_is_that_of_its_seed_and_epoch(tokenizer):
    def make(seed):
        return kt.labeled_batches(examples(200), tokenizer, 64, 16, shuffle=100, seed=seed)

    def read(batches):
        return np.concatenate([classes for _, classes in batches]).tolist()

    batches = make(1)
    first, second = read(batches), read(batches)
    assert first != second and sorted(first) == sorted(second) and first != read(make(2))
    again = make(1)
    again.set_epoch(1)
    assert read(again) == second and first == read(make(1))


@pytest.mark.parametrize(
    ["wrong", "rule"],
    [
        (("w1",), "`examples` must hold pairs of a text and a class; got ('w1',)"),
        (("w1", 1, 2), "`examples` must hold pairs of a text and a class; got ('w1', 1, 2)"),
        ("ab", "`examples` must hold pairs of a text and a class; got 'ab'"),
        ({"text": "w1", "class": 1}, "`examples` must hold pairs of a text and a class; got {"),
        ((1, "w1"), "`class` must be a whole number of at least 0; got 'w1'"),
        ((1, 1), "`texts` must hold strings; got 1"),
        (("w1", -1), "`class` must be a whole number of at least 0; got -1"),
        (("w1", 0.5), "`class` must be a whole number of at least 0; got 0.5"),
        (("w1", None), "`class` must be a whole number of at least 0; got None"),
        (("w1", True), "`class` must be a whole number of at least 0; got True"),
    ],
)
def test_what_is_no_example_is_refused(tokenizer, wrong, rule):
    with pytest.raises(ValueError, match=re.escape(rule)):
        kt.labeled_batches([("w1", 1), wrong], tokenizer)


@pytest.mark.parametrize(
    ["given", "rule"],
    [
        ([], "There must be a row of at most 128 tokens; got 0 longer ones"),
        (iter([("w1", 1)]), "`examples` is read once to count and again in each epoch"),
        (3, "`examples` must be an iterable or a function that returns an iterator; got 3"),
    ],
)
def test_what_holds_no_examples_is_refused(tokenizer, given, rule):
    with pytest.raises(ValueError, match=re.escape(rule)):
        kt.labeled_batches(given, tokenizer)


def test_fit_takes_both_kinds_of_batches(tokenizer):
    sizes = {"d_model": 8, "num_layers": 1, "num_heads": 2, "intermediate_dim": 8}
    given = examples(60)
    for batches, model, loss in (
        (
            kt.labeled_batches(given, tokenizer, 64, 16, shuffle=10),
            kt.build_classifier(tokenizer.vocab_size, 50, **sizes),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        ),
        (
            kt.masked_batches([text for text, _ in given], tokenizer, 64, 16, shuffle=10),
            kt.build_masked_language_model(tokenizer.vocab_size, **sizes),
            kt.TokenCrossentropy(),
        ),
    ):
        model.compile("sgd", loss, jit_compile=False)
        history = model.fit(batches, epochs=2, shuffle=False, verbose=0)
        assert np.all(np.isfinite(history.history["loss"]))
        assert int(model.optimizer.iterations) == 2 * int(batches.cardinality())


# ---- in processes of their own


@pytest.mark.slow
@pytest.mark.skipif(not pathlib.Path("/proc/self/status").exists(), reason="peak memory is Linux's to tell")
def test_memory_does_not_grow_with_the_corpus():
    code = """
        import json
        import keras_transformer as kt
        tokenizer = kt.Tokenizer.train([" ".join(map(str, range(100)))], kind="word")

        def megabytes_after(number):
            batches = kt.pair_batches(
                lambda: ((f"{i % 100} {i % 7}", f"{i % 13}") for i in range(number)), tokenizer, tokenizer, shuffle=1000
            )
            count = sum(int((labels == 3).sum()) for _, labels in batches.as_numpy_iterator())
            assert count == number, count
            return peak()

        print(json.dumps([megabytes_after(20_000), megabytes_after(300_000)]))
    """
    few, many = run_in_fresh_process(PEAK + textwrap.dedent(code))
    assert many - few < 50


@pytest.mark.parametrize(
    "wrong, rule",
    [
        ({"buckets": None}, "`buckets` must be a whole number of at least 1; got None"),
        ({"buckets": 0}, "`buckets` must be a whole number of at least 1; got 0"),
        ({"pairs": None}, "`pairs` must be an iterable or a function that returns an iterator; got None"),
        ({"pairs": "ab"}, "`pairs` must be an iterable or a function that returns an iterator; got 'ab'"),
        ({"pairs": 3}, "`pairs` must be an iterable or a function that returns an iterator; got 3"),
    ],
)
def test_what_is_no_corpus_and_no_number_of_buckets_is_refused(tokenizer, wrong, rule):
    arguments = {"pairs": [("a", "b")], "source_tokenizer": tokenizer, "target_tokenizer": tokenizer, **wrong}
    with pytest.raises(ValueError, match=re.escape(rule)):
        kt.pair_batches(**arguments)
