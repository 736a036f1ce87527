"""Corpora on disk as iterables of texts or pairs that can be read again: what `pair_batches` and `text_batches` take.

Nothing is kept in memory. TensorFlow is imported where it is used. Files whose names end in `.gz` are decompressed.
"""

import gzip
import heapq
import itertools
import os
import pathlib

import numpy as np

from keras_transformer.checks import check_count, check_range


class Corpus:
    """Iterates over what `read()` yields, from the start each time."""

    def __init__(self, read):
        self._read = read

    def __iter__(self):
        return iter(self._read())


def read_lines(path):
    """The lines of a UTF-8 text file, without their ends.

    Args:
        path: str or path.

    Returns:
        Iterable of strings, read anew each time.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: while it is read, if a line is not UTF-8.

    Example:
    ```python
    import pathlib, tempfile
    import keras_transformer as kt
    path = pathlib.Path(tempfile.mkdtemp(), "texts.txt")
    path.write_text("to be\\nor not to be\\n", encoding="utf-8")
    assert list(kt.read_lines(path)) == ["to be", "or not to be"]
    ```
    """
    path = _file(path)

    def read():
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                line = line.removesuffix(b"\n").removesuffix(b"\r")
                try:
                    yield line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise ValueError(f"{path}, line {number}: a line must be UTF-8; got {line[:80]!r}.") from error

    return Corpus(read)


def read_tsv(path, columns=(0, 1)):
    """Columns of a file of tab-separated lines, such as `source TAB target`. Quotes have no meaning.

    Args:
        path: str or path.
        columns: the numbers of the columns, from 0, an int or several. One column gives texts, more give tuples. All
            lines must have as many columns as the first.

    Returns:
        Iterable of strings or of tuples of strings, read anew each time.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: while it is read, if a line has too few columns or another number than the first.

    Example:
    ```python
    import pathlib, tempfile
    import keras_transformer as kt
    path = pathlib.Path(tempfile.mkdtemp(), "pairs.tsv")
    path.write_text("one\\tuno\\ntwo\\tdos\\n", encoding="utf-8")
    assert list(kt.read_tsv(path)) == [("one", "uno"), ("two", "dos")]
    ```
    """
    lines = read_lines(path)
    columns = (columns,) if np.isscalar(columns) or columns is None else columns
    columns = [check_count("columns", column, least=0) for column in columns]
    if not columns:
        raise ValueError("`columns` must name a column; got none.")

    def read():
        width = None
        for number, line in enumerate(lines, 1):
            fields = line.split("\t")
            width = width or len(fields)
            if len(fields) != width or len(fields) <= max(columns):
                raise ValueError(
                    f"{path}, line {number}: a line must have {max(width, max(columns) + 1)} fields between tabs; "
                    f"got {len(fields)}."
                )
            yield tuple(fields[column] for column in columns) if len(columns) > 1 else fields[columns[0]]

    return Corpus(read)


def read_parallel(source_path, target_path):
    """Pairs of the lines of two files, of which line `i` translates line `i`.

    Args:
        source_path: str or path.
        target_path: str or path.

    Returns:
        Iterable of (source, target) strings, read anew each time.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: while they are read, if one has more lines than the other.

    Example:
    ```python
    import pathlib, tempfile
    import keras_transformer as kt
    english, spanish = (pathlib.Path(tempfile.mkdtemp(), name) for name in ("train.en", "train.es"))
    english.write_text("one\\ntwo\\n", encoding="utf-8")
    spanish.write_text("uno\\ndos\\n", encoding="utf-8")
    assert list(kt.read_parallel(english, spanish)) == [("one", "uno"), ("two", "dos")]
    ```
    """
    sources, targets = read_lines(source_path), read_lines(target_path)

    def read():
        for number, pair in enumerate(itertools.zip_longest(sources, targets), 1):
            if None in pair:
                ended = source_path if pair[0] is None else target_path
                raise ValueError(f"Parallel files must have as many lines as each other; {ended} has {number - 1}.")
            yield pair

    return Corpus(read)


