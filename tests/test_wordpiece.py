"""WordPiece: ids are BERT's, eagerly, in graphs, in `.keras` files and in SavedModels."""

import json

import keras
import numpy as np
import pytest
from fresh import run_in_fresh_process
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import keras_transformer as kt

if keras.backend.backend() != "tensorflow":
    pytest.skip("text is TensorFlow's", allow_module_level=True)

import tensorflow as tf

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["un", "##aff", "##able", "unaff", "a", "b", "##b", "ab", "##abc", "to", "be", "cafe", "café", "cafe\u0301"]
SIGNS = ["!", ",", ".", "-", "#", "'", "[", "]", "$", "¿", "中", "国", "##国", "ok", "ß", "To", "é", "pad", "sep"]
VOCABULARY = [*SPECIAL, *WORDS, *SIGNS]
TEXTS = ["To be, unaffable", "", "zebra", "中国 cafe!"]


@pytest.fixture(scope="module")
def tokenizer():
    return kt.WordPiece(VOCABULARY)


@pytest.fixture(scope="module")
def cased():
    return kt.WordPiece(VOCABULARY, lower_case=False)


def pieces(tokenizer, text):
    (ids,) = tokenizer.tokenize([text])
    return [piece.decode() for piece in tokenizer.pieces(ids).numpy()]


# ---- ids


@pytest.mark.parametrize(
    ["text", "expected"],
    [
        ("unaffable", "unaff ##able"),  # the longest piece first, not un ##aff ##able
        ("unable", "un ##able"),
        ("abb", "ab ##b"),
        ("b", "b"),
        ("bb", "b ##b"),
        ("unb", "un ##b"),
        ("aabc", "a ##abc"),
        ("ababc", "ab ##abc"),
        ("abx", "[UNK]"),  # what begins well and ends badly is unknown as a whole
        ("unaff able", "unaff [UNK]"),  # ##able is no beginning
        ("zebra to", "[UNK] to"),
        ("##able", "# # [UNK]"),  # in a text # is a sign
        ("to,be!", "to , be !"),
        ("to-be", "to - be"),
        ("to--be...", "to - - be . . ."),
        ("don't", "[UNK] ' [UNK]"),
        ("¿to$", "¿ to $"),
        ("中国", "中 国"),  # each a word, so never ##国
        ("to中be国ab", "to 中 be 国 ab"),
        ("日", "[UNK]"),
        ("TO Be", "to be"),
        ("CAFÉ", "cafe"),
        ("cafe\u0301", "cafe"),
        ("É", "[UNK]"),  # e is not in the vocabulary
        ("ß", "ß"),
        ("t\0o", "to"),
        ("t\ufffdo", "to"),
        ("t\x07o\x1b", "to"),
        ("t\u200bo\ufeff", "to"),
        ("to\x85be", "[UNK]"),  # a control character, not a space
        ("to\tbe\nab\r\nb", "to be ab b"),
        ("to\u00a0be\u3000ab\u2028b", "to be ab b"),
        ("  to   be  ", "to be"),
        ("", ""),
        (" \t\n ", ""),
        ("\0\u200b", ""),
        ("[SEP]", "[ sep ]"),
        ("[MASK][PAD]", "[ [UNK] ] [ pad ]"),
    ],
)
def test_pieces_are_those_of_the_rules(tokenizer, text, expected):
    assert pieces(tokenizer, text) == expected.split()


@pytest.mark.parametrize(
    ["text", "expected"],
    [
        ("To be", "To be"),
        ("TO", "[UNK]"),
        ("café", "café"),
        ("cafe\u0301", "cafe\u0301"),  # no normal form: the letter and its accent are two characters
        ("é", "é"),
        ("t\0o\tBe", "to [UNK]"),
        ("中ab,", "中 ab ,"),
        ("[SEP]", "[ [UNK] ]"),
    ],
)
def test_letters_stay_as_they_are_on_demand(cased, text, expected):
    assert pieces(cased, text) == expected.split()


