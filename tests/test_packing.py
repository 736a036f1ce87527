"""Packed rows: each sequence is treated as if it stood alone, whatever stands beside it."""

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import ops

import keras_transformer as kt
from keras_transformer.positions import positions_within

BACKEND = keras.backend.backend()
VOCAB, START, END = 16, 2, 3
SIZES = {"d_model": 8, "num_heads": 2, "intermediate_dim": 16, "dropout": 0.0}
# (source, target) without start and end; those that stand together in a row share no token
ROWS = [
    [([4, 5, 6], [7, 8]), ([9], [10, 11, 12]), ([13, 14], [15])],
    [([10, 4], [12, 12, 13, 14]), ([7, 8, 9], [6])],
]
PAIRS = [pair for row in ROWS for pair in row]
LENGTH = 11  # of packed rows, padding among it
slow_on_jax = pytest.mark.slow if BACKEND == "jax" else lambda test: test  # each of its graphs takes seconds to compile
text_is_tensorflows = pytest.mark.skipif(BACKEND != "tensorflow", reason="text is TensorFlow's")
both_ways = pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
one_and_two = pytest.mark.parametrize("num_layers", [1, 2])


def array(x):
    return ops.convert_to_numpy(ops.cast(x, "float32"))


def close(actual, expected, atol=1e-5):
    np.testing.assert_allclose(array(actual), array(expected), atol=atol, rtol=0)


def jitted(function):
    """`function` in a graph on JAX, whose eager mode compiles every operation for every shape; elsewhere as it is."""
    if BACKEND != "jax":
        return function
    jax = pytest.importorskip("jax")
    return jax.jit(function)


# ---- rows of ids


def joined(rows, length=LENGTH):
    """Rows of sequences, each row one after the other and padded: int32 `[B, length]`."""
    ids = np.zeros((len(rows), length), "int32")
    for to, row in zip(ids, rows):
        row = [token for sequence in row for token in sequence]
        to[: len(row)] = row
    return ids


def batch(rows, length=LENGTH):
    """(inputs, labels) of rows of pairs."""
    inputs = {
        "source": joined([[[*source, END] for source, _ in row] for row in rows], length),
        "target": joined([[[START, *target] for _, target in row] for row in rows], length),
    }
    return inputs, joined([[[*target, END] for _, target in row] for row in rows], length)


def separate(packed_logits, rows=ROWS):
    """The logits of each pair `[T, V]`, out of those of packed rows."""
    for logits, row in zip(array(packed_logits), rows):
        ends = np.cumsum([len(target) + 1 for _, target in row])
        yield from np.split(logits[: ends[-1]], ends[:-1])


def assert_each_as_alone(packed_logits, alone_logits, atol=1e-5):
    """`alone_logits`: of `PAIRS`, a row each."""
    found = list(separate(packed_logits))
    assert len(found) == len(PAIRS)
    for logits, alone in zip(found, array(alone_logits)):
        close(logits, alone[: len(logits)], atol)


# ---- models


def scrambled(model):
    """Weights that are nowhere 0 or 1, so that biases and normalizations take part, and the same on every backend."""
    rng = np.random.default_rng(1)
    for weight in model.trainable_weights:
        weight.assign(rng.normal(weight.path.endswith("gamma"), 0.3, weight.shape))
    return model


def transformers(**options):
    """(plain model, packed model) with the same weights."""
    plain, packed = (
        kt.build_transformer(VOCAB, **{**SIZES, "num_layers": 1, **options}, packed=packed) for packed in (False, True)
    )
    packed.set_weights(scrambled(plain).get_weights())
    return plain, packed


def language_models(**options):
    plain, packed = (
        kt.build_language_model(VOCAB, **{**SIZES, "num_layers": 1, **options}, packed=packed)
        for packed in (False, True)
    )
    packed.set_weights(scrambled(plain).get_weights())
    return plain, packed


