"""Writing with a cache gives what the whole model gives, run anew on a prefix that grows by a token."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_transformer as kt

BACKEND = keras.backend.backend()
VOCAB, WIDTH, LENGTH = 12, 8, 7
BLOCK = {"num_heads": 2, "intermediate_dim": 8, "dropout": 0.0}


def compiled(function):
    """`function` as one graph: `tf.function` or `jax.jit`."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.function(function)
    jax = pytest.importorskip("jax")
    return jax.jit(function)


def plain(found):
    return {name: np.asarray(value) for name, value in found.items()}


def log_softmax(logits):
    logits = np.asarray(logits, "float64")
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def assert_same(found, expected, rtol=1e-4):
    found = plain(found)
    np.testing.assert_array_equal(found["ids"], expected["ids"])
    np.testing.assert_array_equal(found["length"], expected["length"])
    np.testing.assert_allclose(found["score"], expected["score"], rtol=rtol, atol=1e-4)


# greedy


def markov(table):
    """A step whose logits are the rows of its last tokens."""

    def step(tokens, index, cache):
        return ops.take(table, tokens, axis=0), cache

    return step


def plain_greedy(table, prompt, max_length, end_id=3, pad_id=0):
    """`greedy` on a Markov table, in Python."""
    ids = np.full((len(prompt), max_length), pad_id)
    score, length = np.zeros(len(prompt)), np.zeros(len(prompt), int)
    log_probs = log_softmax(table)
    allowed = np.arange(table.shape[1]) != pad_id
    for row, token in enumerate(prompt[:, -1]):
        for i in range(max_length):
            following = int(np.argmax(np.where(allowed, table[token], -np.inf)))
            score[row] += log_probs[token, following]
            ids[row, i] = token = following
            length[row] += 1
            if token == end_id:
                break
    return {"ids": ids, "score": score, "length": length}


@pytest.mark.parametrize("decimals", [None, 0], ids=["any", "ties"])
def test_greedy_is_a_plain_loop_over_a_markov_table(rng, decimals):
    def search(table, prompt):
        return kt.greedy(markov(table), prompt, LENGTH)

    if BACKEND == "jax":  # one compilation for all tables
        search = compiled(search)
    ended = []
    for _ in range(50):
        table = rng.normal(size=(VOCAB, VOCAB)).astype("float32")
        table = table if decimals is None else table.round(decimals)
        prompt = rng.integers(1, VOCAB, size=(5, 1)).astype("int32")
        found = search(table, prompt)
        assert_same(found, plain_greedy(table, prompt, LENGTH))
        ended += (np.asarray(found["ids"]) == 3).any(-1).tolist()
    assert 0.1 < np.mean(ended) < 0.9


def test_greedy_in_a_graph_is_greedy_outside(rng):
    table = rng.normal(size=(VOCAB, VOCAB)).astype("float32")
    prompt = rng.integers(1, VOCAB, size=(5, 1)).astype("int32")
    found = compiled(lambda prompt: kt.greedy(markov(table), prompt, LENGTH))(prompt)
    assert_same(found, plain_greedy(table, prompt, LENGTH))


@pytest.mark.parametrize("end_id, pad_id", [(3, 0), (0, 5)])
def test_behind_the_end_is_only_padding_and_the_length_counts_the_end(rng, end_id, pad_id):
    table = rng.normal(size=(VOCAB, VOCAB)).astype("float32")
    table[:, end_id] += 1
    prompt = np.arange(VOCAB, dtype="int32")[:, None]
    found = plain(kt.greedy(markov(table), prompt, LENGTH, end_id=end_id, pad_id=pad_id))
    assert_same(found, plain_greedy(table, prompt, LENGTH, end_id, pad_id))
    assert len(set(found["length"])) > 2
    for ids, length in zip(found["ids"], found["length"]):
        assert np.all(ids[length:] == pad_id) and pad_id not in ids[:length] and end_id not in ids[: length - 1]
        assert length == LENGTH or ids[length - 1] == end_id


