"""Writing with a cache gives what the model itself says of every prefix; the search gives what a plain loop does."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_transformer as kt

IS_TENSORFLOW = keras.backend.backend() == "tensorflow"
PAD, START, END = 0, 2, 3
VOCAB, WIDTH = 11, 16


def in_graph(function, **options):
    """`function` as one graph of the backend."""
    if IS_TENSORFLOW:
        import tensorflow as tf

        return tf.function(function, **options)
    import jax

    return jax.jit(function)


def as_numpy(found):
    return {name: np.array(value) for name, value in found.items()}


def assert_same(found, expected, rtol=1e-4):
    found, expected = as_numpy(found), as_numpy(expected)
    np.testing.assert_array_equal(found["ids"], expected["ids"])
    np.testing.assert_array_equal(found["length"], expected["length"])
    np.testing.assert_allclose(found["score"], expected["score"], rtol=rtol, atol=1e-5)


# ---- the search, on tables of what follows what


def markov(table):
    """A step whose next token depends on the token alone."""

    def step(tokens, index, cache):
        return ops.take(ops.convert_to_tensor(table), tokens, axis=0), cache

    return step


def plain_loop(next_logits, batch, max_length, end_id=END, pad_id=PAD):
    """Greedy search, one row and one token at a time. `next_logits(row, tokens so far)` is `[V]`."""
    ids, scores = np.full((batch, max_length), pad_id), np.zeros(batch)
    for row in range(batch):
        for i in range(max_length):
            logits = np.array(next_logits(row, ids[row, :i]), dtype="float64")
            log_probs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
            token = max((t for t in range(len(logits)) if t != pad_id), key=lambda t: (logits[t], -t))
            ids[row, i] = token
            scores[row] += log_probs[token]
            if token == end_id:
                break
    return {"ids": ids, "score": scores, "length": (ids != pad_id).sum(1)}


def of_table(table, starts, **arguments):
    def next_logits(row, written):
        return table[written[-1] if len(written) else starts[row]]

    return plain_loop(next_logits, len(starts), **arguments)


@pytest.mark.parametrize("seed", range(60))
def test_greedy_is_a_plain_loop_also_where_tokens_tie(seed):
    random = np.random.default_rng(seed)
    size = 6
    table = (random.integers(0, 3, (size, size)) if seed % 2 else 2 * random.normal(size=(size, size))).astype(
        "float32"
    )
    table[:, END] += random.choice([-2, 0, 1])
    starts = random.integers(0, size, 4)
    found = kt.greedy(markov(table), starts[:, None], max_length=5)
    assert_same(found, of_table(table, starts, max_length=5))


@pytest.mark.parametrize(("end_id", "pad_id"), [(5, 0), (0, 5), (1, 4)])
def test_greedy_takes_any_ids_for_end_and_padding(rng, end_id, pad_id):
    table = rng.normal(size=(6, 6)).astype("float32")
    starts = np.arange(6)
    found = kt.greedy(markov(table), starts[:, None], 5, end_id, pad_id)
    assert_same(found, of_table(table, starts, max_length=5, end_id=end_id, pad_id=pad_id))


def test_greedy_is_the_same_in_a_graph(rng):
    table = rng.normal(size=(8, 8)).astype("float32")
    starts = np.arange(8, dtype="int32")[:, None]
    compiled = in_graph(lambda prompt: kt.greedy(markov(table), prompt, max_length=6))
    assert_same(compiled(ops.convert_to_tensor(starts)), kt.greedy(markov(table), starts, max_length=6), rtol=1e-6)


def cycle(*steps, size=8):
    """A table in which one token surely follows another, from `(before, after)` pairs."""
    table = np.zeros((size, size), "float32")
    for before, after in steps:
        table[before, after] = 10
    return table


def test_behind_the_end_is_only_padding_and_the_score_ends_there():
    table = cycle((4, 5), (5, END), (END, 6), (6, 6))
    found = as_numpy(kt.greedy(markov(table), [[4], [5], [6]], max_length=5))
    assert found["ids"].tolist() == [[5, END, 0, 0, 0], [END, 0, 0, 0, 0], [6, 6, 6, 6, 6]]
    assert found["length"].tolist() == [2, 1, 5]
    likely = 10 - np.log(np.exp(10) + 7)
    np.testing.assert_allclose(found["score"], [2 * likely, likely, 5 * likely], atol=1e-5)


def test_rows_do_not_touch_each_other(rng):
    table = rng.normal(size=(8, 8)).astype("float32")
    starts = np.arange(8)[:, None]
    together = as_numpy(kt.greedy(markov(table), starts, max_length=6))
    for row in range(8):
        alone = as_numpy(kt.greedy(markov(table), starts[row : row + 1], max_length=6))
        assert_same(alone, {name: value[row : row + 1] for name, value in together.items()}, rtol=1e-6)


def test_padding_is_never_chosen():
    table = np.zeros((5, 5), "float32")
    table[:, PAD] = 50
    table[:, 4] = 1
    found = as_numpy(kt.greedy(markov(table), [[4]], max_length=3))
    assert found["ids"].tolist() == [[4, 4, 4]]
    assert np.all(found["score"] < -140)  # padding keeps its probability, which others lack


@pytest.mark.parametrize("longest", [1, 2, 5, 20])
def test_the_search_stops_when_every_row_has_ended(longest):
    table = cycle(*((i, i + 1) for i in range(10, 30)), (30, END), size=32)
    calls = []

    def count():
        calls.append(1)

    def step(tokens, index, cache):
        if IS_TENSORFLOW:
            count()
        else:
            import jax

            jax.debug.callback(count)
        return markov(table)(tokens, index, cache)

    found = as_numpy(kt.greedy(step, [[30], [31 - longest]], max_length=10))
    if not IS_TENSORFLOW:
        import jax

        jax.effects_barrier()
    assert len(calls) == min(longest, 10)
    assert found["length"].tolist() == [1, min(longest, 10)]


@pytest.mark.parametrize("max_length", [1, 3])
def test_a_row_without_an_end_is_as_long_as_it_may_be(max_length):
    found = as_numpy(kt.greedy(markov(cycle((4, 5), (5, 4))), [[4]], max_length))
    assert found["ids"].tolist() == [[5, 4, 5][:max_length]] and found["length"].tolist() == [max_length]


@pytest.mark.parametrize("length", [1, 3])
def test_a_prompt_is_continued_at_its_place(length):
    seen = []

    def next_is_the_position(tokens, index, cache):
        seen.append(tuple(tokens.shape))
        positions = index[:, None] + ops.arange(tokens.shape[1], dtype="int32")
        return 9.0 * ops.one_hot(positions + 4, 16), cache

    prompt = np.full((2, length), 9)
    found = as_numpy(kt.greedy(next_is_the_position, prompt, max_length=4))
    assert found["ids"].tolist() == [[4 + length - 1 + i for i in range(4)]] * 2
    assert seen[0] == (2, length) and set(seen[1:]) == {(2, 1)}


def test_the_cache_goes_from_step_to_step():
    def step(tokens, index, cache):
        cache = {"sum": ops.cast(tokens[:, -1], "int32") + (0 if cache is None else cache["sum"])}
        return 9.0 * ops.one_hot(cache["sum"][:, None] + 4, 40), cache

    # 4 + the sum of all tokens before
    found = as_numpy(kt.greedy(step, [[1], [2]], max_length=3))
    assert found["ids"].tolist() == [[5, 10, 20], [6, 12, 24]]


@pytest.mark.parametrize("max_length", [0, -1, 2.5])
def test_a_length_that_is_no_number_of_tokens_is_refused(max_length):
    with pytest.raises(ValueError, match=f"`max_length` must be a whole number of at least 1; got {max_length}"):
        kt.greedy(markov(np.zeros((4, 4), "float32")), [[1]], max_length)


# ---- models to write with


def built(tie_embeddings, norm_first):
    return kt.build_transformer(
        VOCAB,
        d_model=WIDTH,
        num_layers=1,
        num_heads=2,
        intermediate_dim=16,
        dropout=0.1,
        tie_embeddings=tie_embeddings,
        norm_first=norm_first,
    )


def ids_input(name):
    return keras.Input((None,), dtype="int32", name=name)


def embedded(ids, embedding=None, **options):
    return kt.PositionalEncoding()((embedding or kt.TokenEmbedding(VOCAB, WIDTH, **options))(ids))


def encoder_block(x, **options):
    return kt.EncoderBlock(2, 16, **options)(x)


def decoder_block(y, context=None, **options):
    return kt.DecoderBlock(2, 16, **options)(y, context)


def by_hand():
    source, target = ids_input("source"), ids_input("target")
    embedding = kt.TokenEmbedding(VOCAB, WIDTH)
    x, y = encoder_block(embedded(source, embedding)), embedded(target, embedding)
    for _ in range(2):
        y = decoder_block(y, x)
    return keras.Model({"source": source, "target": target}, embedding(y, reverse=True))


def two_sources_in_a_row():
    first, second, target = ids_input("source"), ids_input("other"), ids_input("target")
    memory = keras.layers.Concatenate(axis=1)([encoder_block(embedded(first)), encoder_block(embedded(second))])
    logits = keras.layers.Dense(VOCAB)(decoder_block(embedded(target), memory))
    return keras.Model({"source": first, "other": second, "target": target}, logits)


def two_sources_in_two_attentions():
    first, second, target = ids_input("source"), ids_input("other"), ids_input("target")
    y = decoder_block(embedded(target), encoder_block(embedded(first)))
    attention = kt.MultiHeadCrossAttention(num_heads=2)(y, encoder_block(embedded(second)))
    y = keras.layers.LayerNormalization()(keras.layers.Add()([y, attention]))
    return keras.Model({"source": first, "other": second, "target": target}, keras.layers.Dense(VOCAB)(y))


def layers_between():
    source, target = ids_input("source"), ids_input("target")
    x = keras.layers.LayerNormalization()(encoder_block(embedded(source), norm_first=True))
    y = embedded(target)
    for _ in range(2):
        z = decoder_block(y, x, norm_first=True)
        z = keras.layers.Dropout(0.5)(
            keras.layers.Dense(WIDTH, activation="tanh")(keras.layers.LayerNormalization()(z))
        )
        y = keras.layers.Add()([y, z])
    return keras.Model({"source": source, "target": target}, keras.layers.Dense(VOCAB)(ops.multiply(y, 2.0)))


def one_block_twice():
    source, target = ids_input("source"), ids_input("target")
    x, y, block = encoder_block(embedded(source)), embedded(target), kt.DecoderBlock(2, 16)
    return keras.Model({"source": source, "target": target}, keras.layers.Dense(VOCAB)(block(block(y, x), x)))


def nested_models():
    vectors, memory = keras.Input((None, WIDTH)), keras.Input((None, WIDTH))
    inner = keras.Model([vectors, memory], decoder_block(vectors, memory), name="inner")
    outer = keras.Model([vectors, memory], decoder_block(inner([vectors, memory]), memory), name="outer")
    source, target = ids_input("source"), ids_input("target")
    encoder = keras.Model(source, encoder_block(embedded(source, mask_zero=False)), name="reader")
    y = outer([embedded(target, mask_zero=False), encoder(source)])  # Keras ends a mask at a nested model, and warns
    head = keras.Sequential([keras.layers.LayerNormalization(), keras.layers.Dense(VOCAB)])
    return keras.Model({"source": source, "target": target}, head(y))


def features():
    frames, target = keras.Input((None, 8), name="source"), ids_input("target")
    x = encoder_block(kt.PositionalEncoding()(keras.layers.Dense(WIDTH)(frames)))
    y = decoder_block(decoder_block(embedded(target)), x)  # one block without a context
    return keras.Model({"source": frames, "target": target}, keras.layers.Dense(VOCAB)(y))


def pooled_source():
    source, target = ids_input("source"), ids_input("target")
    x = keras.layers.GlobalAveragePooling1D()(encoder_block(embedded(source)))
    y = keras.layers.Add()([embedded(target), keras.layers.Reshape((1, WIDTH))(x)])
    y = kt.FeedForward(16)(kt.MultiHeadSelfAttention(2, causal=True)(y))
    return keras.Model({"source": source, "target": target}, keras.layers.Dense(VOCAB)(y))


def conditions_in_the_middle():
    """The source is looked at by layers that also see the target, one of them an operation."""
    source, target = ids_input("source"), ids_input("target")
    embedding = kt.TokenEmbedding(VOCAB, WIDTH, tie_weights=False)
    x = embedding(source)
    y = decoder_block(embedding(target), x)
    y = decoder_block(y + ops.mean(x, axis=1, keepdims=True), encoder_block(x))
    return keras.Model({"source": source, "target": target}, embedding(y, reverse=True))


MODELS = {
    "built, one table": lambda: built("all", False),
    "built, pre-norm, target's table": lambda: built("target", True),
    "built, no table shared": lambda: built("none", False),
    "built, pre-norm, one table": lambda: built("all", True),
    "by hand": by_hand,
    "two sources in a row": two_sources_in_a_row,
    "two sources in two attentions": two_sources_in_two_attentions,
    "layers between": layers_between,
    "one block twice": one_block_twice,
    "nested models": nested_models,
    "features": features,
    "pooled source": pooled_source,
    "conditions in the middle": conditions_in_the_middle,
}


def lively(model, seed=1):
    """`model` with weights in which positions and other tokens count more than the token itself, for varied outputs."""
    random = np.random.default_rng(seed)
    for variable in model.trainable_variables:
        if len(variable.shape) == 2:
            size = 0.5 if "embedding" in variable.path else 1.5
            variable.assign(random.normal(size=variable.shape, scale=size * variable.shape[-1] ** -0.5))
    return model


def some_sources(model, rng, batch=5, length=4):
    """Inputs beside the target, padded behind where they are ids."""
    sources = {}
    for tensor in model.inputs:
        if tensor.name != "target":
            ids = rng.integers(1, VOCAB, (batch, length)).astype("int32")
            ids[1, 2:], ids[2, 1:] = 0, 0
            is_ids = keras.backend.is_int_dtype(tensor.dtype)
            sources[tensor.name] = ids if is_ids else rng.normal(size=(batch, length, 8)).astype("float32")
    return sources


def rerun(model, sources, max_length, forward=None):
    """The reference: the whole model on each row's prefix, padded behind, with no cache."""
    forward = forward or in_graph(lambda inputs: model(inputs))
    batch = len(next(iter(sources.values())))
    target = np.zeros((batch, max_length), "int32")
    target[:, 0] = START
    done, ids, score = np.zeros(batch, bool), np.zeros((batch, max_length), "int64"), np.zeros(batch)
    for i in range(max_length):
        inputs = {name: ops.convert_to_tensor(value) for name, value in {**sources, "target": target}.items()}
        log_probs = np.array(ops.log_softmax(ops.cast(forward(inputs)[:, i], "float32")))
        log_probs[:, PAD] = -np.inf
        token = np.where(done, PAD, log_probs.argmax(-1))
        score += np.where(done, 0, log_probs.max(-1))
        ids[:, i] = token
        done |= token == END
        if i + 1 < max_length:
            target[:, i + 1] = token
    return {"ids": ids, "score": score, "length": (ids != PAD).sum(1)}