def by_hand(packed):
    """A model of layers, without a builder; the Keras masks of its embeddings hide the padding."""
    source, target = (keras.Input((None,), dtype="int32", name=name) for name in ("source", "target"))
    segments = kt.SegmentIds(end_id=END)(source) if packed else None
    target_segments = kt.SegmentIds(start_id=START)(target) if packed else None
    x = kt.PositionalEncoding(layout="interleaved")(kt.TokenEmbedding(VOCAB, 8)(source), segment_ids=segments)
    x = kt.EncoderBlock(2, 16, dropout=0.0)(x, segment_ids=segments)
    y = kt.PositionalEncoding()(kt.TokenEmbedding(VOCAB, 8)(target), segment_ids=target_segments)
    y = kt.DecoderBlock(2, 16, dropout=0.0)(y, x, segment_ids=target_segments, context_segment_ids=segments)
    return keras.Model({"source": source, "target": target}, keras.layers.Dense(VOCAB)(y))


def models_by_hand():
    plain, packed = by_hand(False), by_hand(True)
    packed.set_weights(scrambled(plain).get_weights())
    return plain, packed


MAKERS = {"encoder-decoder": transformers, "language model": language_models, "by hand": models_by_hand}
of_builders = pytest.mark.parametrize(
    "make", [transformers, language_models], ids=["encoder-decoder", "language model"]
)
of_all = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def inputs_of(model, rows):
    """What the model reads of rows of pairs."""
    inputs, _ = batch(rows)
    return inputs if len(model.inputs) == 2 else inputs["target"]