def test_padding_is_never_chosen_though_its_logit_is_highest(rng):
    table = rng.normal(size=(VOCAB, VOCAB)).astype("float32")
    table[:, 0] = 9
    prompt = np.arange(VOCAB, dtype="int32")[:, None]
    found = plain(kt.greedy(markov(table), prompt, LENGTH))
    assert_same(found, plain_greedy(table, prompt, LENGTH))
    assert np.all(found["length"] >= 1) and np.all(found["ids"][:, 0] != 0)


def test_rows_do_not_depend_on_each_other(rng):
    table = rng.normal(size=(VOCAB, VOCAB)).astype("float32")
    prompt = rng.integers(1, VOCAB, size=(4, 1)).astype("int32")
    together = plain(kt.greedy(markov(table), prompt, LENGTH))
    alone = [plain(kt.greedy(markov(table), row[None], LENGTH)) for row in prompt]
    assert_same(together, {name: np.concatenate([a[name] for a in alone]) for name in together})


def counting(step):
    """`step`, and a list that grows with each time it runs."""
    calls = []

    def counted(tokens, index, cache):
        if BACKEND == "jax":
            import jax

            jax.debug.callback(lambda index: calls.append(np.asarray(index)), index)
        else:
            calls.append(np.asarray(index))
        return step(tokens, index, cache)

    def ran():
        if BACKEND == "jax":
            import jax

            jax.effects_barrier()
        return sorted(index.tolist() for index in calls)

    return counted, ran


def chain(*tokens):
    """A table in which each token is followed by the next, for certain."""
    table = np.zeros((VOCAB, VOCAB), "float32")
    table[list(tokens[:-1]), list(tokens[1:])] = 20
    return table


def test_it_stops_when_the_last_row_has_ended():
    step, ran = counting(markov(chain(4, 5, 6, 7, 3)))
    found = plain(kt.greedy(step, np.array([[6], [4]]), max_length=50))
    assert found["length"].tolist() == [2, 4]
    assert ran() == [[0, 0], [1, 1], [2, 2], [3, 3]]


def test_without_an_end_it_writes_max_length_tokens():
    step, ran = counting(markov(chain(4, 5, 6, 4)))
    found = plain(kt.greedy(step, np.array([[4]]), max_length=5))
    assert found["ids"].tolist() == [[5, 6, 4, 5, 6]] and found["length"].tolist() == [5]
    assert ran() == [[i] for i in range(5)]
    assert plain(kt.greedy(markov(chain(4, 5)), np.array([[4]]), max_length=1))["ids"].tolist() == [[5]]


def test_a_long_prompt_goes_in_at_once_and_is_continued_behind():
    step, ran = counting(markov(chain(4, 5, 6, 7, 3)))
    found = plain(kt.greedy(step, np.array([[9, 9, 4], [8, 4, 5]]), max_length=6))
    assert found["ids"].tolist() == [[5, 6, 7, 3, 0, 0], [6, 7, 3, 0, 0, 0]]
    assert ran() == [[0, 0], [3, 3], [4, 4], [5, 5]]


def test_the_cache_is_handed_from_step_to_step():
    def step(tokens, index, cache):
        """Writes how many tokens it has seen, on top of 4."""
        seen = (ops.zeros_like(index) if cache is None else cache["seen"]) + tokens.shape[1]
        logits = ops.repeat(20.0 * ops.one_hot(seen + 4, VOCAB)[:, None], tokens.shape[1], axis=1)
        return logits, {"seen": seen}

    assert plain(kt.greedy(step, np.array([[2, 2], [2, 2]]), max_length=4))["ids"].tolist() == [[6, 7, 8, 9]] * 2