def test_a_call_puts_a_start_before_and_an_end_behind_and_pads(tokenizer):
    ids = tokenizer(TEXTS)
    assert ids.dtype == tf.int32
    rows = [[2, *[VOCABULARY.index(piece) for piece in pieces(tokenizer, text)], 3] for text in TEXTS]
    longest = max(map(len, rows))
    assert ids.numpy().tolist() == [[*row, *[0] * (longest - len(row))] for row in rows]
    np.testing.assert_array_equal(tokenizer(tf.constant(TEXTS)), ids)
    assert tokenizer([]).shape[0] == tokenizer(tf.constant([], tf.string)).shape[0] == 0


@pytest.mark.parametrize("start", [False, True])
@pytest.mark.parametrize("end", [False, True])
def test_starts_and_ends_are_put_on_demand(tokenizer, start, end):
    plain = tokenizer.tokenize(TEXTS)
    assert plain.dtype == tf.int32 and plain.to_list()[1] == []
    expected = [[2] * start + ids + [3] * end for ids in plain.to_list()]
    assert tokenizer.tokenize(TEXTS, start=start, end=end).to_list() == expected
    assert tokenizer.tokenize([], start=start, end=end).to_list() == []
    padded = tokenizer(TEXTS, start=start, end=end)
    assert padded.numpy().tolist() == [row + [0] * (padded.shape[1] - len(row)) for row in expected]
    assert padded.shape[1] == max(map(len, expected))


def test_special_tokens_are_where_the_vocabulary_has_them():
    tokenizer = kt.WordPiece(["to", "[SEP]", "[CLS]", "be", "[UNK]", "[PAD]"])
    assert (tokenizer.pad_id, tokenizer.unknown_id, tokenizer.start_id, tokenizer.end_id) == (5, 4, 2, 1)
    assert tokenizer.vocab_size == 6
    assert tokenizer(["to be or", "be"]).numpy().tolist() == [[2, 0, 3, 4, 1], [2, 3, 1, 5, 5]]


def test_bytes_that_are_not_utf8_are_left_out(tokenizer, cased):
    bad = [b"t\xffo", b"\xc3(", b"to\xe2\x82", b"\xff", b"be \xed\xa0\x80!", b"ok"]
    replaced = [text.decode("utf-8", "replace") for text in bad]
    for each in (tokenizer, cased):
        assert each.tokenize(tf.constant(bad)).to_list() == each.tokenize(replaced).to_list()
    assert pieces(tokenizer, bad[0]) == ["to"]


def test_long_texts_are_cut_on_demand():
    cutting = kt.WordPiece(VOCABULARY, max_length=4)
    whole = kt.WordPiece(VOCABULARY)
    ids = whole(["to be or to be or", "be"]).numpy()
    assert cutting(["to be or to be or", "be"]).numpy().tolist() == [[*ids[0, :3], ids[0, -1]], [*ids[1, :3], 0]]
    assert cutting.tokenize(["to be or to be or"]).to_list() == [ids[0, 1:5].tolist()]
    with pytest.raises(ValueError, match="`max_length` must be a whole number of at least 2; got 1"):
        kt.WordPiece(VOCABULARY, max_length=1)


def test_the_mask_is_that_of_the_vocabulary():
    assert kt.WordPiece(VOCABULARY).mask_id == VOCABULARY.index("[MASK]")
    unmasked = kt.WordPiece([piece for piece in VOCABULARY if piece != "[MASK]"])
    assert unmasked.mask_id == unmasked.unknown_id


def test_long_texts_and_words_are_answered(tokenizer):
    ids = tokenizer.tokenize(["to be, " * 50_000, "b" * 99, "b" * 1000, "b"]).to_list()
    assert len(ids[0]) == 150_000 and set(ids[0]) == {VOCABULARY.index(piece) for piece in ("to", "be", ",")}
    assert len(ids[1]) == 99 and ids[2] == [1]  # words of more than 100 letters are unknown to BERT
    assert ids[3] == [VOCABULARY.index("b")]


# ---- Hugging Face's