def gradients(model, loss):
    """Of `loss(model)`, a function that calls its argument, by the trainable weights."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            value = loss(model)
        return [array(g) for g in tape.gradient(value, [weight.value for weight in model.trainable_variables])]
    jax = pytest.importorskip("jax")
    fixed = [variable.value for variable in model.non_trainable_variables]

    def of(values):
        return loss(lambda inputs: model.stateless_call(values, fixed, inputs)[0])

    return [array(g) for g in jax.jit(jax.grad(of))([variable.value for variable in model.trainable_variables])]


# ---- each pair as if it stood alone


@both_ways
@one_and_two
@of_builders
def test_each_pair_has_the_logits_of_the_pair_alone(make, norm_first, num_layers):
    plain, packed = make(norm_first=norm_first, num_layers=num_layers)
    assert_each_as_alone(packed(inputs_of(packed, ROWS)), plain(inputs_of(plain, [[pair] for pair in PAIRS])))


def test_each_pair_has_the_logits_of_the_pair_alone_in_a_model_by_hand():
    plain, packed = models_by_hand()
    assert_each_as_alone(packed(inputs_of(packed, ROWS)), plain(inputs_of(plain, [[pair] for pair in PAIRS])))


def test_without_segments_pairs_in_one_row_do_see_each_other():
    plain, packed = transformers()
    inputs = inputs_of(plain, ROWS)
    assert np.max(np.abs(array(plain(inputs)) - array(packed(inputs)))) > 0.1


@of_all
def test_rows_of_one_pair_give_what_they_give_without_packing(make):
    plain, packed = make()
    inputs, labels = batch([[pair] for pair in PAIRS])
    inputs = inputs if len(plain.inputs) == 2 else inputs["target"]
    real = labels != 0
    close(array(packed(inputs))[real], array(plain(inputs))[real])


def test_a_source_without_an_end_is_one_segment_too():
    plain, packed = transformers()
    inputs = {"source": np.array([[4, 5, 6, 0]], "int32"), "target": np.array([[START, 7, 8]], "int32")}
    close(packed(inputs), plain(inputs))


def test_padding_may_stand_in_front():
    plain, packed = transformers()
    short = {"source": np.array([[4, 5, END]], "int32"), "target": np.array([[START, 7]], "int32")}
    padded = {"source": np.array([[0, 4, 5, END]], "int32"), "target": np.array([[0, 0, START, 7]], "int32")}
    close(packed(padded)[:, 2:], plain(short))


def test_packed_mixed_precision():
    keras.config.set_dtype_policy("mixed_bfloat16")
    plain, packed = transformers(num_layers=2)
    inputs = inputs_of(packed, ROWS)
    logits = packed(inputs)
    assert keras.backend.standardize_dtype(logits.dtype) == "bfloat16"
    assert_each_as_alone(logits, plain(inputs_of(plain, [[pair] for pair in PAIRS])), atol=0.1)
    assert np.max(np.abs(array(plain(inputs)) - array(logits))) > 0.5


# ---- no influence


def changed(inputs, row, side, where):
    """`inputs` with other tokens at some places of one row."""
    inputs = {name: ids.copy() for name, ids in inputs.items()}
    ids = inputs[side][row, where]
    inputs[side][row, where] = np.where(ids > 3, 4 + (ids - 3) % (VOCAB - 4), ids)
    return inputs


@both_ways
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("side", ["source", "target"])
def test_changing_a_pair_changes_no_other_at_all(norm_first, policy, side):
    keras.config.set_dtype_policy(policy)
    _, packed = transformers(norm_first=norm_first, num_layers=2)
    inputs, _ = batch(ROWS)
    before = list(separate(packed(inputs)))
    where = slice(4, 5) if side == "source" else slice(3, 7)  # of the second pair in the first row
    after = list(separate(packed(changed(inputs, 0, side, where))))
    is_same = [np.array_equal(a, b) for a, b in zip(before, after)]
    assert is_same == [True, False, True, True, True]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_changing_a_text_changes_no_other_at_all(place):
    _, packed = language_models(num_layers=2)
    inputs, _ = batch(ROWS)
    before = list(separate(packed(inputs["target"])))
    start, stop = [(0, 3), (3, 7), (7, 9)][place]
    after = list(separate(packed(changed(inputs, 0, "target", slice(start, stop))["target"])))
    assert [np.array_equal(a, b) for a, b in zip(before, after)] == [i != place for i in range(5)]


@both_ways
def test_no_gradient_flows_from_one_pair_to_another(norm_first):
    _, packed = transformers(norm_first=norm_first, num_layers=2, tie_embeddings="none")
    inputs, labels = batch(ROWS[:1])
    of_second = np.zeros((1, LENGTH, 1), "float32")
    of_second[0, 3:7] = 1
    found = gradients(packed, lambda model: ops.sum(ops.square(model(inputs)) * of_second))
    tables = {
        weight.path.split("/")[-2]: gradient
        for weight, gradient in zip(packed.trainable_variables, found)
        if weight.path.endswith("/embeddings")
    }
    for name, own in (("source_embedding", [9, END]), ("target_embedding", [START, 10, 11, 12])):
        is_reached = np.any(tables[name] != 0, axis=1)
        assert np.flatnonzero(is_reached).tolist() == sorted(own)


def test_no_gradient_flows_from_one_text_to_another():
    _, packed = language_models(num_layers=2, tie_embeddings=False)
    inputs, _ = batch(ROWS[:1])
    of_third = np.zeros((1, LENGTH, 1), "float32")
    of_third[0, 7:9] = 1
    found = gradients(packed, lambda model: ops.sum(ops.square(model(inputs["target"])) * of_third))
    (table,) = (g for w, g in zip(packed.trainable_variables, found) if w.path.endswith("/embeddings"))
    assert np.flatnonzero(np.any(table != 0, axis=1)).tolist() == [START, 15]


# ---- the same training


@of_builders
@pytest.mark.parametrize("divisor", [None, 40.0])
def test_loss_and_gradient_are_those_of_padded_rows(make, divisor):
    plain, packed = make()
    loss = kt.TokenCrossentropy(label_smoothing=0.1, divisor=divisor)
    results = []
    for model, rows in ((packed, ROWS), (plain, [[pair] for pair in PAIRS])):
        inputs, labels = inputs_of(model, rows), batch(rows)[1]

        def of(call, inputs=inputs, labels=labels):
            return loss(labels, call(inputs))

        results.append((array(of(model)), gradients(model, of)))
    (value, found), (expected_value, expected) = results
    close(value, expected_value)
    assert value > 0.1
    for gradient, other in zip(found, expected):
        close(gradient, other)
    assert max(np.max(np.abs(gradient)) for gradient in found) > 1e-2


@text_is_tensorflows
@pytest.mark.parametrize("kind", ["pairs", "texts"])
def test_evaluating_packed_batches_gives_what_padded_ones_give(kind):
    words = [f"w{i}" for i in range(12)]
    tokenizer = kt.Tokenizer.train([" ".join(words)], kind="word")
    assert tokenizer.vocab_size == VOCAB
    random = np.random.default_rng(0)
    texts = [" ".join(random.choice(words, random.integers(1, 9))) for _ in range(60)]
    losses, batches_needed = [], []
    for model, packed in zip(transformers() if kind == "pairs" else language_models(), (False, True)):
        if kind == "pairs":
            batches = kt.pair_batches(
                list(zip(texts, texts[::-1])), tokenizer, tokenizer, 64, 16, buckets=1, packed=packed
            )
        else:
            batches = kt.text_batches(texts, tokenizer, 64, 16, buckets=1, packed=packed)
        model.compile("sgd", kt.TokenCrossentropy(), metrics=[kt.TokenLoss()], jit_compile=False)
        losses.append(model.evaluate(batches, verbose=0, return_dict=True)["token_loss"])
        batches_needed.append(len(batches))
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert batches_needed[1] < batches_needed[0]


# ---- writing


SOURCES = np.array([[4, 5, END, 0], [9, 8, 7, END], [6, END, 0, 0], [4, 5, 6, 0]], "int32")
PROMPTS = np.array([[START, 5, 6], [START, 0, 0], [0, START, 7], [START, 9, 0]], "int32")


@slow_on_jax
@of_all
@pytest.mark.parametrize("width", [1, 3])
def test_a_packed_model_writes_the_same(make, width):
    results = []
    for model in make():
        generate = kt.Generator(model, max_length=6, width=width, n=min(width, 2))
        sources = {"source": SOURCES} if len(model.inputs) == 2 else None
        results.append(
            jitted(lambda generate=generate, sources=sources: generate(sources, PROMPTS, no_repeat_ngram=1))()
        )
    plain, packed = ({name: np.array(value) for name, value in found.items()} for found in results)
    np.testing.assert_array_equal(packed["ids"], plain["ids"])
    np.testing.assert_array_equal(packed["length"], plain["length"])
    np.testing.assert_allclose(packed["score"], plain["score"], rtol=1e-4)
    assert len({tuple(ids) for ids in plain["ids"][:, 0].tolist()}) > 2


def test_a_packed_model_scores_the_same():
    target = np.array([[7, 8, END, 0], [9, END, 0, 0], [6, 5, 4, 10], [END, 0, 0, 0]], "int32")
    plain, packed = (kt.Generator(model, max_length=6) for model in transformers())
    expected = jitted(lambda: plain.score({"source": SOURCES}, target))()
    close(jitted(lambda: packed.score({"source": SOURCES}, target))()["token_scores"], expected["token_scores"])


@of_all
def test_saving_changes_no_number(make, tmp_path):
    _, packed = make()
    packed.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras", safe_mode=True)
    inputs = inputs_of(packed, ROWS)
    np.testing.assert_array_equal(array(again(inputs)), array(packed(inputs)))


@pytest.mark.slow
@text_is_tensorflows
def test_a_translator_of_a_packed_model_is_that_of_the_plain_one_also_saved_and_exported(tmp_path):
    import tensorflow as tf

    words = [f"w{i}" for i in range(12)]
    tokenizer = kt.Tokenizer.train([" ".join(words)], kind="word")
    plain, packed = (
        kt.Translator(
            model, tokenizer, tokenizer, max_length=6, width=3, n=2, options={"alignment": True, "no_repeat_ngram": 1}
        )
        for model in transformers()
    )
    texts = ["w1 w2", "", "w3 w4 w5 w6", "w7"]
    expected = plain(tf.constant(texts))
    found = packed(tf.constant(texts))
    packed.save(tmp_path / "translator.keras")
    packed.export(tmp_path / "exported")
    reloaded = keras.saving.load_model(tmp_path / "translator.keras")(tf.constant(texts))
    exported = tf.saved_model.load(str(tmp_path / "exported")).signatures["serving_default"](text=tf.constant(texts))
    for answer in (found, reloaded, exported):
        np.testing.assert_array_equal(answer["text"], expected["text"])
        np.testing.assert_array_equal(answer["alignment"], expected["alignment"])
        np.testing.assert_allclose(answer["score"], expected["score"], rtol=1e-4)
    assert len(set(np.array(expected["text"]).ravel().tolist())) > 2


# ---- segment numbers


def segments_by_loop(ids, start_id=None, end_id=None):
    numbers = []
    for row in ids:
        number, ended, found = 0, True, []
        for token in row:
            if token == 0:
                found.append(0)
                continue
            number += (ended if start_id is None else token == start_id) or number == 0
            ended = token == end_id
            found.append(number)
        numbers.append(found)
    return numbers


@pytest.mark.parametrize(
    ("options", "row", "numbers"),
    [
        ({"start_id": 2}, [2, 7, 8, 2, 9, 0], [1, 1, 1, 2, 2, 0]),
        ({"start_id": 2}, [2, 2, 2, 7, 0, 0], [1, 2, 3, 3, 0, 0]),
        ({"start_id": 2}, [7, 8, 2, 9, 2, 6], [1, 1, 2, 2, 3, 3]),
        ({"start_id": 2}, [7, 8, 9, 3, 9, 0], [1, 1, 1, 1, 1, 0]),
        ({"start_id": 2}, [0, 0, 2, 7, 2, 8], [0, 0, 1, 1, 2, 2]),
        ({"start_id": 2}, [0, 7, 2, 7, 0, 8], [0, 1, 2, 2, 0, 2]),
        ({"end_id": 3}, [7, 8, 3, 9, 3, 0], [1, 1, 1, 2, 2, 0]),
        ({"end_id": 3}, [3, 3, 7, 3, 0, 0], [1, 2, 3, 3, 0, 0]),
        ({"end_id": 3}, [7, 3, 8, 9, 0, 0], [1, 1, 2, 2, 0, 0]),
        ({"end_id": 3}, [7, 8, 9, 2, 9, 0], [1, 1, 1, 1, 1, 0]),
        ({"end_id": 3}, [0, 7, 3, 0, 8, 3], [0, 1, 1, 0, 2, 2]),
        ({"end_id": 3}, [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]),
        ({"start_id": 2}, [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]),
        ({"start_id": 5, "pad_id": 9}, [5, 0, 7, 5, 9, 9], [1, 1, 1, 2, 0, 0]),
        ({"end_id": 5, "pad_id": 9}, [0, 7, 5, 6, 9, 9], [1, 1, 1, 2, 0, 0]),
    ],
)
@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8"])
def test_segments_are_numbered_from_1(options, row, numbers, dtype):
    found = kt.SegmentIds(**options)(np.array([row], dtype))
    assert keras.backend.standardize_dtype(found.dtype) == "int32"
    assert np.array(found).tolist() == [numbers]


@pytest.mark.parametrize("options", [{"start_id": START}, {"end_id": END}], ids=["start", "end"])
@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.sampled_from([0, 2, 3, 7]), min_size=7, max_size=7), min_size=3, max_size=3))
def test_segments_are_those_of_a_loop(options, ids):
    assert np.array(kt.SegmentIds(**options)(np.array(ids, "int32"))).tolist() == segments_by_loop(ids, **options)


@pytest.mark.parametrize("shape", [(0, 5), (2, 1), (2, 0)])
def test_segments_of_few_ids(shape):
    for options in ({"start_id": START}, {"end_id": END}):
        found = np.array(kt.SegmentIds(**options)(np.full(shape, 7, "int32")))
        np.testing.assert_array_equal(found, np.ones(shape))


def test_many_segments_are_counted_exactly_in_half_precision():
    keras.config.set_dtype_policy("mixed_bfloat16")
    ids = np.full((1, 1000), START, "int32")
    found = kt.SegmentIds(start_id=START)(ids)
    assert np.array(found).tolist() == [list(range(1, 1001))]


def test_in_a_decoding_scope_what_is_written_is_one_segment():
    ids = np.array([[2, 7, 2, 3, 8, 0]], "int32")
    for options in ({"start_id": START}, {"end_id": END}):
        with kt.DecodingScope(None, index=np.array([0]), length=6):
            assert np.array(kt.SegmentIds(**options)(ids)).tolist() == [[1, 1, 1, 1, 1, 0]]


@pytest.mark.parametrize("options", [{"start_id": np.int64(2)}, {"end_id": 3, "pad_id": 9}])
def test_configurations_come_back(options):
    for dtype in ("float16", keras.DTypePolicy("mixed_bfloat16")):
        layer = kt.SegmentIds(**options, name="numbers", dtype=dtype)
        config = keras.saving.serialize_keras_object(layer)
        again = keras.saving.deserialize_keras_object(config)
        assert again.get_config() == layer.get_config()
        assert again.name == "numbers" and again.dtype_policy.name == layer.dtype_policy.name
        ids = np.array([[2, 7, 3, 2, 9, 0]], "int32")
        np.testing.assert_array_equal(again(ids), layer(ids))


@pytest.mark.parametrize("options", [{}, {"start_id": 2, "end_id": 3}])
def test_segments_begin_or_end_with_a_token(options):
    with pytest.raises(ValueError, match="One of `start_id` and `end_id` must be given; got"):
        kt.SegmentIds(**options)


@pytest.mark.parametrize("ids", [np.ones((1, 3)), np.ones((1, 3), bool), np.ones(3, "int32"), np.ones((1, 3, 1), int)])
def test_segments_are_of_ids(ids):
    with pytest.raises(ValueError, match=r"`ids` must be integers of shape \[B, T\]; got"):
        kt.SegmentIds(start_id=2)(ids)


# ---- positions


def positions_by_loop(segments):
    found = []
    for row in segments:
        positions = []
        for i, number in enumerate(row):
            positions.append(positions[-1] + 1 if i and row[i - 1] == number else 0)
        found.append(positions)
    return np.array(found, "int32").reshape(np.shape(segments))


SHAPES = [(0, 6), (1, 6), (3, 6), (2, 1), (2, 0)]


def compiled(**options):
    """`positions_within` as one graph for all shapes on TensorFlow, for each on JAX."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.function(positions_within, input_signature=[tf.TensorSpec([None, None], tf.int32)], **options)
    return jitted(positions_within)