@pytest.mark.parametrize("name", MODELS)
def test_writing_with_a_cache_is_rerunning_the_model_on_each_prefix(name, rng):
    model = lively(MODELS[name]())
    sources = some_sources(model, rng)
    generate = kt.Generator(model, max_length=7)
    expected = rerun(model, sources, 7)
    assert_same(in_graph(generate)({n: ops.convert_to_tensor(v) for n, v in sources.items()}), expected)
    if IS_TENSORFLOW or name == "by hand":  # JAX compiles the loop anyway
        assert_same(generate(sources), expected)
    assert np.ptp(expected["score"]) > 0.01  # it looks at the source


@pytest.mark.slow
@pytest.mark.skipif(not IS_TENSORFLOW, reason="JAX always compiles with XLA")
@pytest.mark.parametrize("name", ["built, one table", "two sources in a row"])
def test_writing_under_xla_gives_the_same(name, rng):
    model = lively(MODELS[name]())
    sources = some_sources(model, rng)
    generate = kt.Generator(model, max_length=5)
    found = in_graph(generate, jit_compile=True)({n: ops.convert_to_tensor(v) for n, v in sources.items()})
    assert_same(found, rerun(model, sources, 5))


@pytest.mark.skipif(not IS_TENSORFLOW, reason="JAX has no dynamic shapes")
def test_one_graph_serves_every_number_and_length_of_sources(rng):
    import tensorflow as tf

    model = lively(by_hand())
    generate = kt.Generator(model, max_length=5)
    compiled = tf.function(generate, input_signature=[{"source": tf.TensorSpec([None, None], tf.int32)}])
    for batch, length in ((5, 4), (3, 9), (4, 2)):
        sources = some_sources(model, rng, batch, length)
        assert_same(compiled({"source": tf.constant(sources["source"])}), rerun(model, sources, 5))
    assert compiled({"source": tf.zeros((0, 4), tf.int32)})["ids"].shape == (0, 5)


