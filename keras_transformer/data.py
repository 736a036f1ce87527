"""Pairs of strings to batches for `fit`, as a stream: `({"source", "target"}, labels)`.

TensorFlow is imported where it is used. Letters: `B` batch, `S` source tokens, `T` target tokens.
"""

import bisect
import itertools
import logging

import numpy as np

from keras_transformer.checks import check_count

CHUNK = 1024  # pairs that are tokenized in one call

log = logging.getLogger("keras_transformer")


def shift(ids, start_id, end_id):
    """Target tokens -> (decoder input, labels): at each position the label is the token after the input.

    Args:
        ids: ragged int tensor `[B, (T)]`, without start and end.
        start_id: int, put before the decoder input.
        end_id: int, put behind the labels.

    Returns:
        Two ragged int tensors `[B, (T + 1)]`.
    """
    import tensorflow as tf

    edge = tf.fill([ids.nrows(), 1], 1)
    return tf.concat([edge * start_id, ids], axis=1), tf.concat([ids, edge * end_id], axis=1)


def length_buckets(max_length, growth=1.2, least=8):
    """Lengths that rows are padded to: growing geometrically, so that there are few shapes and little padding."""
    lengths = [min(least, max_length)]
    while lengths[-1] < max_length:
        lengths.append(min(max_length, max(lengths[-1] + 2, int(lengths[-1] * growth))))
    return lengths