LETTERS = "abcdefghijklmnopqrstuvwxyz"
LATIN = "".join(chr(i) for i in range(0xC0, 0x100))
CHINESE = "中国日本"
PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@\\^_`{|}~¡¿«»·§"
PLAIN = LETTERS + LETTERS.upper() + "0123456789" + LATIN + CHINESE + PUNCTUATION + " \t\n\u00a0"
OURS = [
    *SPECIAL,
    *(char for char in PLAIN if not char.isspace() and char not in "xXyQ"),
    *(f"##{char}" for char in LETTERS[:20] + LATIN[::2] + LATIN.lower()[1::2] + "ABC" if char not in "xX"),
    *("ab", "abc", "##ab", "##bc", "abcab", "bé", "##éa", "be", "##ea", "中国", "--", "##ñ"),
]
OURS = list(dict.fromkeys(OURS))
text = st.text(st.sampled_from(PLAIN), max_size=30) | st.text(st.sampled_from("abcABÉéñx中国!- "), max_size=30)


@pytest.fixture(scope="module", params=[True, False], ids=["uncased", "cased"])
def both(request):
    """A tokenizer of ours, and Hugging Face's of the same vocabulary."""
    tokenizers = pytest.importorskip("tokenizers")
    theirs = tokenizers.BertWordPieceTokenizer({piece: i for i, piece in enumerate(OURS)}, lowercase=request.param)
    return kt.WordPiece(OURS, lower_case=request.param), theirs


@given(texts=st.lists(text, min_size=1, max_size=8))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ids_are_those_of_hugging_face(both, texts):
    ours, theirs = both
    assert ours.tokenize(texts, start=True, end=True).to_list() == [theirs.encode(text).ids for text in texts]


@pytest.mark.parametrize("length", [50, 51, 99, 100, 101])
def test_long_words_are_those_of_hugging_face(both, length):
    ours, theirs = both
    texts = ["b" + letter * (length - 1) for letter in "aâ"] + ["中" + "b" * length + "-" + "é" * length]
    assert ours.tokenize(texts, start=True, end=True).to_list() == [theirs.encode(text).ids for text in texts]


def test_strange_texts_are_those_of_hugging_face(both):
    ours, theirs = both
    texts = ["a\0b", "a\ufffdb", "a\u200bb", "a\u00adb", "a\x85b", "a\x0bb", "a\u2028b", "a\u3000b", "a\u0301b", "İb"]
    assert ours.tokenize(texts, start=True, end=True).to_list() == [theirs.encode(text).ids for text in texts]


# ---- in graphs, models and files


def test_tokenizing_gives_the_same_eagerly_in_graphs_and_in_data_pipelines(tokenizer):
    expected = tokenizer.tokenize(TEXTS).to_list()
    graph = tf.function(tokenizer.tokenize, input_signature=[tf.TensorSpec([None], tf.string)])
    assert graph(tf.constant(TEXTS)).to_list() == expected
    assert graph(tf.constant([], tf.string)).to_list() == []
    mapped = tf.data.Dataset.from_tensor_slices(TEXTS).batch(2).map(tokenizer.tokenize)
    assert [ids for batch in mapped for ids in batch.to_list()] == expected


@pytest.mark.parametrize("lower_case", [True, False])
def test_a_tokenizer_survives_its_config_as_json(lower_case):
    tokenizer = kt.WordPiece(VOCABULARY, lower_case=lower_case, name="mine")
    config = json.loads(json.dumps(keras.saving.serialize_keras_object(tokenizer)))
    again = keras.saving.deserialize_keras_object(config)
    assert (again.name, again.vocabulary, again.lower_case) == ("mine", VOCABULARY, lower_case)
    assert again.dtype == tokenizer.dtype and again.vocab_size == len(VOCABULARY)
    np.testing.assert_array_equal(again(TEXTS), tokenizer(TEXTS))


def test_a_tokenizer_survives_a_new_seed_and_a_cleared_session():
    tokenizer = kt.WordPiece([*SPECIAL, "only", "here"])
    graph = tf.function(tokenizer.tokenize, input_signature=[tf.TensorSpec([None], tf.string)])
    before = graph(tf.constant(["only here"])).to_list()
    assert before == [[5, 6]]
    keras.utils.set_random_seed(1)
    assert graph(tf.constant(["only here"])).to_list() == tokenizer.tokenize(["only here"]).to_list() == before
    keras.backend.clear_session()
    assert graph(tf.constant(["only here"])).to_list() == tokenizer.tokenize(["only here"]).to_list() == before


def model_of(tokenizer):
    strings = keras.Input((), dtype="string", name="text")
    return keras.Model(strings, tokenizer(strings))


def test_a_model_from_strings_to_ids_saves_and_exports(tokenizer, tmp_path):
    model, expected = model_of(tokenizer), tokenizer(TEXTS)
    assert model.output_shape == (None, None) and model.outputs[0].dtype == "int32"
    np.testing.assert_array_equal(model(tf.constant(TEXTS)), expected)
    model.save(tmp_path / "ids.keras")
    np.testing.assert_array_equal(keras.models.load_model(tmp_path / "ids.keras")(tf.constant(TEXTS)), expected)
    model.export(tmp_path / "ids", verbose=False)
    loaded = tf.saved_model.load(str(tmp_path / "ids"))
    np.testing.assert_array_equal(loaded.serve(tf.constant(TEXTS)), expected)
    keras.utils.set_random_seed(1)
    np.testing.assert_array_equal(loaded.serve(tf.constant(TEXTS)), expected)


def test_a_classifier_of_strings_saves_and_exports(tokenizer, tmp_path):
    strings = keras.Input((), dtype="string", name="text")
    classifier = kt.build_classifier(tokenizer.vocab_size, 3, d_model=8, num_layers=1, num_heads=2, intermediate_dim=8)
    model = keras.Model(strings, classifier(tokenizer(strings)))
    expected = classifier(tokenizer(TEXTS))
    np.testing.assert_allclose(model(tf.constant(TEXTS)), expected, atol=1e-6)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(again(tf.constant(TEXTS)), expected, atol=1e-6)
    model.export(tmp_path / "model", verbose=False)
    loaded = tf.saved_model.load(str(tmp_path / "model"))
    np.testing.assert_allclose(loaded.serve(tf.constant(TEXTS)), expected, atol=1e-5)
    for text, logits in zip(TEXTS, expected):  # each as if it were alone
        np.testing.assert_allclose(loaded.serve(tf.constant([text]))[0], logits, atol=1e-5)


@pytest.mark.slow
def test_serving_needs_neither_this_package_nor_the_file_of_the_vocabulary(tokenizer, tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n", encoding="utf-8")
    model_of(kt.WordPiece(tmp_path / "vocab.txt")).export(tmp_path / "ids", verbose=False)
    (tmp_path / "vocab.txt").unlink()
    code = """
        import json, sys
        import tensorflow as tf
        import tensorflow_text
        serve = tf.saved_model.load(sys.argv[1]).serve
        ids = serve(tf.constant(json.loads(sys.argv[2]))).numpy().tolist()
        print(json.dumps([ids, [name for name in sys.modules if name.startswith("keras_transformer")]]))
    """
    found = run_in_fresh_process(code, str(tmp_path / "ids"), json.dumps(TEXTS))
    assert found == [tokenizer(TEXTS).numpy().tolist(), []]


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
@pytest.mark.parametrize("form", [str, lambda path: path])
def test_a_vocabulary_may_be_a_file(tokenizer, tmp_path, end, form):
    path = tmp_path / "vocab.txt"
    path.write_bytes(((end or "\n").join(VOCABULARY) + end).encode())
    read = kt.WordPiece(form(path))
    assert read.vocabulary == VOCABULARY
    np.testing.assert_array_equal(read(TEXTS), tokenizer(TEXTS))


# ---- rules


@pytest.mark.parametrize(
    ["vocabulary", "rule"],
    [
        (SPECIAL[1:], "got 4 pieces, 4 of them different, without ['[PAD]']."),
        (["a"], "got 1 pieces, 1 of them different, without ['[PAD]', '[UNK]', '[CLS]', '[SEP]']."),
        ([], "got 0 pieces, 0 of them different, without ['[PAD]', '[UNK]', '[CLS]', '[SEP]']."),
        ([*SPECIAL, "a", "a"], "got 7 pieces, 6 of them different, without []."),
    ],
)
def test_a_vocabulary_that_lacks_or_repeats_a_piece_is_refused(vocabulary, rule):
    with pytest.raises(ValueError) as error:
        kt.WordPiece(vocabulary)
    assert str(error.value).startswith(f"A vocabulary must hold {SPECIAL[:4]}, and each piece once; got")
    assert rule in str(error.value)


def test_a_file_that_is_not_there_is_missed(tmp_path):
    with pytest.raises(FileNotFoundError):
        kt.WordPiece(tmp_path / "vocab.txt")
