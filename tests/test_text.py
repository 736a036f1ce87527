"""Text comes back as it went in, and lists of strings are answered one by one."""

import base64
import json
import logging
import re

import keras
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import keras_transformer as kt

if keras.backend.backend() != "tensorflow":
    pytest.skip("text is TensorFlow's", allow_module_level=True)

import sentencepiece
import tensorflow as tf

CORPUS = [
    "The quick, brown fox jumps over the lazy dog.",
    "don't you think that it isn't a fox?",
    "नमस्ते दुनिया",
    "日本語のテキスト",
    "to be or not to be, that is the question",
]
OPEN_KINDS = ("unigram", "bpe", "char")
STRANGE = {
    "punctuation": "The quick, brown fox.",
    "apostrophe": "don't",
    "han": "日本語です。",
    "emoji": "fox 🦊👩‍👩‍👧!",
    "double space": "a  b   c",
    "outer spaces": "  a b ",
    "newline": "a\nb\r\n",
    "tab": "\ta\tb",
    "nul": "a\0b\0",
    "devanagari": "नमस्ते क्षत्रिय",
    "combining": "e\u0301 n\u0303a",
    "decomposed and composed": "é é",
    "no-break space": "a\u00a0b\u202fc",
    "zero width": "a\u200b\ufeffb",
    "case": "ThE",
    "unseen letters": "Ωмега ﬁ ①",
    "empty": "",
    "space": " ",
    "specials": "</s><s><pad><unk>[END]<0x41>",
}


@pytest.fixture(scope="module")
def tokenizers():
    options = {"unigram": {"vocab_size": 400}, "bpe": {"vocab_size": 400}, "char": {}}
    return {kind: kt.Tokenizer.train(CORPUS, kind=kind, **options[kind]) for kind in OPEN_KINDS}


@pytest.fixture(scope="module")
def words():
    return kt.Tokenizer.train(["one two three", "two three four"], kind="word")


# ---- there and back


@pytest.mark.parametrize("kind", OPEN_KINDS)
@pytest.mark.parametrize("name", STRANGE)
def test_text_comes_back_as_it_went_in(tokenizers, kind, name):
    tokenizer, text = tokenizers[kind], STRANGE[name]
    ids = tokenizer.tokenize([text])
    assert tokenizer.decode(ids) == [text]
    np.testing.assert_array_equal(tokenizer.tokenize(tokenizer.decode(ids)).to_list(), ids.to_list())


any_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"), max_size=30)


@pytest.mark.parametrize("kind", OPEN_KINDS)
@given(texts=st.lists(any_text, min_size=1, max_size=4))
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_comes_back_and_becomes_no_special_id(tokenizers, kind, texts):
    tokenizer = tokenizers[kind]
    ids = tokenizer.tokenize(texts)
    assert tokenizer.decode(ids) == texts
    assert not {0, 1, 2, 3} & set(ids.values.numpy().tolist())


@pytest.mark.parametrize("kind", OPEN_KINDS)
def test_text_comes_back_where_no_training_text_had_a_space(kind):
    tokenizer = kt.Tokenizer.train(["abab", "ba"], vocab_size=300, kind=kind)
    assert tokenizer.decode(tokenizer.tokenize([" a  b ", "ab"])) == [" a  b ", "ab"]


@pytest.mark.parametrize("kind", OPEN_KINDS)
def test_bytes_that_are_not_utf8_become_replacement_characters(tokenizers, kind):
    tokenizer = tokenizers[kind]
    texts = tf.constant([b"ab\xffc", b"\xc3(", b"\xe2\x82", b"ok"])
    ids = tokenizer.tokenize(texts)
    assert tokenizer.decode(ids) == ["ab\ufffdc", "\ufffd(", tokenizer.decode(ids)[2], "ok"]
    assert set(tokenizer.decode(ids)[2]) == {"\ufffd"}


@pytest.mark.parametrize("kind", OPEN_KINDS)
def test_half_a_character_decodes_without_an_error(tokenizers, kind):
    tokenizer = tokenizers[kind]
    (ids,) = tokenizer.tokenize(["🦊"]).to_list()
    assert len(ids) == 4
    assert set(tokenizer.decode([ids[:2]])[0]) == {"\ufffd"}


@pytest.mark.parametrize("kind", OPEN_KINDS)
def test_a_megabyte_is_one_row(tokenizers, kind):
    text = "the quick fox, " * 70_000
    tokenizer = tokenizers[kind]
    ids = tokenizer.tokenize([text, "a"])
    assert tokenizer.decode(ids) == [text, "a"]