def test_each_row_is_written_as_if_it_were_alone_and_unpadded(rng):
    model = lively(built("all", False))
    sources = some_sources(model, rng)
    generate = kt.Generator(model, max_length=6)
    together = as_numpy(generate(sources))
    for row in (1, 2):
        ids = sources["source"][row]
        alone = generate({"source": ids[None, ids != 0]})
        assert_same(alone, {name: value[row : row + 1] for name, value in together.items()})


def test_start_and_end_may_be_other_ids(rng):
    model = lively(built("all", False))
    sources = some_sources(model, rng)
    first = as_numpy(kt.Generator(model, max_length=6)(sources))
    end = int(first["ids"][0, 2])
    found = as_numpy(kt.Generator(model, max_length=6, end_id=end)(sources))
    row = first["ids"][0].tolist()
    stop = row.index(end) + 1
    assert found["ids"][0].tolist() == row[:stop] + [0] * (6 - stop)
    other_start = as_numpy(kt.Generator(model, max_length=6, start_id=7)(sources))
    assert np.all(np.abs(other_start["score"] - first["score"]) > 1e-3)


@pytest.mark.parametrize("policy", ["float16", "bfloat16", "mixed_float16"])
def test_half_precision_writes_what_the_model_thinks_best_within_its_rounding(policy, rng):
    keras.config.set_dtype_policy(policy)
    model = lively(built("all", True))
    sources = some_sources(model, rng)
    found = as_numpy(kt.Generator(model, max_length=6)(sources))
    target = np.concatenate([np.full((5, 1), START), found["ids"][:, :-1]], axis=1).astype("int32")
    inputs = {"target": ops.convert_to_tensor(target), "source": ops.convert_to_tensor(sources["source"])}
    log_probs = np.array(ops.log_softmax(ops.cast(model(inputs), "float32")))
    real = found["ids"] != 0
    chosen = np.take_along_axis(log_probs, found["ids"][..., None], axis=-1)[..., 0]
    assert np.all((log_probs[..., 1:].max(-1) - chosen)[real] < 0.1)
    assert found["score"].dtype == np.float32
    np.testing.assert_allclose(found["score"], (chosen * real).sum(1), rtol=0.02)


