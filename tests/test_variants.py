"""Each variant of attention and of blocks: formula, causality, padding, cache, rings, packed rows, saving, learning."""

import functools
import json

import keras
import numpy as np
import pytest
from keras import ops

import keras_transformer as kt
from keras_transformer import attention, blockwise

BACKEND = keras.backend.backend()
WIDTH, HEADS, VOCAB = 16, 4, 12
SIZES = {"num_heads": HEADS, "intermediate_dim": 16, "dropout": 0.0}
ATTENTION = {
    "rotary": {"position": "rotary"},
    "linear": {"position": {"type": "rotary", "scaling": "linear", "factor": 2.0}},
    "interleaved yarn": {
        "position": {
            "type": "rotary",
            "layout": "interleaved",
            "scaling": "yarn",
            "factor": 4.0,
            "original_length": 16,
        }
    },
    "alibi": {"position": "alibi"},
    "relative": {"position": {"type": "relative", "num_buckets": 8, "max_distance": 12}},
    "two kv heads": {"num_kv_heads": 2},
    "one kv head": {"num_kv_heads": 1},
    "window": {"window": 3},
    "wide window": {"window": 100},
    "soft cap": {"soft_cap": 1.5},
    "qk norm": {"qk_norm": True},
    "alibi, window, kv heads": {"position": "alibi", "window": 4, "num_kv_heads": 2},
    "all and relative": {"position": "relative", "window": 5, "num_kv_heads": 2, "soft_cap": 3.0, "qk_norm": True},
    "all and rotary": {"position": "rotary", "window": 4, "num_kv_heads": 1, "soft_cap": 2.0, "qk_norm": True},
}
LLAMA = ("activation", "norm_first", "use_bias", "epsilon", "normalization", "attention", "feed_forward")
OPTIONS = {
    **{name: {"attention": options} for name, options in ATTENTION.items()},
    "rms": {"normalization": "rms", "norm_first": True},
    "gated": {"feed_forward": {"gated": True}},
    "llama": {name: kt.PRESETS["llama"][name] for name in LLAMA},
}
COMBINED = ["alibi, window, kv heads", "all and relative", "all and rotary", "llama"]  # each kind of option is in one
BLOCKS = [kt.EncoderBlock, kt.DecoderBlock]
each_variant = pytest.mark.parametrize("name", OPTIONS)
each_attention = pytest.mark.parametrize("name", ATTENTION)
on_tensorflow = pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow's own")
slow_on_jax = pytest.mark.slow if BACKEND == "jax" else lambda test: test  # each of its graphs takes seconds to compile


def quick(names, *these):
    """`names` as parameters, of which only these run when slow tests are left out."""
    return [name if name in these else pytest.param(name, marks=pytest.mark.slow) for name in names]


def array(x):
    return ops.convert_to_numpy(ops.cast(x, "float32"))


def normal(rng, *shape):
    return rng.normal(size=shape).astype("float32")


def close(found, expected, atol=1e-5):
    np.testing.assert_allclose(array(found), array(expected), atol=atol, rtol=0)