# ---- ids


def test_special_ids_are_0_to_3(tokenizers, words):
    for tokenizer in (*tokenizers.values(), words):
        assert (tokenizer.pad_id, tokenizer.unknown_id, tokenizer.start_id, tokenizer.end_id) == (0, 1, 2, 3)
        processor = sentencepiece.SentencePieceProcessor(model_proto=base64.b64decode(tokenizer.model))
        assert [processor.is_control(i) or processor.is_unknown(i) for i in range(5)] == [True] * 4 + [False]


@pytest.mark.parametrize("kind", OPEN_KINDS)
def test_detokenize_cuts_at_the_end_and_drops_start_and_padding(tokenizers, kind):
    tokenizer = tokenizers[kind]
    (a,), (b,) = tokenizer.tokenize(["fox", "to be"]).to_list()[:1], tokenizer.tokenize(["to be"]).to_list()
    rows = [[2, *a, 3, *b, 3, 0], [*a, 0, 0, 3], [3, *a], [0, 2, 0, *b], []]
    ids = tf.ragged.constant(rows, dtype=tf.int32)
    assert tokenizer.decode(ids) == ["fox", "fox", "", "to be", ""]
    assert tokenizer.decode(ids.to_tensor()) == ["fox", "fox", "", "to be", ""]
    assert tokenizer.decode(tf.cast(ids.to_tensor(), tf.int64)) == ["fox", "fox", "", "to be", ""]


def test_an_end_is_put_behind_on_demand(tokenizers):
    tokenizer = tokenizers["bpe"]
    plain = tokenizer.tokenize(["fox", ""]).to_list()
    assert tokenizer.tokenize(["fox", ""], end=True).to_list() == [[*ids, 3] for ids in plain]


def test_words_of_a_closed_set_come_back_and_others_are_unknown(words):
    assert words.vocab_size == 4 + 4
    ids = words.tokenize(["four one", "one five two", ""])
    assert 1 not in ids[0].numpy() and ids[1].numpy().tolist().count(1) == 1 and len(ids[2]) == 0
    assert words.decode(ids[:1]) == ["four one"]
    everything = words.tokenize(["one two three four"]).to_list()[0]
    assert sorted(everything) == [4, 5, 6, 7]


@pytest.mark.parametrize("name", ["specials", "empty"])
def test_words_that_look_special_are_unknown(words, name):
    assert set(words.tokenize([STRANGE[name]]).values.numpy().tolist()) <= {1}


def test_pieces_name_the_tokens(words):
    ids = words.tokenize(["one two"])
    assert [piece.decode().strip("\u2581") for piece in words.pieces(ids[0]).numpy()] == ["one", "two"]


# ---- training a tokenizer


@pytest.mark.parametrize("kind", [*OPEN_KINDS, "word"])
@pytest.mark.parametrize("corpus", [CORPUS, ["ab"]])
def test_a_vocabulary_too_small_is_refused_with_the_least_size_that_does(kind, corpus):
    with pytest.raises(ValueError, match=rf"`vocab_size` must be at least \d+ for kind '{kind}'.*; got 1\.") as error:
        kt.Tokenizer.train(corpus, vocab_size=1, kind=kind)
    least = int(re.search(r"at least (\d+)", str(error.value))[1])
    assert kt.Tokenizer.train(corpus, vocab_size=least, kind=kind).vocab_size <= least
    with pytest.raises(ValueError, match=f"at least {least} .*; got {least - 1}"):
        kt.Tokenizer.train(corpus, vocab_size=least - 1, kind=kind)


@pytest.mark.parametrize("kind", [*OPEN_KINDS, "word"])
def test_a_vocabulary_larger_than_the_text_gives_comes_out_smaller(kind):
    tokenizer = kt.Tokenizer.train(CORPUS, vocab_size=20_000, kind=kind)
    assert tokenizer.vocab_size < 1000
    assert max(tokenizer.tokenize(CORPUS).values.numpy()) < tokenizer.vocab_size


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_a_vocabulary_has_the_size_that_was_asked_for(kind):
    assert kt.Tokenizer.train(CORPUS, vocab_size=315, kind=kind).vocab_size == 315