# ---- what cannot be written with


def mixing(layer):
    """A model whose decoder has `layer`, called on the target's vectors."""
    source, target = ids_input("source"), ids_input("target")
    y = embedded(target, mask_zero=False)  # Keras warns where a layer ends a mask
    y = keras.layers.Add(name="sum")([y, layer(y)])
    y = decoder_block(y, encoder_block(embedded(source)))
    return keras.Model({"source": source, "target": target}, keras.layers.Dense(VOCAB)(y))


def keras_attention(y):
    return keras.layers.MultiHeadAttention(2, 8, name="keras_attention")(y, y, use_causal_mask=True)


@pytest.mark.filterwarnings("ignore:.*softmax over axis")  # Keras's own layer, over a single token
@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("conv", lambda: keras.layers.Conv1D(WIDTH, 2, padding="causal", name="conv")),
        ("keras_attention", lambda: keras_attention),
        ("lstm", lambda: keras.layers.LSTM(WIDTH, return_sequences=True, name="lstm")),
        ("whole", lambda: kt.MultiHeadSelfAttention(2, name="whole")),
        ("encoder_block", lambda: kt.EncoderBlock(2, 16, name="encoder_block")),
        ("average", lambda: keras.layers.GlobalAveragePooling1D(keepdims=True, name="average")),
    ],
)
def test_a_layer_that_mixes_positions_without_the_cache_is_named(name, layer):
    with pytest.raises(ValueError, match=f"other values from layer '{name}'"):
        kt.Generator(mixing(layer()), max_length=4)


