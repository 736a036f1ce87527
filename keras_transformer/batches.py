"""Rows of token ids to padded batches, as a stream: optionally packed, shuffled, and gathered by length.

A row is a tuple of int arrays, its sides: source, target and labels, say. TensorFlow is imported where it is used.
"""

import bisect
import logging

import numpy as np

from keras_transformer.checks import check_count

MOST_CHOICES = 1024  # lengths among which those to pad to are chosen: memory and time grow with the square

log = logging.getLogger("keras_transformer")


def padded_batches(read, pads, arrange, tokens_per_batch, max_length, shuffle, seed, buckets, packed=False):
    """Rows to a dataset, as `pair_batches` describes it.

    Args:
        read: function that returns an iterator of lists of rows.
        pads: the id of padding on each side.
        arrange: function from the sides of a batch and a `numpy.random.Generator`, which is the same for the same batch
            of the same epoch, to an element of the dataset.
        tokens_per_batch, max_length, shuffle, seed, buckets, packed: as of `pair_batches`.
    """
    import tensorflow as tf

    chosen, max_length = given_lengths(buckets, max_length)
    if check_count("tokens_per_batch", tokens_per_batch) < max_length:
        raise ValueError(
            f"`tokens_per_batch` must be at least the longest row's length; got {tokens_per_batch} for {max_length}."
        )
    shuffle, seed = check_count("shuffle", shuffle, least=0), check_count("seed", seed, least=0)

    def join(rows):
        return _packed(rows, max_length) if packed else rows

    counts, tokens = _count(read(), join, max_length)
    if chosen is None:
        chosen = [max_length] if packed else best_buckets(counts, int(buckets))
    sizes = [tokens_per_batch // length for length in chosen]
    steps, positions = _plan(counts, chosen, sizes)
    epochs = _Epochs()

    def batches():
        stream = (row for chunk in read() for row in join(_fitting(chunk, max_length)))
        epoch = epochs.take()
        if shuffle:
            stream = _shuffled(stream, shuffle, np.random.default_rng([seed, epoch]))
        for number, (length, batch) in enumerate(_bucketed(stream, chosen, sizes)):
            sides = (_padded(side, length, pad) for side, pad in zip(zip(*batch), pads))
            yield arrange(*sides, np.random.default_rng([seed, epoch, number]))

    example = arrange(*(np.zeros((1, 1), np.int32) for _ in pads), np.random.default_rng(0))
    signature = tf.nest.map_structure(lambda array: tf.TensorSpec([None] * array.ndim, array.dtype), example)
    dataset = tf.data.Dataset.from_generator(batches, output_signature=signature)
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(steps)).prefetch(tf.data.AUTOTUNE)
    dataset.padding = 1 - tokens / (positions * len(pads))
    dataset.set_epoch = epochs.set
    options = {"tokens_per_batch": tokens_per_batch, "lengths": chosen, "shuffle": shuffle, "seed": seed}
    dataset.settings = {**options, "packed": packed}
    log.info("%d batches of %d lengths, %.1f %% padding.", steps, len(chosen), 100 * dataset.padding)
    return dataset


def given_lengths(buckets, max_length):
    """(rising list of the lengths to pad to, or None if `buckets` is their number; the most tokens of a row)."""
    if np.isscalar(buckets) or buckets is None:
        check_count("buckets", buckets)
        return None, check_count("max_length", max_length)
    lengths = sorted(check_count("buckets", length) for length in buckets)
    if not lengths:
        raise ValueError("`buckets` must be the most lengths, or a list of lengths; got an empty one.")
    return lengths, lengths[-1]