@pytest.mark.parametrize(
    ("texts", "arguments", "message"),
    [
        (CORPUS, {"kind": "letters"}, "`kind` must be one of .*; got 'letters'"),
        ([], {}, "`texts` must hold at least one string that is not empty; got none"),
        ([""], {}, "`texts` must hold at least one string that is not empty; got none"),
        (CORPUS, {"vocab_size": 400.5}, "`vocab_size` must be a whole number"),
    ],
)
def test_what_cannot_be_trained_is_refused(texts, arguments, message):
    with pytest.raises(ValueError, match=message):
        kt.Tokenizer.train(texts, **arguments)


def test_texts_may_be_an_iterator_and_training_is_repeatable():
    one = kt.Tokenizer.train(iter(CORPUS), 350)
    two = kt.Tokenizer.train((text for text in CORPUS), 350)
    assert one.model == two.model == kt.Tokenizer.train(CORPUS, 350).model


def test_a_text_of_any_length_is_learned_from():
    long = "ab " * 5000 + "zebra"
    tokenizer = kt.Tokenizer.train([long, "ab"], kind="word")
    assert 1 not in tokenizer.tokenize(["zebra ab"]).values.numpy()


def test_a_sentencepiece_model_with_other_special_ids_is_refused(tmp_path):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_prefix=str(tmp_path / "m"),
        vocab_size=60,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    with pytest.raises(ValueError, match=r"must be 0, 1, 2 and 3; got \(-1, 0, 1, 2\)"):
        kt.Tokenizer((tmp_path / "m.model").read_bytes())


# ---- inside graphs, models and files


@pytest.mark.parametrize("kind", [*OPEN_KINDS, "word"])
def test_a_tokenizer_survives_its_config_as_json(kind):
    tokenizer = kt.Tokenizer.train(CORPUS, kind=kind, name="mine")
    config = json.loads(json.dumps(keras.saving.serialize_keras_object(tokenizer)))
    again = keras.saving.deserialize_keras_object(config)
    assert again.name == "mine" and again.vocab_size == tokenizer.vocab_size and again.dtype == tokenizer.dtype
    np.testing.assert_array_equal(again(CORPUS), tokenizer(CORPUS))


def test_a_tokenizer_survives_a_new_seed_and_a_cleared_session(tmp_path):
    tokenizer = kt.Tokenizer.train(["only for this test"], kind="char")
    graph = tf.function(tokenizer.tokenize, input_signature=[tf.TensorSpec([None], tf.string)])
    before = graph(tf.constant(["test"])).to_list()
    keras.utils.set_random_seed(1)
    assert graph(tf.constant(["test"])).to_list() == tokenizer.tokenize(["test"]).to_list() == before
    keras.backend.clear_session()
    assert graph(tf.constant(["test"])).to_list() == tokenizer.tokenize(["test"]).to_list() == before
    assert tokenizer.decode(before) == ["test"]


def test_a_model_from_strings_to_ids_saves_and_exports(tokenizers, tmp_path):
    tokenizer = tokenizers["bpe"]
    strings = keras.Input((), dtype="string")
    model = keras.Model(strings, tokenizer(strings))
    expected = tokenizer(CORPUS)
    np.testing.assert_array_equal(model(tf.constant(CORPUS)), expected)
    model.save(tmp_path / "ids.keras")
    np.testing.assert_array_equal(keras.models.load_model(tmp_path / "ids.keras")(tf.constant(CORPUS)), expected)
    model.export(tmp_path / "ids", verbose=False)
    loaded = tf.saved_model.load(str(tmp_path / "ids"))
    np.testing.assert_array_equal(loaded.serve(tf.constant(CORPUS)), expected)
    keras.utils.set_random_seed(1)
    np.testing.assert_array_equal(loaded.serve(tf.constant(CORPUS)), expected)


def test_a_call_pads_with_0_to_the_longest_row(words):
    ids = words(["one two three", "", "four"])
    assert ids.dtype == tf.int32 and ids.shape == (3, 3)
    np.testing.assert_array_equal(ids != 0, [[True] * 3, [False] * 3, [True, False, False]])
    assert words(tf.constant([], tf.string)).shape == (0, 0)
    assert words.decode(tf.zeros((0, 4), tf.int32)) == []


def test_tokenizing_gives_the_same_eagerly_in_graphs_and_in_data_pipelines(tokenizers):
    tokenizer = tokenizers["unigram"]
    expected = tokenizer.tokenize(CORPUS).to_list()
    graph = tf.function(tokenizer.tokenize, input_signature=[tf.TensorSpec([None], tf.string)])
    assert graph(tf.constant(CORPUS)).to_list() == expected
    assert graph(tf.constant([], tf.string)).to_list() == []
    mapped = tf.data.Dataset.from_tensor_slices(CORPUS).batch(2).map(tokenizer.tokenize)
    assert [ids for batch in mapped for ids in batch.to_list()] == expected