@pytest.mark.parametrize("max_length", [0, -1, 2.5])
def test_a_length_below_one_is_refused(max_length):
    with pytest.raises(ValueError, match="`max_length` must be"):
        kt.greedy(markov(chain(4, 3)), np.array([[4]]), max_length)
    with pytest.raises(ValueError, match="`max_length` must be"):
        kt.Generator(implicit_masks(), max_length)


# models


def source_input(name="source"):
    return keras.Input((None,), dtype="int32", name=name)


def embedded(ids, **options):
    return kt.PositionalEncoding()(kt.TokenEmbedding(VOCAB, WIDTH, **options)(ids))


def encoded(ids):
    return kt.EncoderBlock(**BLOCK)(embedded(ids))


def implicit_masks():
    source, target = source_input(), source_input("target")
    y = kt.DecoderBlock(**BLOCK)(embedded(target), encoded(source))
    return keras.Model({"source": source, "target": target}, keras.layers.Dense(VOCAB)(y))


def list_of_inputs():
    source, target = source_input(), source_input("target")
    y = kt.DecoderBlock(**BLOCK)(embedded(target), encoded(source))
    return keras.Model([target, source], keras.layers.Dense(VOCAB)(y))


def concatenated_sources():
    one, two, target = source_input("one"), source_input("two"), source_input("target")
    memory = keras.layers.Concatenate(axis=1)([encoded(one), encoded(two)])
    y = kt.DecoderBlock(**BLOCK)(embedded(target), memory)
    return keras.Model({"one": one, "two": two, "target": target}, keras.layers.Dense(VOCAB)(y))


def sources_one_after_the_other():
    one, two, target = source_input("one"), source_input("two"), source_input("target")
    y = kt.DecoderBlock(**BLOCK)(embedded(target), encoded(one))
    y = kt.MultiHeadCrossAttention(2)(y, encoded(two))
    return keras.Model({"one": one, "two": two, "target": target}, keras.layers.Dense(VOCAB)(y))


def layers_between():
    source, target = source_input(), source_input("target")
    memory = encoded(source)
    first = kt.DecoderBlock(**BLOCK)(embedded(target), memory)
    y = keras.layers.LayerNormalization()(keras.layers.Dense(WIDTH, activation="tanh")(first))
    y = keras.layers.Add()([first, keras.layers.Dropout(0.5)(y)])
    y = kt.DecoderBlock(**BLOCK)(2.0 * y + 1.0, keras.layers.Dense(5)(memory))
    return keras.Model({"source": source, "target": target}, keras.layers.Dense(VOCAB)(y))


def one_block_twice():
    source, target = source_input(), source_input("target")
    memory, block = encoded(source), kt.DecoderBlock(**BLOCK)
    y = block(block(embedded(target), memory), memory)
    return keras.Model({"source": source, "target": target}, keras.layers.Dense(VOCAB)(y))


def nested_encoder():
    ids = source_input("ids")
    encoder = keras.Model(ids, encoded(ids), name="encoder")
    source, target = source_input(), source_input("target")
    memory = encoder(source)
    y = kt.DecoderBlock(**BLOCK)(embedded(target), memory, context_padding_mask=ops.not_equal(source, 0))
    return keras.Model({"source": source, "target": target}, keras.layers.Dense(VOCAB)(y))


def nested_decoder():
    vectors, context = keras.Input((None, WIDTH)), keras.Input((None, WIDTH))
    decoder = keras.Model([vectors, context], kt.DecoderBlock(**BLOCK)(vectors, context), name="decoder")
    source, target = source_input(), source_input("target")
    memory = kt.EncoderBlock(**BLOCK)(embedded(source, mask_zero=False))
    y = decoder([decoder([embedded(target, mask_zero=False), memory]), memory])
    return keras.Model({"source": source, "target": target}, keras.layers.Dense(VOCAB)(y))