@pytest.fixture(scope="module", params=["eager", "graph", "XLA"])
def positions_of(request):
    if BACKEND != "tensorflow" and request.param != "eager":
        pytest.skip("on JAX every graph is XLA's") if request.param == "graph" else None
    return positions_within if request.param == "eager" else compiled(jit_compile=request.param == "XLA")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_positions_are_those_of_a_loop(positions_of, shape, data):
    number = st.integers(0, 3)
    rows = data.draw(st.lists(st.lists(number, min_size=shape[1], max_size=shape[1]), min_size=shape[0]).map(np.array))
    segments = np.resize(rows.astype("int32"), shape) if shape[0] and shape[1] else np.zeros(shape, "int32")
    found = positions_of(ops.convert_to_tensor(segments))
    assert keras.backend.standardize_dtype(found.dtype) == "int32"
    np.testing.assert_array_equal(np.array(found), positions_by_loop(segments.tolist()).reshape(shape))


def test_encodings_start_anew_in_each_segment(rng):
    layer = kt.PositionalEncoding()
    x = ops.convert_to_tensor(rng.normal(size=(2, 6, 8)), "float32")
    segments = np.array([[1, 1, 1, 2, 2, 0], [1, 2, 2, 2, 2, 2]], "int32")
    encoding = layer(ops.zeros((1, 6, 8)))[0]
    expected = np.array(encoding)[[[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 4]]]
    close(layer(x, segment_ids=segments) - x, expected, atol=1e-6)