# ---- Translator


@pytest.fixture(scope="module")
def translator():
    keras.utils.set_random_seed(3)
    letters = kt.Tokenizer.train(["abcdefgh "], kind="char")
    model = kt.build_transformer(
        letters.vocab_size, d_model=16, num_layers=1, num_heads=2, intermediate_dim=16, tie_embeddings="none"
    )
    # letters are likelier than bytes, and outputs differ in length
    kernel = model.get_layer("target_embedding").reverse_embeddings
    scale = np.full(letters.vocab_size, 1.0)
    scale[[3, *letters.tokenize(["abcdefgh "]).to_list()[0]]] = 4.0
    kernel.assign(kernel * scale)
    return kt.Translator(model, letters, letters, max_length=7, max_source_length=12, batch_size=4)


SOURCES = ["a", "abc", "h g f", "", "hhhhhhh", "dead", "ab ba", "cab", "fed", "é"]


def test_a_list_of_strings_gives_a_list_of_strings(translator):
    found = translator(SOURCES)
    assert isinstance(found, list) and all(isinstance(text, str) for text in found)
    assert len(found) == len(SOURCES) and len(set(found)) > 3
    assert translator(tuple(SOURCES)) == found
    assert translator([]) == []


def test_a_string_that_is_no_list_is_refused(translator):
    with pytest.raises(ValueError, match="a list of strings, also a single one; got the string 'a b'"):
        translator("a b")


def test_each_string_is_answered_as_if_it_were_alone(translator):
    assert [translator([source])[0] for source in SOURCES] == translator(SOURCES)
    assert translator(SOURCES[::-1]) == translator(SOURCES)[::-1]


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_the_batch_size_changes_no_answer(translator, batch_size):
    other = kt.Translator(
        translator.model, translator.source_tokenizer, translator.target_tokenizer, 7, 12, batch_size=batch_size
    )
    assert other(SOURCES) == translator(SOURCES)


def test_an_answer_is_what_the_generator_writes(translator):
    tokenizer = translator.source_tokenizer
    generate = kt.Generator(translator.model, max_length=7, width=4)
    found = generate({"source": tokenizer.tokenize(SOURCES, end=True).to_tensor()})
    assert translator(SOURCES) == tokenizer.decode(found["ids"][:, 0])
    answer = translator(tf.constant(SOURCES))
    np.testing.assert_allclose(answer["score"], found["score"], rtol=1e-4)
    np.testing.assert_array_equal(answer["length"], found["length"])


def test_a_tensor_gives_text_score_and_length(translator):
    answer = translator(tf.constant(["a", "too long to be read", ""]))
    assert {name: (value.dtype, tuple(value.shape)) for name, value in answer.items()} == {
        "text": (tf.string, (3, 1)),
        "score": (tf.float32, (3, 1)),
        "length": (tf.int32, (3, 1)),
        "ids": (tf.int32, (3, 1, 7)),
    }


def test_sources_that_are_too_long_are_refused_alone_and_logged(translator, caplog):
    just, more = "a" * 11, "a" * 12  # the end is a token too
    answer = translator(tf.constant(["abc", more, just]))
    assert answer["text"][1, 0] == b"" and answer["score"][1, 0] == -np.inf and answer["length"][1, 0] == 0
    assert np.all(np.isfinite(answer["score"].numpy()[[0, 2]])) and np.all(answer["length"].numpy()[[0, 2]] > 0)
    with caplog.at_level(logging.WARNING, "keras_transformer"):
        found = translator(["abc", more, just, "b" * 1000, "b", more])
    assert caplog.messages == ["3 of 6 texts got no answer: too long, or nothing may be written."]
    assert found == [*translator(["abc"]), "", *translator([just]), "", *translator(["b"]), ""]


def test_a_batch_of_refused_strings_gives_empty_ones(translator):
    assert translator(["a" * 50] * 3) == ["", "", ""]


def test_bytes_that_are_not_utf8_are_read_as_replacement_characters(translator):
    assert translator([b"a\xffb", "abc"]) == translator(["a\ufffdb", "abc"])