def frames():
    source, target = keras.Input((None, 8), name="frames"), source_input("target")
    memory = kt.EncoderBlock(**BLOCK)(keras.layers.Conv1D(WIDTH, 3, padding="same")(source))
    y = kt.DecoderBlock(**BLOCK)(embedded(target), memory)
    return keras.Model({"frames": source, "target": target}, keras.layers.Dense(VOCAB)(y))


def frames_as_they_are():
    source, target = keras.Input((None, 8), name="frames"), source_input("target")
    y = kt.DecoderBlock(**BLOCK)(embedded(target), source)
    return keras.Model({"frames": source, "target": target}, keras.layers.Dense(VOCAB)(y))


def one_vector():
    source, target = source_input(), source_input("target")
    summary = keras.layers.GlobalAveragePooling1D()(encoded(source))
    y = kt.DecoderBlock(**BLOCK)(embedded(target, mask_zero=False) + summary[:, None])
    return keras.Model({"source": source, "target": target}, keras.layers.Dense(VOCAB)(y))


def sublayers_and_one_table():
    source, target = source_input(), source_input("target")
    table = kt.TokenEmbedding(VOCAB, WIDTH)
    memory = kt.MultiHeadSelfAttention(2)(kt.PositionalEncoding()(table(source)))
    y = kt.PositionalEncoding()(table(target))
    y = keras.layers.Add()([y, kt.MultiHeadSelfAttention(2, causal=True)(y)])
    y = keras.layers.Add()([y, kt.MultiHeadCrossAttention(2)(y, memory)])
    y = keras.layers.Add()([y, kt.FeedForward(8, gated=True)(y)])
    return keras.Model({"source": source, "target": target}, table(y, reverse=True))


COMPOSED = [
    implicit_masks,
    list_of_inputs,
    concatenated_sources,
    sources_one_after_the_other,
    layers_between,
    one_block_twice,
    nested_encoder,
    nested_decoder,
    frames,
    frames_as_they_are,
    one_vector,
    sublayers_and_one_table,
]


def built(**options):
    options = {"d_model": WIDTH, "num_layers": 1, **BLOCK, **options}
    return kt.build_transformer(VOCAB, **options)


def shaken(model):
    """The model with random weights, such that what it writes varies: most untrained ones repeat a token."""
    fresh = [ops.convert_to_numpy(weight) for weight in model.trainable_weights]
    for seed in range(20):
        rng = np.random.default_rng(seed)
        for weight, value in zip(model.trainable_weights, fresh):
            scale = 0.2 if "embedding" in weight.path else len(value) ** -0.5
            noise = rng.normal(size=value.shape)
            weight.assign(scale * noise if value.ndim > 1 else value + 0.1 * noise)
        if len(set(rerun(model, sources_of(model))["ids"].flatten())) > 2:
            return model
    raise AssertionError("each seed gave the same few tokens")


def sources_of(model, batch=4, tokens=5):
    """Random inputs, ids with padded rows."""
    rng = np.random.default_rng(7)
    sources = {}
    for tensor in model.inputs:
        if tensor.name != "target" and keras.backend.is_float_dtype(tensor.dtype):
            sources[tensor.name] = rng.normal(size=(batch, tokens, tensor.shape[-1])).astype("float32")
        elif tensor.name != "target":
            ids = rng.integers(1, VOCAB, size=(batch, tokens)).astype("int32")
            sources[tensor.name] = ids * (np.arange(tokens) < rng.integers(1, tokens + 1, size=(batch, 1)))
    return {name: value.astype("int32" if value.dtype == "int64" else value.dtype) for name, value in sources.items()}