def pair_batches(
    pairs, source_tokenizer, target_tokenizer, tokens_per_batch=4096, max_length=128, shuffle=0, seed=0, buckets=None
):
    """Tokenizes pairs of strings in a `tf.data` graph and batches pairs of like length, for `fit`.

    Each batch has about `tokens_per_batch` target positions, padding among them, and one of few lengths. The stream is
    read once before, to count: the result knows how many batches it has, and pairs that are too long are reported (a
    warning of the logger `"keras_transformer"`) and dropped. Memory does not grow with the corpus.

    Args:
        pairs: list of (source, target) strings, or another iterable of them that can be read again each epoch, or a
            function that returns a new iterator.
        source_tokenizer: `Tokenizer` of the source.
        target_tokenizer: `Tokenizer` of the target.
        tokens_per_batch: int, rows of a batch times their padded length, at most.
        max_length: int, the most tokens a side, the start or end among them.
        shuffle: int, how many tokenized pairs are held to draw from; 0 for the order as it is.
        seed: int, of the shuffling, which differs from epoch to epoch and is the same from run to run.
        buckets: list of lengths that rows are padded to; None for `length_buckets(max_length)`.

    Returns:
        `tf.data.Dataset` of `({"source": int32 [B, S], "target": int32 [B, T]}, labels int32 [B, T])`: the source with
        the end behind it, the decoder's input with the start before it, and the labels with the end behind them.

    Raises:
        ValueError: if `pairs` can be read only once or nothing is left of them; if `tokens_per_batch` is below
            `max_length`.

    Example:
    ```python
    import keras_transformer as kt
    pairs = [("a b c", "c b a"), ("a b", "b a")]
    tokenizer = kt.Tokenizer.train([source for source, _ in pairs], kind="word")
    (inputs, labels), = kt.pair_batches(pairs, tokenizer, tokenizer, max_length=8)
    assert inputs["source"].shape == inputs["target"].shape == labels.shape == (2, 8)
    ```
    """
    import tensorflow as tf

    buckets = sorted(buckets or length_buckets(check_count("max_length", max_length)))
    if check_count("tokens_per_batch", tokens_per_batch) < buckets[-1]:
        raise ValueError(
            f"`tokens_per_batch` must be at least the longest row's length; got {tokens_per_batch} for {buckets[-1]}."
        )

    shuffle = check_count("shuffle", shuffle, least=0)

    def tokenize(sources, targets):
        source = source_tokenizer.tokenize(sources, end=True)
        target = target_tokenizer.tokenize(targets)
        return source, *shift(target, target_tokenizer.start_id, target_tokenizer.end_id)

    examples = _string_pairs(pairs).map(tokenize, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    rows = [tokens_per_batch // bucket for bucket in buckets]
    steps = _count_batches(examples, buckets, rows)
    pads = source_tokenizer.pad_id, target_tokenizer.pad_id, target_tokenizer.pad_id
    epochs = itertools.count()

    def batches():
        stream = _examples_in_order(examples)
        if shuffle:
            stream = _shuffled(stream, shuffle, np.random.default_rng([seed, next(epochs)]))
        for length, batch in _bucketed(stream, buckets, rows):
            source, target, labels = (_padded(side, length, pad) for side, pad in zip(zip(*batch), pads))
            yield {"source": source, "target": target}, labels

    ids = tf.TensorSpec([None, None], tf.int32)
    signature = {"source": ids, "target": ids}, ids
    dataset = tf.data.Dataset.from_generator(batches, output_signature=signature)
    return dataset.apply(tf.data.experimental.assert_cardinality(steps)).prefetch(tf.data.AUTOTUNE)


def _string_pairs(pairs):
    """A dataset of (sources, targets), string tensors of up to `CHUNK` pairs."""
    import tensorflow as tf

    if iter(pairs if not callable(pairs) else ()) is pairs:
        raise ValueError(
            "`pairs` is read once to count and again in each epoch: it must be a list, another iterable that starts "
            f"anew, or a function that returns an iterator; got {type(pairs).__name__}."
        )

    def chunks():
        stream = iter(pairs() if callable(pairs) else pairs)
        while chunk := list(itertools.islice(stream, CHUNK)):
            yield tuple(zip(*chunk))

    strings = tf.TensorSpec([None], tf.string)
    return tf.data.Dataset.from_generator(chunks, output_signature=(strings, strings))


def _count_batches(examples, buckets, rows):
    """How many batches the buckets give; reports the pairs that fit into none."""
    counts = np.zeros(len(buckets) + 1, dtype=np.int64)
    for source, target, _ in examples:
        lengths = np.maximum(source.row_lengths(), target.row_lengths())
        counts += np.bincount(np.searchsorted(buckets, lengths), minlength=len(counts))
    kept, dropped = counts[:-1], counts[-1]
    if dropped:
        log.warning("%d of %d pairs dropped: longer than %d tokens.", dropped, counts.sum(), buckets[-1])
    if not kept.sum():
        raise ValueError(f"`pairs` must hold a pair of at most {buckets[-1]} tokens; got {dropped} longer ones.")
    return int(np.sum(-(-kept // rows)))


def _examples_in_order(examples):
    """Ragged tensors of chunks -> one tuple of int arrays a pair."""
    for chunk in examples:
        sides = (np.split(side.values.numpy(), side.row_splits.numpy()[1:-1]) for side in chunk)
        yield from zip(*sides)


def _shuffled(stream, size, random):
    """Draws from a buffer of `size` that the stream fills."""
    buffer = []
    for example in stream:
        if len(buffer) < size:
            buffer.append(example)
        else:
            place = random.integers(size)
            yield buffer[place]
            buffer[place] = example
    yield from (buffer[place] for place in random.permutation(len(buffer)))


def _bucketed(stream, buckets, rows):
    """Gathers pairs of like length: (padded length, list of pairs) whenever a bucket is full, and what is left."""
    waiting = [[] for _ in buckets]
    for example in stream:
        bucket = bisect.bisect_left(buckets, max(map(len, example)))
        if bucket == len(buckets):
            continue  # too long, and reported
        waiting[bucket].append(example)
        if len(waiting[bucket]) == rows[bucket]:
            yield buckets[bucket], waiting[bucket]
            waiting[bucket] = []
    yield from ((length, batch) for length, batch in zip(buckets, waiting) if batch)


def _padded(side, length, pad):
    """Int arrays -> `[B, length]`, padded behind."""
    padded = np.full((len(side), length), pad, dtype=np.int32)
    for row, ids in zip(padded, side):
        row[: len(ids)] = ids
    return padded