def test_a_translator_survives_a_file(translator, tmp_path):
    translator.save(tmp_path / "translator.keras")
    again = keras.models.load_model(tmp_path / "translator.keras")
    assert again(SOURCES) == translator(SOURCES)
    assert (again.max_length, again.max_source_length, again.batch_size, again.name) == (7, 12, 4, translator.name)
    expected, found = translator(tf.constant(SOURCES)), again(tf.constant(SOURCES))
    np.testing.assert_allclose(found["score"], expected["score"], rtol=1e-5)


def test_any_number_and_length_of_strings_is_one_graph(translator):
    traces = []

    class Counting(kt.Translator):
        def call(self, text):
            traces.append(1)
            return super().call(text)

    counting = Counting(translator.model, translator.source_tokenizer, translator.target_tokenizer, 7, 12, 4)
    for texts in (["a"], ["abc"] * 3, SOURCES, ["a" * 50], [""]):
        counting(texts)
    assert len(traces) == 1


def test_a_model_that_cannot_write_the_vocabulary_is_refused(translator):
    small = kt.build_transformer(20, d_model=8, num_layers=1, num_heads=1, intermediate_dim=8)
    with pytest.raises(
        ValueError, match=f"logit for each token of the tokenizer of what it writes; got 20 for {8 + 1 + 260}"
    ):
        kt.Translator(small, translator.source_tokenizer, translator.target_tokenizer)


def test_a_model_that_cannot_read_the_vocabulary_is_refused(translator, words):
    small = kt.build_transformer(
        words.vocab_size,
        translator.target_tokenizer.vocab_size,
        d_model=8,
        num_layers=1,
        num_heads=1,
        intermediate_dim=8,
    )
    with pytest.raises(ValueError, match=f"vector for each token of `source_tokenizer`; got 8 for {8 + 1 + 260}"):
        kt.Translator(small, translator.source_tokenizer, translator.target_tokenizer)


@pytest.mark.parametrize("size", ["max_length", "max_source_length", "batch_size"])
def test_sizes_below_1_are_refused(translator, size):
    with pytest.raises(ValueError, match=f"`{size}` must be a whole number of at least 1; got 0"):
        kt.Translator(translator.model, translator.source_tokenizer, translator.target_tokenizer, **{size: 0})


# ---- options, n-best, scores, streams


@pytest.fixture(scope="module")
def several(translator):
    """The same model, with three outputs and their alignment."""
    letters = translator.source_tokenizer
    return kt.Translator(translator.model, letters, letters, 7, 12, 4, width=4, n=3, options={"alignment": True})


def test_n_best_outputs_are_ranked_distinct_and_scored_as_the_model_scores_them(several):
    outputs = several.n_best(SOURCES)
    assert [best.text for best, *_ in outputs] == several(SOURCES)
    for source, row in zip(SOURCES, outputs):
        ranks = [output.score / ((5 + len(output.tokens)) / 6) ** 0.6 for output in row]
        assert len(row) == 3 and ranks == sorted(ranks, reverse=True)
        assert len({tuple(output.tokens) for output in row}) == 3
        ended = [output for output in row if output.tokens[-1] == "</s>" and spelled(several, output)]
        scored = several.score([source] * len(ended), [output.text for output in ended])
        np.testing.assert_allclose([one.score for one in scored], [one.score for one in ended], rtol=1e-4)
        assert [one.tokens for one in scored] == [one.tokens for one in ended]


def spelled(several, output):
    """Whether an output's tokens are those of its text: a random model also writes ones that text never becomes."""
    ids = several.target_tokenizer.tokenize([output.text], end=True)
    return [piece.decode() for piece in several.target_tokenizer.pieces(ids[0]).numpy()] == output.tokens


def test_an_alignment_names_a_source_token_for_each_token(several):
    for source, row in zip(SOURCES, several.n_best(SOURCES)):
        places = len(several.source_tokenizer.tokenize([source], end=True)[0])
        for output in row:
            assert len(output.alignment) == len(output.tokens)
            assert all(0 <= place < places for place in output.alignment)
    answer = several(tf.constant(SOURCES))
    np.testing.assert_array_equal(answer["alignment"] == -1, answer["ids"] == 0)