class Subclassed(keras.Model):
    pass


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: Subclassed(), "functional keras.Model with an input named 'target'.*; got Subclassed"),
        (lambda: keras.Sequential([keras.layers.Dense(3)]), "functional keras.Model.*; got Sequential"),
        (
            lambda: keras.Model(s := ids_input("source"), kt.TokenEmbedding(VOCAB, 4)(s)),
            r"an input named 'target'.*\['source'\]",
        ),
        (
            lambda: keras.Model(t := ids_input("target"), kt.TokenEmbedding(VOCAB, 4)(t)),
            r"other inputs.*\['target'\]",
        ),
        (
            lambda: keras.Model(
                {"target": (t := ids_input("target")), "source": ids_input("source")}, kt.TokenEmbedding(VOCAB, 4)(t)
            ),
            "must depend on 'target' and on another input",
        ),
        (
            lambda: keras.Model(
                {"target": ids_input("target"), "source": (s := ids_input("source"))}, kt.TokenEmbedding(VOCAB, 4)(s)
            ),
            "must depend on 'target' and on another input",
        ),
    ],
)
def test_other_models_are_refused(model, message):
    with pytest.raises(ValueError, match=message):
        kt.Generator(model(), max_length=4)


def test_a_generator_of_no_length_is_refused():
    with pytest.raises(ValueError, match="`max_length` must be a whole number of at least 1; got 0"):
        kt.Generator(by_hand(), max_length=0)