def read_records(paths, names=("source", "target")):
    """Strings of `tf.train.Example`s in TFRecord files.

    Args:
        paths: str, path or list of them. All are compressed (`.gz`) or none.
        names: the names of the features, each a bytes feature of one value. One name gives texts, more give tuples.

    Returns:
        Iterable of bytes or of tuples of bytes, read anew each time.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if some files are compressed and others are not.
        tensorflow.errors.InvalidArgumentError: while they are read, if an example has no such feature.

    Example:
    ```python
    import pathlib, tempfile
    import tensorflow as tf
    import keras_transformer as kt
    path = pathlib.Path(tempfile.mkdtemp(), "pairs.tfrecord")
    feature = {name: tf.train.Feature(bytes_list=tf.train.BytesList(value=[text])) for name, text in
               {"source": b"one", "target": b"uno"}.items()}
    with tf.io.TFRecordWriter(str(path)) as file:
        file.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())
    assert list(kt.read_records(path)) == [(b"one", b"uno")]
    ```
    """
    paths = [_file(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]
    kinds = {path.suffix == ".gz" for path in paths}
    if len(kinds) != 1:
        raise ValueError(f"`paths` must name files that are all compressed or all not; got {list(map(str, paths))}.")

    def read():
        import tensorflow as tf

        features = {name: tf.io.FixedLenFeature([], tf.string) for name in names}
        records = tf.data.TFRecordDataset(list(map(str, paths)), "GZIP" if kinds == {True} else "")
        parsed = records.batch(1024).map(lambda batch: tf.io.parse_example(batch, features))
        for batch in parsed.as_numpy_iterator():
            columns = [batch[name].tolist() for name in names]
            yield from zip(*columns) if len(names) > 1 else columns[0]

    return Corpus(read)


def mix(corpora, times):
    """Corpora spread evenly over each other, some of them several times or in part.

    Args:
        corpora: list of iterables that can be read again; each is read once at once, to count.
        times: list of numbers above 0, how often each corpus is read in one pass: 3 makes its items count three times,
            0.5 takes every other one, 1.5 all of them and then every other one.

    Returns:
        Iterable of the corpora's items, in the same order each time. Shuffling is `pair_batches`'s.

    Raises:
        ValueError: unless there is a number above 0 for each corpus; if one can be read only once.

    Example:
    ```python
    import keras_transformer as kt
    everything = kt.mix([["a", "b", "c", "d"], ["rare"]], times=[1, 2])
    assert list(everything) == ["a", "rare", "b", "c", "rare", "d"]
    ```
    """
    if len(corpora) != len(times):
        raise ValueError(f"`times` must hold one number for each corpus; got {len(times)} for {len(corpora)}.")
    times = [divmod(check_range("times", number, 0, above=True), 1) for number in times]  # whole, part
    once = [type(corpus).__name__ for corpus in corpora if iter(corpus) is corpus]
    if once:
        raise ValueError(f"`corpora` must be iterables that start anew each time they are read; got {once[0]}.")
    sizes = [sum(1 for _ in corpus) for corpus in corpora]
    totals = [int(whole) * size + _share(part, size) for size, (whole, part) in zip(sizes, times)]

    def placed(corpus, times, total):
        whole, part = times
        passes = [corpus] * int(whole) + ([_part(corpus, part)] if part else [])
        return (((i + 0.5) / total, item) for i, item in enumerate(itertools.chain.from_iterable(passes)))

    def read():
        streams = map(placed, corpora, times, totals)
        return (item for _, item in heapq.merge(*streams, key=lambda placed_item: placed_item[0]))

    return Corpus(read)


def _share(part, size):
    return int(part * size + 0.5)


def _part(corpus, part):
    """Items spread evenly over a corpus: of the first `i` as near to `part * i` as there can be."""
    return (item for i, item in enumerate(corpus) if _share(part, i + 1) > _share(part, i))


def _file(path):
    path = pathlib.Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} must be a file; there is none.")
    return path