def rerun(model, sources, max_length=LENGTH, start_id=2, end_id=3):
    """The whole model, once for each token, on everything written so far."""
    batch = len(next(iter(sources.values())))
    target = np.full((batch, 1), start_id, "int32")
    done, score = np.zeros(batch, bool), np.zeros(batch)
    for _ in range(max_length):
        inputs = {**sources, "target": target}
        ordered = inputs if isinstance(model.input, dict) else [inputs[tensor.name] for tensor in model.inputs]
        log_probs = log_softmax(ops.cast(model(ordered), "float32"))[:, -1]
        token = np.argmax(np.where(np.arange(VOCAB) == 0, -np.inf, log_probs), axis=-1)
        score += np.where(done, 0, log_probs[np.arange(batch), token])
        token = np.where(done, 0, token)
        target = np.concatenate([target, token[:, None].astype("int32")], axis=1)
        done |= token == end_id
    return {"ids": target[:, 1:], "score": score, "length": (target[:, 1:] != 0).sum(-1)}


# the generator


@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
@pytest.mark.parametrize("tie_embeddings", ["all", "target", "none"])
def test_a_built_transformer_writes_as_it_does_on_growing_prefixes(norm_first, tie_embeddings):
    model = shaken(built(norm_first=norm_first, tie_embeddings=tie_embeddings, num_layers=2))
    sources = sources_of(model)
    expected = rerun(model, sources)
    assert_same(kt.Generator(model, LENGTH)(sources), expected)


@pytest.mark.parametrize("compose", COMPOSED, ids=lambda compose: compose.__name__)
def test_a_composed_model_writes_as_it_does_on_growing_prefixes_also_in_a_graph(compose):
    model = shaken(compose())
    sources = sources_of(model)
    expected = rerun(model, sources)
    generate = kt.Generator(model, LENGTH)
    assert_same(generate(sources), expected)
    assert_same(compiled(lambda sources: generate(sources))(sources), expected)


def test_padding_of_the_source_changes_nothing():
    model = shaken(implicit_masks())
    generate = kt.Generator(model, LENGTH)
    source = np.array([[4, 5, 6]], "int32")
    padded = np.pad(source, [(0, 0), (0, 4)])
    assert_same(generate({"source": padded}), plain(generate({"source": source})))


def test_ids_of_start_and_end_are_the_callers():
    model = shaken(built())
    sources = sources_of(model)
    expected = rerun(model, sources, start_id=5, end_id=7)
    assert_same(kt.Generator(model, LENGTH, start_id=5, end_id=7)(sources), expected)


@pytest.mark.slow
@pytest.mark.skipif(BACKEND != "tensorflow", reason="on JAX every graph is XLA's")
@pytest.mark.parametrize("make", [built, implicit_masks, concatenated_sources], ids=lambda make: make.__name__)
def test_xla_writes_the_same(make):
    import tensorflow as tf

    model = shaken(make())
    sources = sources_of(model)
    generate = kt.Generator(model, LENGTH)
    found = tf.function(lambda sources: generate(sources), jit_compile=True)(sources)
    assert_same(found, rerun(model, sources))


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "bfloat16", "float16"])
@pytest.mark.parametrize("make", [built, implicit_masks], ids=lambda make: make.__name__)
def test_half_precision_writes_ids_with_finite_scores(policy, make):
    keras.config.set_dtype_policy(policy)
    model = make()
    found = plain(kt.Generator(model, LENGTH)(sources_of(model)))
    assert found["ids"].dtype == "int32" and found["score"].dtype == "float32" and found["length"].dtype == "int32"
    assert np.all(np.isfinite(found["score"])) and np.all(found["score"] < 0)
    assert np.all((found["ids"] >= 0) & (found["ids"] < VOCAB)) and np.all(found["length"] >= 1)


# models that cannot be cut, or cannot be run token by token


def mixed(mix, before=True):
    """A model whose target vectors go through `mix`, before or behind a block that knows the scope."""
    source, target = source_input(), source_input("target")
    y = embedded(target, mask_zero=False)
    block, memory = kt.DecoderBlock(**BLOCK), encoded(source)
    y = block(mix(y), memory) if before else mix(block(y, memory))
    return keras.Model({"source": source, "target": target}, keras.layers.Dense(VOCAB)(y))


def mix_by_attention(y):
    return keras.layers.MultiHeadAttention(2, 4, name="mixer")(y, y, use_causal_mask=True)