def test_positions_in_half_precision_are_exact_before_they_are_rounded():
    keras.config.set_dtype_policy("mixed_bfloat16")
    segments = np.repeat([[1, 2]], 1000, axis=1).astype("int32")
    x = ops.zeros((1, 2000, 8), "bfloat16")
    found = array(kt.PositionalEncoding()(x, segment_ids=segments))[0]
    alone = array(kt.PositionalEncoding()(x[:, :1000]))[0]
    np.testing.assert_array_equal(found, np.concatenate([alone, alone]))


def test_in_a_decoding_scope_positions_go_on_whatever_the_segments():
    layer = kt.PositionalEncoding()
    table = np.array(layer(ops.zeros((1, 9, 8))))[0]
    with kt.DecodingScope(None, index=np.array([0, 3]), length=9):
        found = layer(ops.zeros((2, 2, 8)), segment_ids=np.array([[1, 2], [1, 1]], "int32"))
    close(found, np.stack([table[:2], table[3:5]]), atol=1e-6)


# ---- attention


def test_weights_are_0_outside_the_own_segment(rng):
    x = ops.convert_to_tensor(rng.normal(size=(1, 6, 8)), "float32")
    context = ops.convert_to_tensor(rng.normal(size=(1, 4, 8)), "float32")
    own, others = np.array([[1, 1, 2, 2, 2, 0]], "int32"), np.array([[2, 1, 1, 0]], "int64")
    _, weights = kt.MultiHeadSelfAttention(2)(x, segment_ids=own, return_attention_scores=True)
    assert np.array_equal(np.array(weights)[0, 1] > 0, own[0][:, None] == own[0])
    _, weights = kt.MultiHeadSelfAttention(2, causal=True)(x, segment_ids=own, return_attention_scores=True)
    assert np.array_equal(np.array(weights)[0, 1] > 0, np.tril(own[0][:, None] == own[0]))
    _, weights = kt.MultiHeadCrossAttention(2)(
        x, context, segment_ids=own, context_segment_ids=others, return_attention_scores=True
    )
    assert np.array_equal(np.array(weights)[0, 1] > 0, own[0][:, None] == others[0])


