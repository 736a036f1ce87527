"""Corpora on disk: every line is what was written, wrong ones are named, and mixing is even, lazy and repeatable."""

import collections
import gzip
import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import keras_transformer as kt

tf = pytest.importorskip("tensorflow")

INNER_BREAKS = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\x1dh\x1ei"  # `str.splitlines` would split at each


@pytest.fixture(params=["", ".gz"], ids=["plain", "gz"])
def write(tmp_path, request):
    """Writes bytes or text to a new file, compressed or not; returns its path."""
    numbers = itertools.count()

    def write(content):
        path = tmp_path / f"corpus_{next(numbers)}.txt{request.param}"
        content = content if isinstance(content, bytes) else content.encode("utf-8")
        path.write_bytes(gzip.compress(content) if request.param else content)
        return path

    return write


# ---- lines


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        ("", []),
        ("\n", [""]),
        ("a", ["a"]),
        ("a\n", ["a"]),
        ("a\n\nb", ["a", "", "b"]),
        ("a\r\nb\r\n", ["a", "b"]),
        ("a\r\nb", ["a", "b"]),
        ("a\rb\n", ["a\rb"]),
        ("a\r\r\n", ["a\r"]),
        (f"{INNER_BREAKS}\nb\n", [INNER_BREAKS, "b"]),
        ("\ufeffa\n\ufeffb\n", ["a", "\ufeffb"]),
        ("\ufeff", [""]),
        (" a \t\n", [" a \t"]),
        ("日本語\n🦊\n", ["日本語", "🦊"]),
        ('"a\nb"\n', ['"a', 'b"']),
        ("nul\0\n", ["nul\0"]),
    ],
)
def test_lines_end_at_newlines_alone(write, content, lines):
    corpus = kt.read_lines(write(content))
    assert list(corpus) == list(corpus) == lines


def test_a_path_may_be_a_string(write):
    assert list(kt.read_lines(str(write("a\n")))) == ["a"]


@pytest.mark.parametrize("bad", [b"\xff", b"a\xc3(", b"\xe2\x82", b"\xed\xa0\x80"])
def test_a_line_that_is_not_utf8_is_named(write, bad):
    path = write(b"good\nfine\n" + bad + b"\nmore\n")
    lines = iter(kt.read_lines(path))
    assert [next(lines), next(lines)] == ["good", "fine"]
    with pytest.raises(ValueError, match=r"line 3: a line must be UTF-8; got b'") as caught:
        next(lines)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "read",
    [
        kt.read_lines,
        kt.read_tsv,
        kt.read_records,
        lambda path: kt.read_parallel(path, __file__),
        lambda path: kt.read_parallel(__file__, path),
        lambda path: kt.read_records([path]),
    ],
    ids=["lines", "tsv", "records", "source", "target", "list of records"],
)
def test_a_missing_file_is_an_error_at_once(read, tmp_path):
    for path in (tmp_path / "missing.txt", tmp_path):
        with pytest.raises(FileNotFoundError, match="must be a file; there is none"):
            read(path)


def test_readers_read_as_they_go(write):
    lines = iter(kt.read_lines(write("a\n" * 200_000)))
    next(lines)
    tracemalloc.start()
    assert sum(1 for _ in lines) == 199_999
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2**20


# ---- tab-separated columns


@pytest.mark.parametrize(
    ("content", "columns", "expected"),
    [
        ("a\tb\nc\td\n", (0, 1), [("a", "b"), ("c", "d")]),
        ("a\tb\tc\n", (0, 1), [("a", "b")]),
        ("a\tb\tc\n", (2, 0), [("c", "a")]),
        ("a\tb\n", (1, 1), [("b", "b")]),
        ("a\tb\tc\n", (0, 1, 2), [("a", "b", "c")]),
        ("a\tb\nc\td\n", (1,), ["b", "d"]),
        ("a\nb\n", [0], ["a", "b"]),
        ("\t\n", (0, 1), [("", "")]),
        ('"a\tb"\n"c""\t\'d\n', (0, 1), [('"a', 'b"'), ('"c""', "'d")]),
        ("\ufeffa\tb\r\nc\td\r\n", (0, 1), [("a", "b"), ("c", "d")]),
        (f"{INNER_BREAKS}\tb\rc\n", (0, 1), [(INNER_BREAKS, "b\rc")]),
        ("a\\tb\t\\n\n", (0, 1), [("a\\tb", "\\n")]),
        ("", (0, 1), []),
    ],
)
def test_columns_are_what_stands_between_tabs(write, content, columns, expected):
    corpus = kt.read_tsv(write(content), columns)
    assert list(corpus) == list(corpus) == expected