def compiled(function, **options):
    """`function` as one graph: `tf.function` or `jax.jit`."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.function(function, **options)
    jax = pytest.importorskip("jax")
    return jax.jit(function)


def jitted(function):
    """`function` in a graph on JAX, whose eager mode compiles every operation for every shape; elsewhere as it is."""
    return compiled(function) if BACKEND == "jax" else function


def scrambled(layer, seed=1):
    """Weights that are nowhere 0 or 1, so that biases and normalizations take part; layers of one form get the same."""
    rng = np.random.default_rng(seed)
    for weight in layer.trainable_weights:
        scale = 0.3 if len(weight.shape) == 1 else 1.5 * weight.shape[0] ** -0.5
        weight.assign(rng.normal(weight.path.endswith(("gamma", "scale")), scale, weight.shape))
    return layer


def self_attention(**options):
    layer = kt.MultiHeadSelfAttention(HEADS, **options)
    layer.build((None, None, WIDTH))
    return scrambled(layer)


def block(cls, name, *context):
    layer = cls(**SIZES, **OPTIONS[name])
    layer.build((None, None, WIDTH), *context)
    return scrambled(layer)


def language_model(name, num_layers=1, **more):
    """With a table of its own for logits: one for both would make it repeat its tokens."""
    options = {**SIZES, "tie_embeddings": False, **OPTIONS[name], **more}
    return scrambled(kt.build_language_model(VOCAB, WIDTH, num_layers, **options))


@functools.cache
def ready(name, num_layers=1):
    """A model for tests that leave it as it is."""
    return language_model(name, num_layers)


# ---- what attention computes


def heads_of(layer, name, x):
    """Queries, keys or values in NumPy: `[B, T, N or K, H]`."""
    kernel, bias = (weight.astype("float64") for weight in getattr(layer, f"{name}_projection").get_weights())
    heads = (x @ kernel + bias).reshape(*x.shape[:2], -1, layer.head_size)
    if layer.qk_norm and name != "value":
        norm = getattr(layer, f"{name}_norm")
        heads = heads / np.sqrt(np.mean(heads**2, axis=-1, keepdims=True) + norm.epsilon) * array(norm.scale)
    return heads


def by_formula(layer, x, visible):
    """The layer in NumPy, for rows that may look where `visible` `[B, T, T]` says; of positions see test_relative."""
    query, key, value = (heads_of(layer, name, x) for name in ("query", "key", "value"))
    positions = np.arange(x.shape[1])
    if layer.rotary is not None:
        query, key = (array(layer.rotary(y.astype("float32"), positions[None])) for y in (query, key))
    key, value = (np.repeat(y, HEADS // y.shape[2], axis=2) for y in (key, value))
    scores = np.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(layer.head_size)
    if layer.soft_cap is not None:
        scores = layer.soft_cap * np.tanh(scores / layer.soft_cap)
    if layer.distance_bias is not None:
        scores = scores + array(layer.distance_bias(positions - positions[:, None]))
    scores = np.where(visible[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    kernel, bias = layer.output_projection.get_weights()
    return np.einsum("bnts,bsnh->btnh", weights, value).reshape(*x.shape[:2], -1) @ kernel + bias, weights


@each_attention
@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_that_of_its_formula(rng, name, causal):
    layer, x = self_attention(causal=causal, **ATTENTION[name]), normal(rng, 2, 9, WIDTH)
    padding = np.arange(9) < np.array([[9], [6]])
    distance = np.arange(9) - np.arange(9)[:, None]
    visible = padding[:, None] & (distance <= (0 if causal else 9)) & (np.abs(distance) < (layer.window or 99))
    visible[1] |= (distance == 0) & ~np.any(
        visible[1], axis=1, keepdims=True
    )  # padding that sees nothing: not compared
    output, weights = jitted(lambda x: layer(x, padding, return_attention_scores=True))(x)
    expected, expected_weights = by_formula(layer, x, visible)
    np.testing.assert_allclose(array(output)[padding], expected[padding], atol=1e-4)
    weights = array(weights).transpose(0, 2, 1, 3)[padding]
    np.testing.assert_allclose(weights, expected_weights.transpose(0, 2, 1, 3)[padding], atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [1, 2, 5, 50])
def test_a_window_is_a_band_of_the_attention_mask(rng, causal, window):
    banded, plain = (self_attention(causal=causal, window=width, soft_cap=2.0) for width in (window, None))
    x, distance = normal(rng, 2, 7, WIDTH), np.arange(7) - np.arange(7)[:, None]
    found = jitted(lambda x: banded(x, return_attention_scores=True))(x)
    expected = jitted(lambda x: plain(x, None, np.abs(distance) < window, return_attention_scores=True))(x)
    for one, other in zip(found, expected):
        close(one, other, atol=1e-6)
    if causal:  # this many keys
        assert (array(found[1]) > 0).sum(-1).max() == min(window, 7)


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("more", [{}, {"position": "rotary", "qk_norm": True}], ids=["plain", "rotary, normalized"])
def test_grouped_heads_are_full_ones_that_repeat_weights(rng, kv_heads, more):
    grouped, full = (self_attention(causal=True, num_kv_heads=heads, **more) for heads in (kv_heads, HEADS))
    full.set_weights(
        [_repeated(weight, full_one.shape) for weight, full_one in zip(grouped.get_weights(), full.weights)]
    )
    x, context = normal(rng, 2, 6, WIDTH), normal(rng, 2, 5, WIDTH)
    close(jitted(grouped)(x), jitted(full)(x))
    assert grouped.count_params() < full.count_params()

    grouped, full = (kt.MultiHeadCrossAttention(HEADS, num_kv_heads=heads) for heads in (kv_heads, HEADS))
    for layer in (grouped, full):
        layer.build((None, None, WIDTH), (None, None, WIDTH))
    scrambled(grouped)
    full.set_weights(
        [_repeated(weight, full_one.shape) for weight, full_one in zip(grouped.get_weights(), full.weights)]
    )
    close(jitted(grouped)(x, context), jitted(full)(x, context))


def _repeated(weight, shape):
    """Kernels and biases of keys and values, each head as often as it serves another."""
    heads = weight.reshape(*weight.shape[:-1], -1, WIDTH // HEADS)
    return np.repeat(heads, shape[-1] // weight.shape[-1], axis=-2).reshape(shape)


# ---- who sees whom


@each_variant
def test_tokens_see_none_behind_them(rng, name):
    layer, x = block(kt.DecoderBlock, name), normal(rng, 2, 7, WIDTH)
    run = jitted(layer)
    before = array(run(x))
    for t in (2, 5):
        changed = x.copy()
        changed[:, t:] = normal(rng, 2, 7 - t, WIDTH)
        after = array(run(changed))
        close(after[:, :t], before[:, :t])
        assert np.all(np.abs(after[:, t:] - before[:, t:]).max(axis=-1) > 1e-3)


@each_variant
@pytest.mark.parametrize("cls", BLOCKS)
def test_padding_changes_no_token(rng, cls, name):
    layer, x = block(cls, name), normal(rng, 2, 4, WIDTH)
    padded = np.concatenate([x, 5 * normal(rng, 2, 3, WIDTH)], axis=1)
    padding = np.arange(7) < np.full((2, 1), 4)
    run = jitted(lambda x, padding: layer(x, padding_mask=padding))
    close(run(padded, padding)[:, :4], run(x, padding[:, :4]))


def test_an_encoder_with_a_window_sees_as_far_to_both_sides(rng):
    layer, x = block(kt.EncoderBlock, "window"), normal(rng, 1, 9, WIDTH)
    changed = x.copy()
    changed[:, 4] += 1
    changes = np.abs(array(layer(changed)) - array(layer(x))).max(axis=-1)[0]
    assert (changes > 1e-5).tolist() == [False, False, True, True, True, True, True, False, False]


# ---- by blocks


def values_and_gradients(model, x):
    """What a model gives and the gradients of its weights, in a graph."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        @tf.function
        def run(x):
            with tf.GradientTape() as tape:
                y = model(x)
                loss = tf.reduce_sum(y**2)
            return y, tape.gradient(loss, [weight.value for weight in model.trainable_weights])

        return run(x)
    jax = pytest.importorskip("jax")
    fixed = [weight.value for weight in model.non_trainable_variables]

    def run(weights, x):
        y = model.stateless_call(weights, fixed, x)[0]
        return ops.sum(y**2), y

    (_, y), gradients = jax.jit(jax.value_and_grad(run, has_aux=True))([w.value for w in model.trainable_variables], x)
    return y, gradients