def test_scores_of_tokens_add_up_and_do_not_depend_on_other_rows(translator):
    targets = ["b", "abc", "", "dead", "h" * 6, "g", "f", "e", "ab", "a"]
    scored = translator.score(SOURCES, targets)
    for source, target, one in zip(SOURCES, targets, scored):
        assert len(one.tokens) == len(one.token_scores) == len(target) + 1 and one.tokens[-1] == "</s>"
        np.testing.assert_allclose(sum(one.token_scores), one.score, rtol=1e-5)
        np.testing.assert_allclose(translator.score([source], [target])[0].score, one.score, rtol=1e-4)
    refused, short = translator.score(["a", "b"], ["a" * 7, "a" * 6])  # the end is a token too
    assert refused.score == -np.inf and refused.tokens == [] and np.isfinite(short.score)


def test_targets_that_are_not_one_a_text_are_refused(translator):
    for targets in (["a"], "ab"):
        with pytest.raises(ValueError, match="`target` must be a list of strings, one for each text"):
            translator.score(["a", "b"], targets)
    with pytest.raises(ValueError, match="`prefix` must be a list of strings, one for each text"):
        translator(["a", "b"], prefix=["a"])


def test_a_seed_draws_the_same_whatever_the_batch_size(translator):
    letters = translator.source_tokenizer
    drawn = translator(SOURCES, temperature=1.5, seed=3)
    assert drawn == translator(SOURCES, temperature=1.5, seed=3) != translator(SOURCES, temperature=1.5, seed=4)
    for batch_size in (1, 100):
        other = kt.Translator(translator.model, letters, letters, 7, 12, batch_size)
        assert other(SOURCES, temperature=1.5, seed=3) == drawn
    assert len(set(translator(["abc"] * 8, temperature=1.5))) > 4


def test_a_prefix_begins_the_text_and_is_not_counted(translator):
    prefixes = ["", "a", "bc", "hhh", "", "d", "e", "f", "g", "ab"]
    for source, prefix, (output,) in zip(SOURCES, prefixes, translator.n_best(SOURCES, prefix=prefixes)):
        assert output.text.startswith(prefix) and len(output.tokens) <= 7
        (alone,) = translator.n_best([source], prefix=[prefix])[0]
        assert alone.tokens == output.tokens
    assert translator(SOURCES, prefix=[""] * len(SOURCES)) == translator(SOURCES)
    assert translator(["a", "b"], prefix=["a" * 7, ""]) == ["", *translator(["b"])]


def test_lengths_as_a_share_of_the_source_are_rounded_up(translator):
    sources = ["a", "abc", "abcdefgh"]  # 2, 4, 9 tokens
    most = [len(output.tokens) for (output,) in translator.n_best(sources, max_length_ratio=0.5)]
    assert np.all(np.array(most) <= [1, 2, 5])
    least = [len(output.tokens) for (output,) in translator.n_best(sources, min_length_ratio=0.5, temperature=1.0)]
    assert np.all(np.array(least) >= [1, 2, 5])


def test_the_constructors_options_are_those_of_calls_that_say_nothing(translator, tmp_path):
    letters = translator.source_tokenizer
    options = {"temperature": 1.5, "seed": 3, "no_repeat_ngram": 1, "forbidden_ids": letters.tokenize(["a"])[0].numpy()}
    options["forbidden_ids"] = options["forbidden_ids"].tolist()
    other = kt.Translator(translator.model, letters, letters, 7, 12, 4, options=options)
    found = other(SOURCES)
    assert found == other(SOURCES, temperature=1.5, seed=3) != other(SOURCES, temperature=0.0)
    for (output,) in other.n_best(SOURCES):
        assert len(set(output.tokens)) == len(output.tokens) and "a" not in output.tokens
    other.save(tmp_path / "translator.keras")
    again = keras.models.load_model(tmp_path / "translator.keras")
    assert again.options == other.options and again(SOURCES) == found


@pytest.mark.parametrize(
    "options, message",
    [
        ({"heat": 1}, r"The options of a call are .*got \['heat'\]"),
        ({"temperature": -1}, "`temperature` must be at least 0"),
        ({"max_length": 8}, "`max_length` must be at least 1 and at most 7; got 8"),
        ({"top_k": 1.5}, "`top_k` must be a whole number"),
        ({"max_length_ratio": 0}, "`max_length_ratio` must be above 0"),
    ],
)
def test_options_that_are_unknown_or_out_of_range_are_refused(translator, options, message):
    letters = translator.source_tokenizer
    with pytest.raises(ValueError, match=message):
        translator(["a"], **options)
    with pytest.raises(ValueError, match=message):
        kt.Translator(translator.model, letters, letters, 7, options=options)
    with pytest.raises(ValueError, match=message):
        list(translator.stream(["a"], **options))