@pytest.mark.parametrize(
    ("content", "columns", "number", "wanted", "got"),
    [
        ("a\tb\nc\n", (0, 1), 2, 2, 1),
        ("a\tb\nc\td\te\n", (0, 1), 2, 2, 3),
        ("a\tb\tc\n" * 2 + "a\tb\n", (0, 1), 3, 3, 2),
        ("a\tb\n\n", (0, 1), 2, 2, 1),
        ("a\n", (0, 1), 1, 2, 1),
        ("a\tb\n", (0, 5), 1, 6, 2),
    ],
)
def test_a_line_with_another_number_of_fields_is_named(write, content, columns, number, wanted, got):
    path = write(content)
    with pytest.raises(ValueError, match=f"line {number}: a line must have {wanted} fields.*; got {got}") as caught:
        list(kt.read_tsv(path, columns))
    assert str(path) in str(caught.value)


def test_a_line_of_columns_that_is_not_utf8_is_named(write):
    with pytest.raises(ValueError, match="line 2: a line must be UTF-8"):
        list(kt.read_tsv(write(b"a\tb\n\xff\tc\n")))


@pytest.mark.parametrize("column", [-1, 0.5, "a", None])
def test_columns_are_counted_from_0(write, column):
    with pytest.raises(ValueError, match="`columns` must be a whole number of at least 0; got"):
        kt.read_tsv(write("a\tb\n"), (0, column))


# ---- parallel files


def test_lines_of_parallel_files_are_pairs(write):
    corpus = kt.read_parallel(write("one\n\ntwo\n"), write("\ufeffuno\r\nnada\r\ndos"))
    assert list(corpus) == list(corpus) == [("one", "uno"), ("", "nada"), ("two", "dos")]


def test_parallel_files_of_no_lines_are_no_pairs(write):
    assert list(kt.read_parallel(write(""), write(""))) == []


def test_one_parallel_file_may_be_compressed(tmp_path):
    (tmp_path / "en").write_text("one\n", encoding="utf-8")
    (tmp_path / "es.gz").write_bytes(gzip.compress(b"uno\n"))
    assert list(kt.read_parallel(tmp_path / "en", tmp_path / "es.gz")) == [("one", "uno")]


@pytest.mark.parametrize(("source", "target", "shorter", "lines"), [("a\nb\n", "c\n", 1, 1), ("", "c\nd\n", 0, 0)])
def test_parallel_files_of_unequal_length_are_refused(write, source, target, shorter, lines):
    paths = write(source), write(target)
    with pytest.raises(ValueError, match=f"as many lines as each other; .* has {lines}") as caught:
        list(kt.read_parallel(*paths))
    assert str(paths[shorter]) in str(caught.value)


# ---- TFRecord


def write_records(path, examples):
    """`examples`: dicts from a feature's name to its bytes."""
    compression = "GZIP" if path.suffix == ".gz" else ""
    with tf.io.TFRecordWriter(str(path), compression) as file:
        for example in examples:
            feature = {
                name: tf.train.Feature(bytes_list=tf.train.BytesList(value=[text])) for name, text in example.items()
            }
            file.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())
    return path


@pytest.mark.parametrize("suffix", [".tfrecord", ".tfrecord.gz"])
def test_records_are_pairs_texts_or_tuples(tmp_path, suffix):
    examples = [{"source": f"s {i}".encode(), "target": f"t {i}".encode(), "id": b"\xff%d" % i} for i in range(1030)]
    path = write_records(tmp_path / f"a{suffix}", examples)
    pairs = kt.read_records(path)
    assert list(pairs) == list(pairs) == [(e["source"], e["target"]) for e in examples]
    assert list(kt.read_records(str(path), names=["id"])) == [e["id"] for e in examples]
    triples = kt.read_records(path, names=("target", "id", "source"))
    assert list(triples) == [(e["target"], e["id"], e["source"]) for e in examples]