def best_buckets(counts, number):
    """The lengths to pad rows to that give the least padding.

    Args:
        counts: int array, how many rows there are of each length from 0.
        number: int, the most lengths.

    Returns:
        Rising list of lengths, the longest row's the last.
    """
    lengths = np.flatnonzero(counts)
    step = -(-len(lengths) // MOST_CHOICES)
    lengths = lengths[::-step][::-1]  # the longest among them
    rows = np.concatenate([[0], np.cumsum(counts)[lengths]])  # rows that are no longer than each
    places, longest = np.arange(len(rows)), np.concatenate([[0], lengths])
    # one[i, j]: positions that the lengths from i up to j take in a bucket of their own
    one = np.where(places[:, None] <= places, (rows - rows[:, None]) * longest, np.inf)
    # cost[i]: positions that the i shortest lengths take, with as many buckets as rounds were made
    cost, choices = np.where(places == 0, 0.0, np.inf), []
    for _ in range(min(number, len(lengths))):
        costs = cost[:, None] + one  # [lengths in earlier buckets, lengths in all]
        choices.append(np.argmin(costs, axis=0))
        cost = np.min(costs, axis=0)
    buckets, place = [], len(lengths)
    for choice in reversed(choices):
        buckets += [int(lengths[place - 1])] if choice[place] < place else []
        place = choice[place]
    return buckets[::-1]


class _Epochs:
    """Counts the passes over the data."""

    def __init__(self):
        self.set(0)

    def set(self, epoch):
        self._next = check_count("epoch", epoch, least=0)

    def take(self):
        self._next += 1
        return self._next - 1


def _longest(row):
    return max(map(len, row))


def _fitting(rows, max_length):
    return [row for row in rows if _longest(row) <= max_length]


def _count(chunks, join, max_length):
    """(how many joined rows there are of each length up to `max_length`, how many tokens on all sides)."""
    counts = np.zeros(max_length + 1, dtype=np.int64)
    tokens = total = dropped = 0
    for chunk in chunks:
        rows = _fitting(chunk, max_length)
        total += len(chunk)
        dropped += len(chunk) - len(rows)
        for row in join(rows):
            counts[_longest(row)] += 1
            tokens += sum(map(len, row))
    if dropped:
        log.warning("%d of %d rows dropped: longer than %d tokens.", dropped, total, max_length)
    if not counts.sum():
        raise ValueError(f"There must be a row of at most {max_length} tokens; got {dropped} longer ones.")
    return counts, tokens


def _plan(counts, buckets, sizes):
    """(number of batches, number of positions in a side of theirs) that `_bucketed` gives."""
    steps = positions = left = 0
    place = np.searchsorted(buckets, np.arange(len(counts)))
    for i, (length, size) in enumerate(zip(buckets, sizes)):
        full, left = divmod(int(counts[place == i].sum()) + left, size)
        steps += full
        positions += full * size * length
    return steps + (left > 0), positions + left * buckets[-1]


def _packed(rows, length):
    """Joins rows into fewer ones of at most `length`, the longest first, each into the first that has room."""
    rows = sorted(rows, key=_longest, reverse=True)
    sizes = np.array([[len(side) for side in row] for row in rows])
    free = np.full_like(sizes, length)
    joined = [[] for _ in rows]
    for row, size in zip(rows, sizes):
        place = np.argmax(np.all(free >= size, axis=1))  # in the end one that is empty
        joined[place].append(row)
        free[place] -= size
    return [tuple(map(np.concatenate, zip(*members))) for members in joined if members]


def _shuffled(stream, size, random):
    """Draws from a buffer of `size` that the stream fills."""
    buffer = []
    for row in stream:
        if len(buffer) < size:
            buffer.append(row)
        else:
            place = random.integers(size)
            yield buffer[place]
            buffer[place] = row
    yield from (buffer[place] for place in random.permutation(len(buffer)))


def _bucketed(stream, buckets, sizes):
    """Gathers rows of like length: (padded length, list of rows) whenever a bucket is full, and what is left."""
    waiting = [[] for _ in buckets]
    for row in stream:
        bucket = bisect.bisect_left(buckets, _longest(row))
        waiting[bucket].append(row)
        if len(waiting[bucket]) == sizes[bucket]:
            yield buckets[bucket], waiting[bucket]
            waiting[bucket] = []
    left = []
    for length, size, rows in zip(buckets, sizes, waiting):
        left += rows
        while len(left) >= size:
            yield length, left[:size]
            left = left[size:]
    if left:
        yield buckets[-1], left


def _padded(side, length, pad):
    """Int arrays -> `[B, length]`, padded behind."""
    padded = np.full((len(side), length), pad, dtype=np.int32)
    for row, ids in zip(padded, side):
        row[: len(ids)] = ids
    return padded