def test_segments_masks_and_padding_act_together(rng):
    x = ops.convert_to_tensor(rng.normal(size=(1, 6, 8)), "float32")
    segments = np.array([[1, 1, 2, 2, 2, 2]], "int32")
    padding = np.array([[1, 1, 1, 1, 1, 0]], bool)
    mask = rng.random((6, 6)) < 0.7
    _, weights = kt.MultiHeadSelfAttention(2)(
        x, padding_mask=padding, attention_mask=mask, segment_ids=segments, return_attention_scores=True
    )
    expected = (segments[0][:, None] == segments[0]) & padding[0] & mask
    assert np.array_equal(np.array(weights)[0, 0] > 0, expected)


def test_a_query_whose_segment_has_no_key_gives_the_bias(rng):
    x = ops.convert_to_tensor(rng.normal(size=(1, 2, 8)), "float32")
    layer = kt.MultiHeadCrossAttention(2)
    output = layer(x, x, segment_ids=np.array([[1, 3]], "int32"), context_segment_ids=np.array([[1, 1]], "int32"))
    close(output[0, 1], layer.output_projection.bias, atol=0)


X = np.ones((1, 3, 8), "float32")
GOOD = np.ones((1, 3), "int32")
WRONG = [
    (np.ones((1, 3), "float32"), "float32 of shape"),
    (np.ones((1, 3), bool), "bool of shape"),
    (np.ones(3, "int32"), r"of shape \(3,\)"),
    (np.ones((1, 3, 1), "int32"), r"of shape \(1, 3, 1\)"),
    (np.ones((1, 4), "int32"), r"of shape \(1, 4\)"),
]