# ---- the model stays what it was


@pytest.mark.parametrize("name", ["built, one table", "by hand", "nested models"])
def test_a_generator_leaves_the_model_its_values_its_file_and_its_training(name, rng, tmp_path):
    model = lively(MODELS[name]())
    inputs = {**some_sources(model, rng), "target": rng.integers(1, VOCAB, (5, 3)).astype("int32")}
    inputs = {n: ops.convert_to_tensor(v) for n, v in inputs.items()}
    before, layers = np.array(model(inputs)), [layer.name for layer in model.layers]
    generate = kt.Generator(model, max_length=4)
    sources = {n: v for n, v in inputs.items() if n != "target"}
    first = as_numpy(generate(sources))
    np.testing.assert_array_equal(model(inputs), before)
    assert [layer.name for layer in model.layers] == layers

    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(again(inputs), before, atol=1e-6)
    assert_same(kt.Generator(again, max_length=4)(sources), first)

    model.compile(keras.optimizers.SGD(0.5), kt.TokenCrossentropy(), jit_compile=False)
    model.train_on_batch(inputs, np.full((5, 3), 5))
    assert np.abs(np.array(model(inputs)) - before).max() > 1e-3
    # and the generator writes with the weights as they are now
    assert_same(generate(sources), rerun(model, {n: np.array(v) for n, v in sources.items()}, 4))