@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", quick(ATTENTION, "all and relative"))
def test_blocks_of_weights_give_the_numbers_and_gradients_of_all_at_once(rng, monkeypatch, name, causal):
    monkeypatch.setattr(blockwise, "BLOCK", 2**8)
    calls, run = [], attention.blockwise
    monkeypatch.setattr(attention, "blockwise", lambda *args: calls.append(args) or run(*args))
    x = normal(rng, 2, 37, WIDTH)
    one, other = (self_attention(causal=causal, kernel=kernel, **ATTENTION[name]) for kernel in ("exact", "blockwise"))
    expected, expected_gradients = values_and_gradients(one, x)
    assert not calls
    found, gradients = values_and_gradients(other, x)
    assert calls
    close(found, expected)
    scale = max(np.abs(array(its)).max() for its in expected_gradients)  # that of the keys' bias is 0 but for rounding
    for weight, gradient, its in zip(one.trainable_weights, gradients, expected_gradients):
        np.testing.assert_allclose(array(gradient) / scale, array(its) / scale, atol=1e-5, err_msg=weight.path)


# ---- the cache

PROMPTS = [[2, 5, 6, 7, 4, 5, 8, 9], [2, 4], [2, 9, 8, 7, 6]]
SLOTS = 24  # some times the windows


CACHED = ["alibi, window, kv heads", "all and rotary", "llama"]
if BACKEND == "tensorflow":
    CACHED += ["interleaved yarn", "relative", "window", "one kv head", "all and relative"]


def right_padded(rows, columns):
    ids = np.zeros((len(rows), columns), "int32")
    for row, tokens in zip(ids, rows):
        row[: len(tokens)] = tokens
    return ids


@functools.lru_cache(maxsize=4)
def whole(model):
    """The model as one graph: ids -> logits."""
    if BACKEND == "tensorflow":
        return compiled(lambda ids: model(ids))
    call = compiled(lambda weights, ids: model.stateless_call(*weights, ids)[0])

    def with_weights(ids):
        weights = [v.value for v in model.trainable_variables], [v.value for v in model.non_trainable_variables]
        return call(weights, ids)

    return with_weights


def step_of(model, length=SLOTS):
    """(tokens, index, cache, numbers of real tokens or None) -> (logits, cache)."""

    def step(tokens, index, cache, num_tokens=None):
        with kt.DecodingScope(cache, index, length, num_tokens) as scope:
            return model(tokens), scope.cache

    return compiled(step)


def assert_last(logits, model, written):
    """`logits` `[R, V]` are those of the whole model after what was written."""
    full = array(whole(model)(right_padded(written, SLOTS)))
    close(logits, np.stack([full[r, len(row) - 1] for r, row in enumerate(written)]))