MIXERS = {
    "convolution": lambda y: keras.layers.Conv1D(WIDTH, 3, padding="causal", name="mixer")(y),
    "attention": mix_by_attention,
    "lstm": lambda y: keras.layers.LSTM(WIDTH, return_sequences=True, name="mixer")(y),
    "encoder block": lambda y: kt.EncoderBlock(**BLOCK, name="mixer")(y),
    "sum over positions": lambda y: keras.layers.Lambda(
        lambda y: ops.cumsum(y, axis=1), output_shape=lambda shape: shape, name="mixer"
    )(y),
}


@pytest.mark.parametrize("before", [True, False], ids=["before", "behind"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_a_layer_that_mixes_target_positions_is_refused_by_name(mixer, before):
    with pytest.raises(ValueError, match="from layer 'mixer'"):
        kt.Generator(mixed(MIXERS[mixer], before), LENGTH)


def test_a_subclassed_model_is_refused():
    class Subclassed(keras.Model):
        def call(self, inputs):
            return inputs["target"]

    with pytest.raises(ValueError, match="needs a functional keras.Model.*got Subclassed"):
        kt.Generator(Subclassed(), LENGTH)


def test_a_model_without_a_target_is_refused():
    source = source_input()
    model = keras.Model({"source": source}, keras.layers.Dense(VOCAB)(encoded(source)))
    with pytest.raises(ValueError, match=r"input named 'target'.*got Functional with inputs \['source'\]"):
        kt.Generator(model, LENGTH)


def test_a_model_without_another_input_is_refused():
    target = source_input("target")
    y = kt.DecoderBlock(**BLOCK)(embedded(target))
    with pytest.raises(ValueError, match="other inputs"):
        kt.Generator(keras.Model({"target": target}, keras.layers.Dense(VOCAB)(y)), LENGTH)


def test_a_model_of_two_outputs_is_refused():
    source, target = source_input(), source_input("target")
    y = kt.DecoderBlock(**BLOCK)(embedded(target), encoded(source))
    model = keras.Model({"source": source, "target": target}, [keras.layers.Dense(VOCAB)(y), y])
    with pytest.raises(ValueError, match="one output"):
        kt.Generator(model, LENGTH)


@pytest.mark.parametrize("name", ["source", "target"])
def test_logits_that_depend_on_one_input_only_are_refused(name):
    inputs = {"source": source_input(), "target": source_input("target")}
    y = kt.DecoderBlock(**BLOCK)(embedded(inputs[name]))
    with pytest.raises(ValueError, match="must depend on 'target' and on another input"):
        kt.Generator(keras.Model(inputs, keras.layers.Dense(VOCAB)(y)), LENGTH)


@pytest.mark.parametrize("shape", ["one for all", "source and target"])
def test_logits_that_are_not_one_for_each_target_position_are_refused(shape):
    source, target = source_input(), source_input("target")
    if shape == "one for all":
        y = kt.DecoderBlock(**BLOCK)(embedded(target, mask_zero=False), encoded(source))
        y = keras.layers.GlobalAveragePooling1D()(y)
    else:
        y = keras.layers.Concatenate(axis=1)([embedded(source), embedded(target)])
        y = kt.DecoderBlock(**BLOCK)(y)
    with pytest.raises(ValueError):
        kt.Generator(keras.Model({"source": source, "target": target}, keras.layers.Dense(VOCAB)(y)), LENGTH)


# what a generator leaves as it was


@pytest.mark.slow
@pytest.mark.parametrize("make", [built, implicit_masks, nested_encoder], ids=lambda make: make.__name__)
def test_a_generator_leaves_the_model_as_it_was_and_follows_its_training(make, tmp_path):
    model = shaken(make())
    model.compile(keras.optimizers.SGD(0.5), kt.TokenCrossentropy(), jit_compile=False)
    inputs = {**sources_of(model), "target": np.array([[2, 5, 6]] * 4, "int32")}
    outputs, paths = np.asarray(model(inputs)), [weight.path for weight in model.weights]
    nodes = [len(layer._inbound_nodes) for layer in model.layers]
    generate = kt.Generator(model, LENGTH)
    before = plain(generate(sources_of(model)))

    np.testing.assert_array_equal(model(inputs), outputs)
    assert [weight.path for weight in model.weights] == paths
    assert len(model.layers) == len(nodes)
    model.save(tmp_path / "model.keras")
    reloaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(reloaded(inputs), outputs, rtol=1e-5, atol=1e-5)
    assert_same(kt.Generator(reloaded, LENGTH)(sources_of(model)), before)

    assert np.isfinite(model.train_on_batch(inputs, np.array([[5, 6, 3]] * 4, "int32")))
    assert not np.allclose(model(inputs), outputs)
    after = generate(sources_of(model))
    assert_same(after, rerun(model, sources_of(model)))
    assert not np.allclose(np.asarray(after["score"]), before["score"])


# the scope, misused


def vectors(rng, tokens=3, batch=1):
    return rng.normal(size=(batch, tokens, WIDTH)).astype("float32")


def test_a_cache_that_overflows_is_an_error(rng):
    block, memory = kt.DecoderBlock(**BLOCK), vectors(rng)
    with pytest.raises(ValueError, match="length 2 for 3 new tokens after 0"), kt.DecodingScope(None, [0], 2):
        block(vectors(rng), memory)
    with kt.DecodingScope(None, [0], 3) as scope:
        block(vectors(rng), memory)
    with pytest.raises(ValueError, match="length 3 for 1 new tokens after 3"), kt.DecodingScope(scope.cache, [3], 3):
        block(vectors(rng, 1), memory)


def test_layers_in_another_order_than_before_are_an_error(rng):
    one, two = (kt.MultiHeadSelfAttention(2, causal=True) for _ in range(2))
    with kt.DecodingScope(None, [0], 4) as scope:
        two(one(vectors(rng)))
    with pytest.raises(ValueError, match="same order every time"), kt.DecodingScope(scope.cache, [3], 4):
        one(two(vectors(rng, 1)))


@pytest.mark.parametrize("index", [0, [[0]]])
def test_an_index_that_is_not_one_a_row_is_an_error(index):
    with pytest.raises(ValueError, match="`index` must have one entry per row"):
        kt.DecodingScope(None, index, 4)


def test_an_attention_mask_inside_is_an_error(rng):
    layer, block = kt.MultiHeadSelfAttention(2, causal=True), kt.DecoderBlock(**BLOCK)
    for called in (layer, block):
        with pytest.raises(ValueError, match="takes no `attention_mask` inside"), kt.DecodingScope(None, [0], 4):
            called(vectors(rng), attention_mask=np.ones((3, 3), bool))


def test_an_error_inside_closes_the_scope(rng):
    layer, x = kt.MultiHeadSelfAttention(2, causal=True), vectors(rng)
    outside = np.asarray(layer(x))
    with pytest.raises(ValueError, match="length 2"), kt.DecodingScope(None, [0], 2):
        layer(x)
    np.testing.assert_array_equal(layer(x), outside)


@pytest.mark.parametrize("make", [built, implicit_masks], ids=lambda make: make.__name__)
def test_a_model_is_built_inside_a_scope_as_outside(make):
    outside = make()
    with kt.DecodingScope(None, [0, 0, 0, 0], 2) as scope:
        inside = make()
    inside.set_weights(outside.get_weights())
    assert scope.cache == {"self": {}, "cross": {}}
    assert inside.output.shape == outside.output.shape == (None, None, VOCAB)
    inputs = {**sources_of(outside), "target": np.array([[2, 5, 6]] * 4, "int32")}
    np.testing.assert_array_equal(inside(inputs), outside(inputs))
