"""Pairs or texts to batches for `fit`, as a stream.

TensorFlow is imported where it is used. Letters: `B` batch, `S` source tokens, `T` target tokens.
"""

import collections.abc
import itertools

import numpy as np

from keras_transformer.batches import given_lengths, padded_batches
from keras_transformer.checks import check_count, check_range
from keras_transformer.tokenizer import framed

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
    return framed(ids, start_id), framed(ids, end_id=end_id)


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

    def arrange(source, target, labels, random):
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
        for (text,) in _split(tokenizer.tokenize(_strings(chunk), end=True)):
            for labels in np.split(text, range(length, len(text), length)):
                yield np.concatenate([[tokenizer.start_id], labels[:-1]]), labels

    def arrange(tokens, labels, random):
        return tokens, labels

    rows = _tokenized("texts", texts, tokenize)
    pads = tokenizer.pad_id, tokenizer.pad_id
    return padded_batches(rows, pads, arrange, tokens_per_batch, max_length, shuffle, seed, buckets, packed)


def masked_batches(
    texts,
    tokenizer,
    tokens_per_batch=4096,
    max_length=128,
    shuffle=0,
    seed=0,
    buckets=16,
    rate=0.15,
    mask_id=None,
):
    """Tokenizes texts and hides some tokens, for a masked language model to fill in.

    Devlin et al. 2018, "BERT", https://arxiv.org/abs/1810.04805, section 3.1: of the tokens, `rate` are chosen; in
    their place stands the mask (80 %), a random token (10 %) or the token itself (10 %). The choice is another in each
    epoch and the same from run to run. Starts, ends and unknown tokens are never chosen.

    Args:
        texts, tokenizer, tokens_per_batch, max_length, shuffle, seed, buckets: as of `text_batches`; a longer text is
            cut into pieces of `max_length - 2` tokens.
        rate: float in (0, 1], the share of tokens that is chosen.
        mask_id: int, what stands for a hidden token; None for the tokenizer's `mask_id`: its `"[MASK]"` or, if it has
            none, its unknown token.

    Returns:
        `tf.data.Dataset` of `(tokens int32 [B, T], labels int32 [B, T])`: a start, the text and an end, some tokens
        replaced; and the chosen tokens as they were, padding elsewhere. Attributes as of `pair_batches`. To validate on
        the same hidden tokens in each epoch, `cache()` it.

    Raises:
        ValueError: as `text_batches`; on a rate out of range or a `mask_id` outside the vocabulary.

    Example:
    ```python
    import keras_transformer as kt
    texts = ["to be or not to be", "that is the question"]
    tokenizer = kt.Tokenizer.train(texts, 300)
    (tokens, labels), = kt.masked_batches(texts, tokenizer, max_length=32, rate=0.5)
    assert tokens.shape == labels.shape and 1 in tokens.numpy()
    ```
    """
    rate = check_range("rate", rate, 0, most=1, above=True)
    mask_id = check_count("mask_id", tokenizer.mask_id if mask_id is None else mask_id, least=0)
    if mask_id >= tokenizer.vocab_size:
        raise ValueError(f"`mask_id` must be an id of the vocabulary of {tokenizer.vocab_size}; got {mask_id}.")
    special = [tokenizer.pad_id, tokenizer.unknown_id, tokenizer.start_id, tokenizer.end_id, mask_id]
    others = np.setdiff1d(np.arange(tokenizer.vocab_size, dtype=np.int32), special)

    def arrange(tokens, labels, random):
        chosen = ~np.isin(tokens, special) & (random.random(tokens.shape) < rate)
        fate = random.random(tokens.shape)
        tokens = np.where(chosen & (fate < 0.8), np.int32(mask_id), tokens)
        tokens = np.where(chosen & (fate >= 0.8) & (fate < 0.9), random.choice(others, tokens.shape), tokens)
        return tokens, np.where(chosen, labels, np.int32(tokenizer.pad_id))

    _, length = given_lengths(buckets, max_length)
    check_count("max_length", length, least=3)  # a start, a token and an end

    def tokenize(chunk):
        return ((ids, ids) for ids in _framed(chunk, tokenizer, length))

    rows = _tokenized("texts", texts, tokenize)
    pads = tokenizer.pad_id, tokenizer.pad_id
    return padded_batches(rows, pads, arrange, tokens_per_batch, max_length, shuffle, seed, buckets)


def labeled_batches(examples, tokenizer, tokens_per_batch=4096, max_length=128, shuffle=0, seed=0, buckets=16):
    """Tokenizes texts that have a class each and batches texts of like length, for a classifier.

    Args:
        examples: pairs of a string and an int, the number of its class, in the forms that `pair_batches` takes pairs.
        tokenizer, tokens_per_batch, max_length, shuffle, seed, buckets: as of `text_batches`; of a longer text the
            first `max_length - 1` tokens and the end are taken.

    Returns:
        `tf.data.Dataset` of `(tokens int32 [B, T], classes int32 [B])`: a start, the text and an end. Attributes as of
        `pair_batches`.

    Raises:
        ValueError: as `text_batches`; on classes that are not ints of at least 0.

    Example:
    ```python
    import keras_transformer as kt
    examples = [("to be or not to be", 0), ("that is the question", 1)]
    tokenizer = kt.Tokenizer.train([text for text, _ in examples], 300)
    (tokens, classes), = kt.labeled_batches(examples, tokenizer, max_length=32)
    assert tokens.shape[0] == 2 and sorted(classes.numpy()) == [0, 1]
    ```
    """
    _, length = given_lengths(buckets, max_length)

    def tokenize(chunk):
        for example in chunk:
            if isinstance(example, (str, bytes, dict)) or len(example) != 2:
                raise ValueError(f"`examples` must hold pairs of a text and a class; got {example!r}.")
            check_count("class", example[1], least=0)
        texts, classes = zip(*chunk)
        whole = _framed(texts, tokenizer)
        rows = (ids if len(ids) <= length else np.append(ids[: length - 1], tokenizer.end_id) for ids in whole)
        # the class at each token: it takes as much room as the text, so that the share of padding is the text's
        return ((ids, np.full(len(ids), number, np.int32)) for ids, number in zip(rows, classes))

    def arrange(tokens, classes, random):
        return tokens, classes[:, 0]

    rows = _tokenized("examples", examples, tokenize)
    return padded_batches(rows, (tokenizer.pad_id, 0), arrange, tokens_per_batch, max_length, shuffle, seed, buckets)


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


def _strings(texts):
    for text in texts:
        if not isinstance(text, (str, bytes)):
            raise ValueError(f"`texts` must hold strings; got {text!r}.")
    return texts


def _framed(texts, tokenizer, length=None):
    """Arrays of a start, a text's tokens and an end; texts that would be longer than `length` in pieces."""
    for (text,) in _split(tokenizer.tokenize(_strings(texts))):
        for piece in np.split(text, range(length - 2, len(text), length - 2)) if length else [text]:
            yield np.concatenate([[tokenizer.start_id], piece, [tokenizer.end_id]])


def _split(*ragged):
    """Ragged tensors `[B, (T)]` -> for each row a tuple of int arrays."""

    def arrays(side):
        values, ends = side.values.numpy(), side.row_splits.numpy()
        return (values[start:end] for start, end in zip(ends, ends[1:]))  # np.split takes thrice the time

    return zip(*map(arrays, ragged))