@pytest.mark.parametrize("options", [{}, {"temperature": 1.5, "seed": 2}, {"prefix": ["b"] * 10, "max_length": 4}])
def test_streamed_pieces_add_up_to_the_text(translator, options):
    letters = translator.source_tokenizer
    greedy = kt.Translator(translator.model, letters, letters, 7, 12, 100, width=1)
    steps = list(greedy.stream(SOURCES, **options))
    assert 1 < len(steps) <= 7 and all(len(step) == len(SOURCES) for step in steps)
    assert ["".join(pieces) for pieces in zip(*steps)] == greedy(SOURCES, **options)
    assert list(greedy.stream([])) == []
    assert next(iter(greedy.stream(["a" * 50]))) == [""]


# ---- TextGenerator


@pytest.fixture(scope="module")
def writer():
    """A model that has learned that letters follow each other in a ring, one of them of three bytes."""
    keras.utils.set_random_seed(0)
    ring = "abc€"
    texts = [(ring * 4)[i : i + 8] for i in range(4) for _ in range(32)]
    letters = kt.Tokenizer.train(["abc"], kind="char")  # the fourth is spelled in bytes
    ids = letters.tokenize(texts, end=True).to_tensor().numpy()
    tokens = np.pad(ids[:, :-1], [(0, 0), (1, 0)], constant_values=letters.start_id)
    model = kt.build_language_model(letters.vocab_size, d_model=32, num_layers=1, num_heads=2, intermediate_dim=32)
    model.compile(keras.optimizers.Adam(1e-2), kt.TokenCrossentropy(), jit_compile=False)
    model.fit(tokens, ids, epochs=40, batch_size=32, verbose=0)
    return kt.TextGenerator(model, letters, max_length=24, max_prompt_length=10, batch_size=3)


PROMPTS = ["a", "abc", "", "€a", "bc"]


def test_a_text_is_continued_as_was_learned(writer):
    for prompt, text in zip(PROMPTS, writer(PROMPTS)):
        assert (prompt + text) in "abc€abc€abc€abc€" and len(prompt + text) >= 7
    assert [writer([prompt])[0] for prompt in PROMPTS] == writer(PROMPTS)


def test_a_stream_holds_back_half_a_character(writer):
    steps = list(writer.stream(PROMPTS))
    assert ["".join(pieces) for pieces in zip(*steps)] == writer(PROMPTS)
    assert not any("\ufffd" in piece for pieces in steps for piece in pieces)
    assert any(piece == "€" for pieces in steps for piece in pieces)


def test_a_prompt_that_is_too_long_is_refused_alone(writer):
    assert writer(["a" * 9, "a" * 10, "b"]) == [*writer(["a" * 9]), "", *writer(["b"])]


def test_samples_of_a_text_and_their_scores(writer):
    tokenizer, model = writer.tokenizer, writer.model
    drawing = kt.TextGenerator(model, tokenizer, max_length=24, n=3, options={"temperature": 2.0})
    for prompt, row in zip(PROMPTS, drawing.n_best(PROMPTS, seed=1)):
        assert len(row) == 3 and len({output.text for output in row}) > 1
        assert [output.text for output in row] != [output.text for output in drawing.n_best([prompt], seed=2)[0]]
    (right, wrong) = writer.score(["ab", "ab"], ["c€abc€", "cba€cb"])
    assert right.score > wrong.score + 5


def test_a_text_generator_survives_a_file_and_serves(writer, tmp_path):
    writer.save(tmp_path / "writer.keras")
    again = keras.models.load_model(tmp_path / "writer.keras")
    assert again(PROMPTS) == writer(PROMPTS)
    assert again.max_prompt_length == 10
    writer.export(tmp_path / "writer")
    serve = tf.saved_model.load(str(tmp_path / "writer")).signatures["serving_default"]
    assert [text.decode() for text in serve(text=tf.constant(PROMPTS))["text"][:, 0].numpy()] == writer(PROMPTS)


def test_a_tensor_is_answered_with_options_as_a_list_is(translator):
    options = {"temperature": 1.5, "seed": 3, "prefix": ["b"] * 4}
    found = translator(tf.constant(SOURCES[:4]), **options)
    assert [text.decode() for text in found["text"][:, 0].numpy()] == translator(SOURCES[:4], **options)