@pytest.mark.parametrize("suffix", [".tfrecord", ".tfrecord.gz"])
def test_files_of_records_are_read_one_after_the_other(tmp_path, suffix):
    texts = [[b"a", b"b"], [], [b"c"]]
    paths = [
        write_records(tmp_path / f"{i}{suffix}", [{"text": text} for text in part]) for i, part in enumerate(texts)
    ]
    assert list(kt.read_records(paths, names=("text",))) == [b"a", b"b", b"c"]
    assert list(kt.read_records(paths[::-1], names=("text",))) == [b"c", b"a", b"b"]
    assert list(kt.read_records(paths[1])) == []


def test_files_of_records_are_all_compressed_or_none(tmp_path):
    paths = [write_records(tmp_path / name, []) for name in ("a.tfrecord", "b.tfrecord.gz")]
    for some in (paths, []):
        with pytest.raises(ValueError, match="`paths` must name files that are all compressed or all not; got"):
            kt.read_records(some)


def test_a_record_without_the_feature_is_an_error(tmp_path):
    path = write_records(tmp_path / "a.tfrecord", [{"source": b"a"}])
    with pytest.raises(tf.errors.InvalidArgumentError, match="target"):
        list(kt.read_records(path))


# ---- mixtures


class Counted:
    """The numbers below `size`, as (`name`, number); counts how often it is read, and how far."""

    def __init__(self, name, size):
        self.name, self.size, self.passes, self.items = name, size, 0, 0

    def __iter__(self):
        self.passes += 1
        for number in range(self.size):
            self.items += 1
            yield self.name, number


sizes_and_times = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 4) | st.sampled_from([0.1, 0.29, 0.5, 1.75, 3.5])),
    min_size=1,
    max_size=4,
)


@given(sizes_and_times)
def test_each_corpus_comes_as_often_as_said_and_in_its_order(parts):
    corpora = [Counted(name, size) for name, (size, _) in enumerate(parts)]
    mixture = kt.mix(corpora, [times for _, times in parts])
    items = list(mixture)
    assert items == list(mixture)
    for name, (size, times) in enumerate(parts):
        found = [number for owner, number in items if owner == name]
        once = int(times) * size
        assert found[:once] == list(range(size)) * int(times)
        rest = np.array(found[once:])
        assert len(rest) == int(times % 1 * size + 0.5)
        if len(rest):  # a part comes in its order, spread over all
            even = (np.arange(len(rest)) + 0.5) * size / len(rest)
            assert (np.diff(rest) > 0).all() and (abs(rest + 0.5 - even) < size / len(rest)).all()


@given(sizes_and_times)
def test_each_prefix_holds_each_corpus_by_its_share(parts):
    corpora = [Counted(name, size) for name, (size, _) in enumerate(parts)]
    items = list(kt.mix(corpora, [times for _, times in parts]))
    totals, seen = collections.Counter(owner for owner, _ in items), collections.Counter()
    for length, (owner, _) in enumerate(items, 1):
        seen[owner] += 1
        for name in range(len(parts)):
            share = totals[name] / len(items)
            # each corpus is half an item from its due, and what the others owe together is shared among all
            assert abs(seen[name] - length * share) <= 0.5 + share * (len(parts) - 2) / 2 + 1e-9


def test_a_corpus_alone_is_itself():
    assert list(kt.mix([["a", "b", "c"]], [1])) == ["a", "b", "c"]
    assert list(kt.mix([], [])) == []


def test_a_corpus_in_part():
    assert list(kt.mix(["abcdef"], [0.5])) == ["a", "c", "e"]
    assert list(kt.mix(["abcd", "xy"], [0.5, 1.5])) == ["x", "a", "y", "c", "x"]


