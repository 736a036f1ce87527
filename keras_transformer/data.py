"""Pairs or texts to batches for `fit`, as a stream.

TensorFlow is imported where it is used. Letters: `B` batch, `S` source tokens, `T` target tokens.
"""

import collections.abc
import itertools

import numpy as np

from keras_transformer.batches import given_lengths, padded_batches

CHUNK = 1024  # texts or pairs that are tokenized in one call, and packed among themselves


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


def pair_batches(
    pairs,
    source_tokenizer,
    target_tokenizer,
    tokens_per_batch=4096,
    max_length=128,
    shuffle=0,
    seed=0,
    buckets=16,
    packed=False,
):
    """Tokenizes pairs of strings and batches pairs of like length, as a `tf.data.Dataset` for `fit`.

    Each batch has about `tokens_per_batch` target positions, padding among them, and one of few lengths, which are
    chosen so that the corpus needs the least padding; what is left of a length at an epoch's end goes on with the next
    longer ones. The stream is read once before, to count: the result knows how many batches it has, the share of
    padding is logged (at level INFO of the logger `"keras_transformer"`), and pairs that are too long are reported (a
    warning of that logger) and dropped. Memory does not grow with the corpus.

    Args:
        pairs: (source, target) strings: a list, or another iterable that can be read again each epoch (`read_tsv`,
            `read_parallel`, `read_records`, `mix`), a function that returns a new iterator, or a `tf.data.Dataset`,
            in the same order each time.
        source_tokenizer: `Tokenizer` of the source.
        target_tokenizer: `Tokenizer` of the target.
        tokens_per_batch: int, rows of a batch times their padded length, at most.
        max_length: int, the most tokens a side, the start or end among them.
        shuffle: int, how many tokenized rows are held to draw from; 0 for the order as it is.
        seed: int of at least 0, of the shuffling, which differs from epoch to epoch and is the same from run to run.
        buckets: int, the most lengths; or a list of the lengths that rows are padded to, the last instead of
            `max_length`.
        packed: bool, whether rows are `max_length` long and hold as many pairs as fit (first-fit decreasing among
            1,024, the same in each epoch), for models built with `packed=True`.

    Returns:
        `tf.data.Dataset` of `({"source": int32 [B, S], "target": int32 [B, T]}, labels int32 [B, T])`: the source with
        the end behind it, the decoder's input with the start before it, and the labels with the end behind them.
        Its attribute `padding` is the share of positions that hold none of these, and `set_epoch(epoch)` makes the next
        pass that of an epoch, from 0 (`Resume` calls it). What `map` or `take` makes of it has neither: give `Resume`
        this one. Packed rows are for models built with `packed=True`: others let the pairs of a row see each other.

    Raises:
        ValueError: if `pairs` can be read only once or nothing is left of them; if `tokens_per_batch` is below
            `max_length`.

    Example:
    ```python
    import keras_transformer as kt
    pairs = [("a b c", "c b a"), ("a b", "b a")]
    tokenizer = kt.Tokenizer.train([source for source, _ in pairs], kind="word")
    (inputs, labels), = kt.pair_batches(pairs, tokenizer, tokenizer, max_length=8)
    assert inputs["source"].shape == inputs["target"].shape == labels.shape == (2, 4)
    (inputs, labels), = kt.pair_batches(pairs, tokenizer, tokenizer, max_length=8, packed=True)
    assert inputs["source"].shape == (1, 8)
    ```
    """

    def tokenize(chunk):
        for pair in chunk:
            if isinstance(pair, (str, bytes, dict)) or len(pair) != 2:
                raise ValueError(f"`pairs` must hold pairs of a source and a target; got {pair!r}.")
        sources, targets = zip(*chunk)
        source = source_tokenizer.tokenize(sources, end=True)
        target = target_tokenizer.tokenize(targets)
        return _split(source, *shift(target, target_tokenizer.start_id, target_tokenizer.end_id))

    def arrange(source, target, labels):
        return {"source": source, "target": target}, labels

    rows = _tokenized("pairs", pairs, tokenize)
    pads = source_tokenizer.pad_id, target_tokenizer.pad_id, target_tokenizer.pad_id
    return padded_batches(rows, pads, arrange, tokens_per_batch, max_length, shuffle, seed, buckets, packed)


def text_batches(texts, tokenizer, tokens_per_batch=4096, max_length=128, shuffle=0, seed=0, buckets=16, packed=False):
    """Tokenizes texts and batches them for a language model: tokens, and the next ones as labels.

    As `pair_batches`; a text longer than `max_length` is cut into pieces, each with a start before it.

    Args:
        texts: strings, in the forms that `pair_batches` takes pairs.
        tokenizer: `Tokenizer`.
        tokens_per_batch, max_length, shuffle, seed, buckets, packed: as of `pair_batches`.

    Returns:
        `tf.data.Dataset` of `(tokens int32 [B, T], labels int32 [B, T])`: a start and the text; the text and an end.
        Attributes as of `pair_batches`.

    Raises:
        ValueError: as `pair_batches`.

    Example:
    ```python
    import keras_transformer as kt
    texts = ["to be or not to be", "that is the question"]
    tokenizer = kt.Tokenizer.train(texts, kind="word")
    (tokens, labels), = kt.text_batches(texts, tokenizer, max_length=4)
    assert tokens.shape == labels.shape == (4, 4)
    ```
    """
    _, length = given_lengths(buckets, max_length)

    def tokenize(chunk):
        for text in chunk:
            if not isinstance(text, (str, bytes)):
                raise ValueError(f"`texts` must hold strings; got {text!r}.")
        for (text,) in _split(tokenizer.tokenize(chunk, end=True)):
            for labels in np.split(text, range(length, len(text), length)):
                yield np.concatenate([[tokenizer.start_id], labels[:-1]]), labels

    def arrange(tokens, labels):
        return tokens, labels

    rows = _tokenized("texts", texts, tokenize)
    pads = tokenizer.pad_id, tokenizer.pad_id
    return padded_batches(rows, pads, arrange, tokens_per_batch, max_length, shuffle, seed, buckets, packed)


def _tokenized(name, items, tokenize):
    """A function that reads the items again, in chunks: an iterator of lists of rows, tuples of id arrays."""
    import tensorflow as tf

    if isinstance(items, tf.data.Dataset):
        items = items.as_numpy_iterator
    elif isinstance(items, str) or not callable(items) and not isinstance(items, collections.abc.Iterable):
        raise ValueError(f"`{name}` must be an iterable or a function that returns an iterator; got {items!r}.")
    elif not callable(items) and iter(items) is items:
        raise ValueError(
            f"`{name}` is read once to count and again in each epoch: it must be a list, another iterable that starts "
            f"anew, or a function that returns an iterator; got {type(items).__name__}."
        )

    def read():
        stream = iter(items() if callable(items) else items)
        while chunk := list(itertools.islice(stream, CHUNK)):
            yield list(tokenize(chunk))

    return read


def _split(*ragged):
    """Ragged tensors `[B, (T)]` -> for each row a tuple of int arrays."""

    def arrays(side):
        values, ends = side.values.numpy(), side.row_splits.numpy()
        return (values[start:end] for start, end in zip(ends, ends[1:]))  # np.split takes thrice the time

    return zip(*map(arrays, ragged))