@pytest.mark.parametrize("spread", ["widen", pytest.param("repeat", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", quick(OPTIONS, *CACHED))
def test_cached_logits_are_those_of_the_whole_model_also_of_rows_that_go_on_from_each_other(rng, name, spread):
    model, times = ready(name, 2 if name.startswith("all") else 1), 3
    step, written = step_of(model), [list(row) for row in PROMPTS]
    lengths = np.array([len(row) for row in written], "int32")
    logits, cache = step(right_padded(written, 8), np.zeros(3, "int32"), None, lengths)
    assert_last(array(logits)[np.arange(3), lengths - 1], model, written)

    args = (SLOTS,) if spread == "widen" else ()
    cache = getattr(kt.DecodingScope, spread)(cache, times, *args)
    written = [list(row) for row in written for _ in range(times)]
    for _ in range(SLOTS - max(map(len, PROMPTS))):
        new = rng.integers(1, VOCAB, size=(len(written), 1)).astype("int32")
        logits, cache = step(new, np.array([len(row) for row in written], "int32"), cache)
        written = [[*row, int(token)] for row, (token,) in zip(written, new)]
        assert_last(logits[:, 0], model, written)
        if spread == "widen":
            rows = np.arange(len(written)) // times * times + rng.integers(times, size=len(written))
            cache = kt.DecodingScope.reorder(cache, rows.astype("int32"))
            written = [list(written[row]) for row in rows]


@pytest.mark.parametrize("window", [None, 1, 3, 9, 50])
@pytest.mark.parametrize("kv_heads", [None, 1, 2])
def test_a_cache_holds_a_windows_slots_and_the_kv_heads_only(rng, window, kv_heads):
    layer, length = self_attention(causal=True, window=window, num_kv_heads=kv_heads), 9
    with kt.DecodingScope(None, [0, 0], length) as scope:
        layer(normal(rng, 2, 4, WIDTH))
    shape = 2, kv_heads or HEADS, min(window or length, length), WIDTH // HEADS
    (entry,) = scope.cache["self"].values()
    assert [tuple(tensor.shape) for tensor in entry] == [shape] * 2
    (wide,) = kt.DecodingScope.widen(scope.cache, 3, length)["self"].values()
    assert [tuple(tensor.shape) for tensor in wide] == [(*shape[:2], 3 * shape[2], shape[3])] * 2


@slow_on_jax
def test_a_ring_is_filled_by_a_prompt_and_goes_round_by_single_tokens(rng):
    """Without `num_tokens`, all tokens of the first call are real."""
    layer, x = self_attention(causal=True, window=3, position="alibi"), normal(rng, 2, 12, WIDTH)
    full = array(layer(x))
    for prompt in (1, 2, 3, 7):
        with kt.DecodingScope(None, [0, 0], 12) as scope:
            close(layer(x[:, :prompt]), full[:, :prompt])
        for t in range(prompt, 12):
            with kt.DecodingScope(scope.cache, [t, t], 12) as scope:
                close(layer(x[:, t : t + 1]), full[:, t : t + 1])


@pytest.mark.parametrize(
    "layer", [lambda: self_attention(causal=True, window=3), lambda: block(kt.DecoderBlock, "window")]
)
def test_a_layer_with_a_window_goes_on_by_one_token_at_a_time(rng, layer):
    layer, x = layer(), normal(rng, 1, 5, WIDTH)
    with kt.DecodingScope(None, [0], 5) as scope:
        layer(x[:, :3])
    with (
        pytest.raises(ValueError, match="with a `window` goes on from its cache one token at a time; got 2"),
        kt.DecodingScope(scope.cache, [3], 5),
    ):
        layer(x[:, 3:])


@each_attention
@slow_on_jax
def test_a_layer_that_is_not_causal_ignores_the_scope(rng, name):
    layer, x = self_attention(**ATTENTION[name]), normal(rng, 1, 5, WIDTH)
    outside = layer(x)
    with kt.DecodingScope(None, [0], 5) as scope:
        np.testing.assert_array_equal(layer(x), outside)
    assert scope.cache["self"] == {}


# ---- writing


def greedily(logits_of, prompts, length):
    """The most likely tokens, no end among them, by `logits_of(ids)` that reads every prefix anew."""
    written = [list(row) for row in prompts]
    for _ in range(length):
        logits = array(logits_of(right_padded(written, 8 + length)))
        logits[:, :, [0, 3]] = -np.inf
        for row, its in zip(written, logits):
            row.append(int(its[len(row) - 1].argmax()))
    return [row[len(prompt) :] for row, prompt in zip(written, prompts)]


def tokens_of(ids):
    return [[int(token) for token in row if token] for row in np.asarray(ids)]


def varied(model, write):
    """What `write()` gives with weights of which it varies: a model that repeats a token would show nothing."""
    for seed in range(30):
        scrambled(model, seed)
        rows = write()
        if len({token for row in rows for token in row}) > 3 and all(len(set(row)) > 1 for row in rows):
            return rows
    raise AssertionError("each seed gave the same few tokens")


@functools.cache
def writing(name):
    """(a language model, what it writes greedily)."""
    model = language_model(name, num_layers=2)
    return model, varied(model, lambda: greedily(whole(model), PROMPTS, 14))


@slow_on_jax
@pytest.mark.parametrize("name", quick(COMBINED, "llama"))
def test_a_model_writes_greedily_what_it_would_on_growing_prefixes(name):
    model, expected = writing(name)
    generate = kt.Generator(model, 14)
    run = jitted(lambda prompt: generate(prompt=prompt, min_length=14, forbidden_ids=[3]))
    assert tokens_of(run(right_padded(PROMPTS, 8))["ids"][:, 0]) == expected


def beams(model, **graph):
    """(a generator, its beam search in a graph)."""
    generate = kt.Generator(model, 14, width=3, n=2)
    if BACKEND == "tensorflow":
        import tensorflow as tf

        graph["input_signature"] = [tf.TensorSpec([None, None], tf.int32)]
    return generate, compiled(lambda prompt: generate(prompt=prompt, min_length=6), **graph)


@slow_on_jax
@pytest.mark.parametrize("name", quick(COMBINED, "alibi, window, kv heads"))
def test_a_beams_scores_are_those_of_the_whole_model_and_no_worse_than_greedy_ones(name):
    generate, run = beams(writing(name)[0])
    prompt = right_padded(PROMPTS, 8)
    found = {key: np.asarray(value) for key, value in run(prompt).items()}
    for i in range(2):
        scored = generate.score(None, found["ids"][:, i], prompt)
        np.testing.assert_allclose(found["score"][:, i], scored["score"], rtol=1e-4, atol=1e-4)
    for row, tokens in enumerate(PROMPTS):  # alone, without padding, in another ring
        alone = run(np.array([tokens], "int32"))
        np.testing.assert_array_equal(alone["ids"][0], found["ids"][row])
        np.testing.assert_allclose(alone["score"][0], found["score"][row], rtol=1e-4, atol=1e-4)


@on_tensorflow
@pytest.mark.slow
@pytest.mark.parametrize("name", COMBINED)
def test_xla_writes_the_same(name):
    model, _ = writing(name)
    (_, run), (_, same) = beams(model), beams(model, jit_compile=True)
    found, expected = same(right_padded(PROMPTS, 8)), run(right_padded(PROMPTS, 8))
    np.testing.assert_array_equal(found["ids"], expected["ids"])
    np.testing.assert_allclose(found["score"], expected["score"], rtol=1e-4)


@on_tensorflow
@pytest.mark.parametrize("name", quick(["all and relative", "all and rotary", "window", "llama"], "all and rotary"))
def test_one_graph_serves_prompts_and_outputs_of_all_lengths(name):
    import tensorflow as tf

    model, _ = writing(name)
    generate = kt.Generator(model, 14)
    signature = [tf.TensorSpec([None, None], tf.int32), tf.TensorSpec([], tf.int32)]

    @functools.partial(tf.function, input_signature=signature)
    def graph(prompt, length):
        return generate(prompt=prompt, max_length=length, forbidden_ids=[3])

    for prompts, length in ((PROMPTS, 14), (PROMPTS[1:2], 1), (PROMPTS[:2], 3), ([[2]], 9)):
        ids = graph(right_padded(prompts, max(map(len, prompts))), length)["ids"]
        assert tokens_of(ids[:, 0]) == greedily(whole(model), prompts, length)


# ---- a context


def transformer(name, **more):
    options = {**SIZES, "tie_embeddings": "none", **OPTIONS[name], **more}
    return scrambled(kt.build_transformer(VOCAB, d_model=WIDTH, num_layers=1, **options))


SOURCES = np.array([[4, 5, 6, 7, 8, 9, 10, 3], [11, 5, 4, 3, 0, 0, 0, 0], [9, 9, 3, 0, 0, 0, 0, 0]], "int32")


def test_cross_attention_has_neither_positions_nor_a_window_and_has_the_rest(rng):
    layer = block(kt.DecoderBlock, "all and rotary", (None, None, WIDTH))
    cross = layer.cross_attention
    assert not hasattr(cross, "window") and not hasattr(cross, "position")
    assert (cross.num_kv_heads, cross.soft_cap, cross.qk_norm) == (1, 2.0, True)
    assert cross.key_projection.kernel.shape == cross.value_projection.kernel.shape == (WIDTH, WIDTH // HEADS)
    x, context = normal(rng, 1, 3, WIDTH), normal(rng, 1, 9, WIDTH)
    run = jitted(lambda x, context: layer(x, context))
    before = array(run(x, context))
    close(run(x, context[:, ::-1]), before)  # no order
    changed = context.copy()
    changed[:, 8] += 1
    assert np.all(np.abs(array(run(x, changed)) - before).max(axis=-1) > 1e-4)  # any distance


@slow_on_jax
@pytest.mark.parametrize("name", quick(COMBINED, "alibi, window, kv heads"))
def test_a_translation_is_that_of_the_whole_model(name):
    model, start, source = transformer(name), [[2]] * 3, ops.convert_to_tensor(SOURCES)
    call = whole(model)
    expected = varied(model, lambda: greedily(lambda ids: call({"source": source, "target": ids}), start, 10))
    generate = kt.Generator(model, 10)
    found = jitted(lambda source: generate({"source": source}, min_length=10, forbidden_ids=[3]))(SOURCES)
    assert tokens_of(found["ids"][:, 0]) == expected
    beam = kt.Generator(model, 10, width=3, n=2)
    found = {key: np.asarray(value) for key, value in compiled(lambda s: beam({"source": s}))(SOURCES).items()}
    for i in range(2):
        scored = beam.score({"source": SOURCES}, found["ids"][:, i])
        np.testing.assert_allclose(found["score"][:, i], scored["score"], rtol=1e-4, atol=1e-4)


@slow_on_jax
def test_a_cache_holds_the_kv_heads_of_a_context(rng):
    layer = block(kt.DecoderBlock, "alibi, window, kv heads", (None, None, WIDTH))
    x, context = normal(rng, 2, 5, WIDTH), normal(rng, 2, 6, WIDTH)
    full = array(layer(x, context))
    with kt.DecodingScope(None, [0, 0], 5) as scope:
        close(layer(x[:, :4], context), full[:, :4])
    (entry,) = scope.cache["cross"].values()
    assert [tuple(tensor.shape) for tensor in entry] == [(2, 2, 6, WIDTH // HEADS)] * 2
    with kt.DecodingScope(scope.cache, [4, 4], 5):
        close(layer(x[:, 4:], context), full[:, 4:])


# ---- packed rows

TEXTS = [[2, 4, 5, 6, 7, 8, 9, 3], [2, 10, 11], [2, 9, 9, 4, 5, 3]]


@pytest.mark.parametrize("name", quick(OPTIONS, *(OPTIONS if BACKEND == "tensorflow" else ["relative", "llama"])))
def test_each_text_of_a_packed_row_gets_what_it_gets_alone(name):
    plain, packed = ready(name), language_model(name, packed=True)
    packed.set_weights(plain.get_weights())
    row = [token for text in TEXTS for token in text]
    logits = np.split(array(jitted(packed)(right_padded([row], SLOTS)))[0], np.cumsum([len(text) for text in TEXTS]))
    alone = array(jitted(plain)(right_padded(TEXTS, SLOTS)))
    for text, found, expected in zip(TEXTS, logits, alone):
        close(found, expected[: len(text)])


@slow_on_jax
@pytest.mark.parametrize("name", quick(COMBINED, "all and relative"))
def test_each_pair_of_a_packed_row_gets_what_it_gets_alone(name):
    plain, packed = transformer(name), transformer(name, packed=True)
    packed.set_weights(plain.get_weights())
    sources, targets = [[4, 5, 6, 7, 3], [9, 3]], [[2, 8, 9], [2, 4, 4, 5, 10]]
    alone = jitted(plain)({"source": right_padded(sources, 12), "target": right_padded(targets, 12)})
    together = {"source": right_padded([sum(sources, [])], 12), "target": right_padded([sum(targets, [])], 12)}
    found = array(jitted(packed)(together))[0]
    close(found[:3], array(alone)[0, :3])
    close(found[3:8], array(alone)[1, :5])


# ---- saved


def stack_of_all():
    """A language model that has a block of each variant."""
    ids = keras.Input((None,), dtype="int32", name="tokens")
    x = kt.TokenEmbedding(VOCAB, WIDTH)(ids)
    for name in OPTIONS:
        x = kt.DecoderBlock(**SIZES, **OPTIONS[name], name=name.replace(" ", "_").replace(",", ""))(x)
    return scrambled(keras.Model(ids, kt.TokenEmbedding(VOCAB, WIDTH, name="logits")(x, reverse=True)))


def test_blocks_of_all_variants_come_back(tmp_path):
    model, ids = stack_of_all(), right_padded(PROMPTS, 8)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras", safe_mode=True)
    for layer in model.layers:
        assert again.get_layer(layer.name).get_config() == layer.get_config()
    close(jitted(again)(ids), jitted(model)(ids))


@on_tensorflow
@pytest.mark.slow
def test_blocks_of_all_variants_are_exported_for_any_batch_and_length(tmp_path):
    import tensorflow as tf

    model = stack_of_all()
    model.export(tmp_path / "exported", verbose=False)
    served = tf.saved_model.load(str(tmp_path / "exported"))
    for rows in (PROMPTS, PROMPTS[1:2], [[2, *range(1, 12)] * 3]):
        ids = right_padded(rows, max(map(len, rows)))
        close(served.serve(ids), model(ids), atol=1e-3)  # of many blocks, rounded in another order


@on_tensorflow
@pytest.mark.slow
@pytest.mark.parametrize("name", ["all and rotary", "all and relative"])
def test_a_text_generator_is_exported_with_its_ring(name, tmp_path):
    import tensorflow as tf

    texts = ["to be or not to be, that is the question", "to", "not to be"]
    tokenizer = kt.Tokenizer.train(texts, kind="char")
    options = {**SIZES, **OPTIONS[name]}
    model = scrambled(kt.build_language_model(tokenizer.vocab_size, WIDTH, 2, **options))
    write = kt.TextGenerator(model, tokenizer, max_length=20, width=2, n=2)
    write.export(tmp_path / "exported")
    served = tf.saved_model.load(str(tmp_path / "exported")).signatures["serving_default"]
    found, expected = served(text=tf.constant(texts)), write(tf.constant(texts))
    np.testing.assert_array_equal(found["text"], expected["text"])
    np.testing.assert_allclose(found["score"], expected["score"], rtol=1e-4)


# ---- learned


def copies(rng, number, length=4):
    """(inputs, labels) of rows of a start, tokens, a sign and the same tokens; labels of what is random are padding."""
    tokens = rng.integers(4, VOCAB, size=(number, length))
    rows = np.concatenate([np.full((number, 1), i) if np.isscalar(i) else i for i in (2, tokens, 1, tokens, 3)], axis=1)
    labels = rows[:, 1:].copy()
    labels[:, :length] = 0
    return rows[:, :-1].astype("int32"), labels.astype("int32")


@slow_on_jax
@pytest.mark.parametrize("name", quick(["rotary", "alibi", "relative", "llama"], "llama"))
def test_a_model_that_knows_positions_inside_attention_only_learns_to_copy(rng, name):
    options = {**SIZES, "norm_first": True, **OPTIONS[name], "intermediate_dim": 64}
    model = kt.build_language_model(VOCAB, 32, 2, **options)
    model.compile(keras.optimizers.Adam(3e-3), kt.TokenCrossentropy(), metrics=[kt.TokenAccuracy()], jit_compile=False)
    steps = {"llama": 120, "alibi": 500}.get(name, 250)
    model.fit(*copies(rng, 64 * steps), batch_size=64, verbose=0)
    assert model.evaluate(*copies(rng, 512), verbose=0, return_dict=True)["token_accuracy"] >= 0.95


# ---- configs


@each_variant
@pytest.mark.parametrize("cls", BLOCKS)
def test_a_block_comes_back_from_its_config(cls, name):
    layer = cls(**SIZES, **OPTIONS[name], name="mine", dtype=keras.DTypePolicy("mixed_bfloat16"))
    config = json.loads(json.dumps(layer.get_config()))
    again = cls.from_config(config)
    assert again.get_config() == layer.get_config()
    assert again.name == "mine" and again.dtype_policy.name == "mixed_bfloat16"
    assert {option: config[option] for option in OPTIONS[name]} == OPTIONS[name]


@each_attention
def test_a_layer_comes_back_from_its_config(name):
    layer = kt.MultiHeadSelfAttention(HEADS, causal=True, **ATTENTION[name], name="mine", dtype="mixed_float16")
    config = json.loads(json.dumps(layer.get_config()))
    assert kt.MultiHeadSelfAttention.from_config(config).get_config() == layer.get_config()
    assert {option: config[option] for option in ATTENTION[name]} == ATTENTION[name]


def test_positions_take_the_policy_of_their_layer():
    for name in ("rotary", "alibi", "relative"):
        layer = kt.MultiHeadSelfAttention(HEADS, dtype="mixed_bfloat16", **ATTENTION[name])
        assert (layer.rotary or layer.distance_bias).dtype_policy.name == "mixed_bfloat16"


NUMPY = {
    "num_kv_heads": np.int64(2),
    "window": np.int32(3),
    "soft_cap": np.float32(2),
    "qk_norm": np.bool_(True),
    "position": {"type": "rotary", "scaling": "yarn", "factor": np.float32(2), "original_length": np.int64(16)},
}
RELATIVE = {"type": "relative", "num_buckets": np.int64(8), "max_distance": np.float64(12)}


@pytest.mark.parametrize("cls", BLOCKS)
@pytest.mark.parametrize("options", [NUMPY, {"position": RELATIVE}], ids=["rotary", "relative"])
def test_numpy_scalars_among_options_come_out_plain(cls, options):
    config = cls(**SIZES, attention=options).get_config()
    kept = config["attention"]
    assert set(kept) == set(options)
    for value in [*kept.values(), *kept["position"].values()]:
        assert not isinstance(value, np.generic)
    assert cls.from_config(json.loads(json.dumps(config))).get_config() == config


@pytest.mark.parametrize("name", quick(OPTIONS, "interleaved yarn", "all and relative", "llama"))
def test_half_precision_is_near_float32(rng, name):
    full, x = block(kt.DecoderBlock, name), normal(rng, 2, 7, WIDTH)
    half = kt.DecoderBlock(**SIZES, **OPTIONS[name], dtype="mixed_bfloat16")
    half.build((None, None, WIDTH))
    half.set_weights(full.get_weights())
    output = jitted(half)(x)
    assert keras.backend.standardize_dtype(output.dtype) == "bfloat16"
    close(output, full(x), atol=0.15)


# ---- what is refused

KINDS = r"`position` must be one of \['rotary', 'alibi', 'relative'\], or a dict with it as 'type'"
REFUSED = [
    ({"num_kv_heads": 3}, "`num_kv_heads` must divide `num_heads`; got 3 and 4"),
    ({"num_kv_heads": 8}, "`num_kv_heads` must divide `num_heads`; got 8 and 4"),
    ({"num_kv_heads": 0}, "`num_kv_heads` must be a whole number of at least 1; got 0"),
    ({"window": 0}, "`window` must be a whole number of at least 1; got 0"),
    ({"window": 2.5}, "`window` must be a whole number of at least 1; got 2.5"),
    ({"soft_cap": 0}, "`soft_cap` must be above 0; got 0"),
    ({"soft_cap": -1.0}, "`soft_cap` must be above 0; got -1.0"),
    ({"soft_cap": True}, "`soft_cap` must be one number; got True"),
    ({"kernel": "flash"}, r"`kernel` must be one of \['auto', 'exact', 'blockwise'\]; got 'flash'"),
    ({"position": "absolute"}, f"{KINDS}; got 'absolute'"),
    ({"position": 3}, f"{KINDS}; got 3"),
    ({"position": ["rotary"]}, rf"{KINDS}; got \['rotary'\]"),
    ({"position": {}}, f"{KINDS}; got None"),
    ({"position": {"layout": "halves"}}, f"{KINDS}; got None"),
    ({"position": {"type": "rotary", "base": 500}}, r"`position` takes the options \['factor', .*\]; got \['base'\]"),
    ({"position": {"type": "alibi", "num_heads": 2}}, r"`position` takes the options \[\]; got \['num_heads'\]"),
    (
        {"position": {"type": "relative", "bidirectional": True}},
        r"`position` takes the options.*got \['bidirectional'\]",
    ),
    (
        {"position": {"type": "rotary", "layout": "stacked"}},
        "`layout` must be 'halves' or 'interleaved'; got 'stacked'",
    ),
    (
        {"position": {"type": "rotary", "scaling": "yarn"}},
        "`original_length` belongs to the scalings 'yarn', 'llama3'; got None",
    ),
]


@pytest.mark.parametrize("options, message", REFUSED)
@pytest.mark.parametrize("make", [*BLOCKS, kt.MultiHeadSelfAttention], ids=lambda cls: cls.__name__)
def test_wrong_options_are_refused_when_a_layer_is_made(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(HEADS, **options) if make is kt.MultiHeadSelfAttention else make(**SIZES, attention=options)


@pytest.mark.parametrize("options, message", [row for row in REFUSED if not {"position", "window"} & set(row[0])])
def test_wrong_options_of_cross_attention_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        kt.MultiHeadCrossAttention(HEADS, **options)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"attention": {"rope": True, "causal": True}}, r"`attention` takes the options.*; got \['causal', 'rope'\]"),
        ({"feed_forward": {"gate": True}}, r"`feed_forward` takes the options.*; got \['gate'\]"),
        ({"normalization": "batch"}, r"`normalization` must be one of \['layer', 'rms'\]; got 'batch'"),
        ({"normalization": None}, r"`normalization` must be one of \['layer', 'rms'\]; got None"),
    ],
)
@pytest.mark.parametrize("cls", BLOCKS)
def test_wrong_options_of_a_block_are_refused_when_it_is_made(cls, options, message):
    with pytest.raises(ValueError, match=message):
        cls(**SIZES, **options)


@pytest.mark.parametrize("option", ["position", "window"])
def test_cross_attention_takes_neither_positions_nor_a_window(option):
    with pytest.raises(ValueError, match=option):
        kt.MultiHeadCrossAttention(HEADS, **{option: 3})


@pytest.mark.parametrize("key_dim, size", [(3, 3), (None, 5)])
def test_rotary_positions_of_an_odd_head_size_are_refused(key_dim, size):
    options = {"key_dim": key_dim, "position": "rotary"}
    x = np.zeros((1, 2, HEADS * size if key_dim is None else WIDTH), "float32")
    for layer in (kt.MultiHeadSelfAttention(HEADS, **options), kt.DecoderBlock(**SIZES, attention=options)):
        with pytest.raises(ValueError, match=f"Rotary positions need an even head size; got {size}"):
            layer(x)