def test_mixing_reads_as_it_goes():
    corpora = [Counted("a", 10_000), Counted("b", 100)]
    mixture = kt.mix(corpora, [1, 50])
    assert [corpus.passes for corpus in corpora] == [1, 1]  # to count
    items = iter(mixture)
    assert [corpus.items for corpus in corpora] == [10_000, 100]
    list(itertools.islice(items, 100))
    assert corpora[0].items < 10_100 and corpora[1].items < 200
    tracemalloc.start()
    assert sum(1 for _ in items) == 14_900
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2**18
    assert [corpus.passes for corpus in corpora] == [2, 51]


@pytest.mark.parametrize(
    ("corpora", "times", "message"),
    [
        ([["a"]], [1, 2], "`times` must hold one number for each corpus; got 2 for 1"),
        ([["a"], ["b"]], [1], "`times` must hold one number for each corpus; got 1 for 2"),
        ([["a"]], [0], "`times` must be above 0; got 0"),
        ([["a"]], [-0.5], "`times` must be above 0; got -0.5"),
        ([["a"]], ["2"], "`times` must be one number; got '2'"),
        ([["a"], iter(["b"])], [1, 1], "`corpora` must be iterables that start anew.*; got list_iterator"),
        ([(text for text in "ab")], [1], "`corpora` must be iterables that start anew.*; got generator"),
    ],
)
def test_mixtures_that_cannot_be_are_refused(corpora, times, message):
    with pytest.raises(ValueError, match=message):
        kt.mix(corpora, times)


def test_mixtures_mix_again(write):
    inner = kt.mix([["a", "b"], ["c"]], [1, 1])
    assert collections.Counter(kt.mix([inner, kt.read_lines(write("d\n"))], [2, 3])) == collections.Counter("aabbccddd")


# ---- in batches


@pytest.mark.parametrize("shuffle", [0, 20])
@pytest.mark.parametrize("packed", [False, True])
def test_sources_feed_batches(tmp_path, shuffle, packed):
    pairs = [(f"w{i}", f"w{i + 1}") for i in range(30)]
    (tmp_path / "en").write_text("".join(f"{source}\n" for source, _ in pairs), encoding="utf-8")
    (tmp_path / "es").write_text("".join(f"{target}\n" for _, target in pairs), encoding="utf-8")
    (tmp_path / "rare.tsv.gz").write_bytes(gzip.compress(b"w40\tw41\nw42\tw43\n"))
    records = write_records(tmp_path / "a.tfrecord", [{"source": b"w44", "target": b"w45"}])
    corpora = [
        kt.read_parallel(tmp_path / "en", tmp_path / "es"),
        kt.read_tsv(tmp_path / "rare.tsv.gz"),
        kt.read_records(records),
    ]
    tokenizer = kt.Tokenizer.train([" ".join(f"w{i}" for i in range(50))], kind="word")
    mixture = kt.mix(corpora, [1, 3, 2])
    batches = kt.pair_batches(mixture, tokenizer, tokenizer, 16, 8, shuffle=shuffle, packed=packed)
    expected = collections.Counter(target for _, target in [*pairs, *[("w40", "w41"), ("w42", "w43")] * 3])
    expected["w45"] = 2
    for _ in range(2):
        found = collections.Counter()
        for _, labels in batches.as_numpy_iterator():
            words = [token for token in labels.ravel().tolist() if token > 3]
            found.update(word.decode() for word in tokenizer.pieces(words).numpy())
        assert {word.strip("\u2581"): number for word, number in found.items()} == expected


def test_texts_of_a_column_feed_batches(write):
    tokenizer = kt.Tokenizer.train(["a b c d"], kind="word")
    ((_, labels),) = kt.text_batches(kt.read_tsv(write("1\ta b\n2\tc d\n"), columns=[1]), tokenizer, max_length=4)
    assert tokenizer.decode(labels) == ["a b", "c d"]


def test_one_column_may_be_named_by_its_number_alone(write):
    corpus = kt.read_tsv(write("one\tuno\ntwo\tdos\n"), columns=1)
    assert list(corpus) == ["uno", "dos"]


@pytest.mark.parametrize("columns", [None, (), -1, "0"])
def test_what_names_no_column_is_refused(write, columns):
    with pytest.raises(ValueError, match="`columns` must"):
        kt.read_tsv(write("one\tuno\n"), columns=columns)