@pytest.mark.parametrize(("segments", "got"), WRONG)
@pytest.mark.parametrize(
    "call",
    [
        lambda segments: kt.PositionalEncoding()(X, segment_ids=segments),
        lambda segments: kt.MultiHeadSelfAttention(2)(X, segment_ids=segments),
        lambda segments: kt.EncoderBlock(2, 16)(X, segment_ids=segments),
        lambda segments: kt.DecoderBlock(2, 16)(X, segment_ids=segments),
        lambda segments: kt.MultiHeadCrossAttention(2)(X, X, segment_ids=segments, context_segment_ids=GOOD),
        lambda segments: kt.MultiHeadCrossAttention(2)(X, X, segment_ids=GOOD, context_segment_ids=segments),
        lambda segments: kt.DecoderBlock(2, 16)(X, X, segment_ids=GOOD, context_segment_ids=segments),
    ],
    ids=["positions", "self", "encoder", "decoder", "cross", "context", "decoder's context"],
)
def test_segments_that_are_not_integers_of_a_row_are_refused(call, segments, got):
    with pytest.raises(ValueError, match=rf"segment_ids` must be integers of shape \[B, 3\]; got .*{got}"):
        call(segments)


def test_wrong_segments_of_the_context_are_named():
    with pytest.raises(ValueError, match="`context_segment_ids` must be integers"):
        kt.MultiHeadCrossAttention(2)(X, X, segment_ids=GOOD, context_segment_ids=GOOD[:, :2])


@pytest.mark.parametrize("names", [["segment_ids"], ["context_segment_ids"]])
@pytest.mark.parametrize("layer", [lambda: kt.MultiHeadCrossAttention(2), lambda: kt.DecoderBlock(2, 16)])
def test_segments_of_one_side_alone_are_refused(layer, names):
    with pytest.raises(ValueError, match="Segments must be given for queries and keys, or for neither; got"):
        layer()(X, X, **dict.fromkeys(names, GOOD))