@pytest.mark.parametrize("options", [{"no_repeat_ngram": 1.5}, {"forbidden_ids": [-1]}])
def test_options_of_the_constructor_alone_are_checked_there(translator, options):
    letters = translator.source_tokenizer
    with pytest.raises(ValueError, match="must be a whole number"):
        kt.Translator(translator.model, letters, letters, 7, options=options)


# ---- odd input and odd models


def test_logits_without_a_token_and_the_start_are_never_written(translator):
    letters = translator.source_tokenizer
    keras.utils.set_random_seed(0)
    wide = kt.build_transformer(
        letters.vocab_size + 40, d_model=8, num_layers=1, num_heads=1, intermediate_dim=8, tie_embeddings="none"
    )
    never = [letters.start_id, *range(letters.vocab_size, letters.vocab_size + 40)]
    wide.get_layer("target_embedding").reverse_embeddings.assign(
        np.where(np.isin(np.arange(letters.vocab_size + 40), never), 3.0, 0.1) * np.ones((8, 1))
    )
    writer = kt.Translator(wide, letters, letters, 7, 12)
    for options in ({}, {"temperature": 1.0, "seed": 1}):
        assert not np.isin(writer(tf.constant(SOURCES), **options)["ids"], never).any()
        assert all(isinstance(text, str) for text in writer(SOURCES, **options))


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"max_length_ratio": 0.5}])
def test_no_texts_and_texts_all_refused_have_their_shapes(several, options):
    for texts in ([], ["a" * 50] * 2):
        found = several(tf.constant(texts, tf.string), **options)
        assert found["text"].shape == found["score"].shape == found["length"].shape == (len(texts), 3)
        assert found["ids"].shape == found["alignment"].shape == (len(texts), 3, found["ids"].shape[2])
        assert several.n_best(texts, **options) == [[("", -np.inf, [], [])] * 3] * len(texts)
        assert [one.score for one in several.score(texts, texts)] == [-np.inf] * len(texts)


def test_a_share_of_the_source_is_not_rounded_up_for_the_sake_of_a_float(translator):
    letters = translator.source_tokenizer
    long = kt.Translator(translator.model, letters, letters, 60, 60, width=1)
    for tokens, ratio, length in ((25, 0.6, 15), (25, 1.2, 30), (10, 0.7, 7), (9, 0.5, 5)):
        (output,) = long.n_best(["a" * (tokens - 1)], min_length_ratio=ratio, max_length_ratio=ratio)[0]
        assert len(output.tokens) == length


def test_models_of_another_kind_are_refused(translator, writer):
    letters = translator.source_tokenizer
    with pytest.raises(ValueError, match=r"TextGenerator must have the inputs \[\] and what it writes; got \['source'"):
        kt.TextGenerator(translator.model, letters)
    with pytest.raises(ValueError, match=r"Translator must have the inputs \['source'\].*got \['tokens'\]"):
        kt.Translator(writer.model, writer.tokenizer, writer.tokenizer)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"temperature": None}, "`temperature` must be one number; got None"),
        ({"temperature": float("inf")}, "`temperature` must be at least 0; got inf"),
        ({"temperature": [1.0, 2.0]}, "`temperature` must be one number"),
        ({"min_length": float("inf")}, "`min_length` must be"),
        ({"min_length": 8}, "`min_length` must be at most `max_length`; got 8 and 7"),
        ({"top_k": True}, "`top_k` must be one number; got True"),
    ],
)
def test_numbers_that_are_none_are_refused_with_the_rule(translator, options, message):
    with pytest.raises(ValueError, match=message):
        translator(["a"], **options)
    with pytest.raises(ValueError, match=message):
        translator.stream(["a"], **options)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"alignment": "no"}, "`alignment` must be True or False; got 'no'"),
        ({"forbidden_ids": [9999]}, "`forbidden_ids` must be below"),
        ({"no_repeat_ngram": -1}, "`no_repeat_ngram` must be a whole number of at least 0"),
    ],
)
def test_what_a_constructor_alone_takes_is_checked(translator, options, message):
    letters = translator.source_tokenizer
    with pytest.raises(ValueError, match=message):
        kt.Translator(translator.model, letters, letters, 7, options=options)


def test_options_are_checked_in_graphs_of_others_too(translator):
    with pytest.raises(ValueError, match="`max_length` must be at least 1 and at most 7; got 8"):
        tf.function(lambda text: translator(text, max_length=8)["ids"])(tf.constant(["a"]))
    assert tf.function(lambda text: translator(text, max_length=3)["ids"])(tf.constant(["a"])).shape == (1, 1, 3)
