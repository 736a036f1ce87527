"""Attention: the sources' mask, Keras's layer as oracle, masks of every shape and kind, precision, caches and maps."""

import itertools

import keras
import numpy as np
import pytest
from keras import ops
from keras.src.backend import get_keras_mask

import keras_transformer as kt

on_tensorflow = pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="TensorFlow's own")


def normal(rng, *shape, dtype="float32"):
    return rng.normal(size=shape).astype(dtype)


def plain(x):
    return np.asarray(ops.cast(x, "float32"))


def heads(rng, queries=4, keys=5, dtype="float32", size=8):
    """Query, key and value of 2 rows and 2 heads."""
    return tuple(ops.cast(normal(rng, 2, length, 2, size), dtype) for length in (queries, keys, keys))


# the lower triangle


@on_tensorflow
def test_the_lower_triangle_is_that_of_the_sources(rng):
    import tensorflow as tf

    scores = tf.constant(normal(rng, 3, 6, 6))
    tril = tf.linalg.LinearOperatorLowerTriangular(tf.ones_like(scores[0])).to_dense()
    np.testing.assert_array_equal(kt.lower_triangular_mask(6), tril == 1)

    layer = kt.MultiHeadSelfAttention(num_heads=1, causal=True)
    x = normal(rng, 3, 6, 4)
    _, weights = layer(x, return_attention_scores=True)
    scores = layer.query_projection(x) / 2 @ tf.transpose(layer.key_projection(x), (0, 2, 1))
    scores = tf.where(tf.equal(tril, 0), -(2**32) + 1.0, scores)
    np.testing.assert_allclose(weights[:, 0], tf.nn.softmax(scores), atol=1e-6)
    assert np.all(np.asarray(weights[:, 0])[:, np.asarray(tril) == 0] == 0)


def test_the_triangle_is_aligned_to_the_last_key():
    assert np.asarray(kt.lower_triangular_mask(1, 5)).tolist() == [[True] * 5]
    assert np.asarray(kt.lower_triangular_mask(2, 3)).tolist() == [[True, True, False], [True, True, True]]
    assert np.asarray(kt.lower_triangular_mask(2, 1)).tolist() == [[False], [True]]


OPTIONS = list(itertools.product([0.0, 0.4], [False, True], [None, "padding", "attention"]))


@pytest.mark.parametrize("dropout, scores, extra", OPTIONS)
def test_no_output_depends_on_later_tokens(rng, dropout, scores, extra):
    x = normal(rng, 2, 6, 8)
    changed = np.concatenate([x[:, :3], normal(rng, 2, 3, 8)], axis=1)
    masks = {
        None: {},
        "padding": {"padding_mask": np.array([[1, 1, 1, 1, 0, 0], [1] * 6])},
        "attention": {"attention_mask": rng.integers(0, 2, size=(6, 6)) | np.eye(6, dtype=int)},
    }[extra]

    def outputs(x):
        keras.utils.set_random_seed(3)
        layer = kt.MultiHeadSelfAttention(num_heads=2, causal=True, dropout=dropout)
        return layer(x, **masks, return_attention_scores=scores, training=True)

    before, after = outputs(x), outputs(changed)
    if scores:
        (before, weights), (after, _) = before, after
        assert np.all(np.triu(np.asarray(weights), 1) == 0)
    np.testing.assert_allclose(before[:, :3], after[:, :3], atol=1e-6)
    assert np.max(np.abs(np.asarray(before[:, 3:]) - np.asarray(after[:, 3:]))) > 1e-3


# an oracle that nobody here wrote


def copy_weights(theirs, ours):
    """Keras's kernels are [D, N, H] and [N, H, D]; ours are those of Dense layers."""
    for name, dense in (("query", "query"), ("key", "key"), ("value", "value"), ("output", "output")):
        kernel, bias = getattr(theirs, f"_{name}_dense").get_weights()
        target = getattr(ours, f"{dense}_projection")
        target.set_weights([kernel.reshape(target.kernel.shape), bias.reshape(-1)])


@pytest.mark.parametrize("key_dim", [None, 3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_self_attention_equals_that_of_keras(rng, key_dim, causal, masked):
    x = normal(rng, 2, 5, 8)
    theirs = keras.layers.MultiHeadAttention(2, key_dim or 4)
    ours = kt.MultiHeadSelfAttention(2, key_dim, causal=causal)
    mask = np.array([[[1, 1, 1, 0, 0]] * 5, [[1] * 5] * 5], bool) if masked else None
    theirs(x, x)
    for weight in theirs.weights:
        weight.assign(normal(rng, *weight.shape))
    ours.build(x.shape)
    copy_weights(theirs, ours)
    expected, expected_weights = theirs(x, x, attention_mask=mask, use_causal_mask=causal, return_attention_scores=True)
    output, weights = ours(x, attention_mask=mask, return_attention_scores=True)
    np.testing.assert_allclose(output, expected, atol=1e-5)
    np.testing.assert_allclose(weights, expected_weights, atol=1e-5)


def test_cross_attention_equals_that_of_keras(rng):
    x, context = normal(rng, 2, 4, 8), normal(rng, 2, 5, 6)
    padding = np.array([[1, 1, 1, 0, 0], [1] * 5], bool)
    theirs = keras.layers.MultiHeadAttention(2, 4)
    theirs(x, context)
    ours = kt.MultiHeadCrossAttention(2)
    ours.build(x.shape, context.shape)
    copy_weights(theirs, ours)
    expected = theirs(x, context, attention_mask=np.repeat(padding[:, None], 4, axis=1))
    np.testing.assert_allclose(ours(x, context, context_padding_mask=padding), expected, atol=1e-5)


# masks


@pytest.mark.parametrize("cross", [False, True])
def test_attention_masks_of_every_rank_agree(rng, cross):
    layer = kt.MultiHeadCrossAttention(num_heads=2) if cross else kt.MultiHeadSelfAttention(num_heads=2)
    inputs = (normal(rng, 2, 3, 8), normal(rng, 2, 5, 8)) if cross else (normal(rng, 2, 5, 8),)
    queries, keys = inputs[0].shape[1], inputs[-1].shape[1]
    mask = rng.integers(0, 2, size=(queries, keys)).astype(bool) | np.eye(queries, keys, dtype=bool)
    expected = layer(*inputs, attention_mask=mask)
    assert np.max(np.abs(np.asarray(expected) - np.asarray(layer(*inputs)))) > 1e-3
    for shape in ((2, queries, keys), (2, 1, queries, keys), (2, 2, queries, keys)):
        np.testing.assert_allclose(layer(*inputs, attention_mask=np.broadcast_to(mask, shape)), expected, atol=1e-6)


def test_masks_may_differ_by_row_and_by_head(rng):
    q, k, v = heads(rng)
    mask = rng.integers(0, 2, size=(2, 2, 4, 5)).astype(bool)
    mask[..., 0] = True
    _, weights = kt.dot_product_attention(q, k, v, mask=mask)
    for row, head in itertools.product(range(2), range(2)):
        alone = [x[row : row + 1, :, head : head + 1] for x in (q, k, v)]
        _, expected = kt.dot_product_attention(*alone, mask=mask[row, head])
        np.testing.assert_allclose(weights[row, head], expected[0, 0], atol=1e-6)


def test_the_function_takes_a_padding_mask_of_four_axes(rng):
    q, k, v = heads(rng)
    padding = np.array([[1, 1, 1, 0, 0], [1] * 5])
    output, _ = kt.dot_product_attention(q, k, v, mask=padding[:, None, None])
    expected, _ = kt.dot_product_attention(q, k, v, mask=np.repeat(padding[:, None], 4, axis=1))
    np.testing.assert_array_equal(output, expected)


@pytest.mark.parametrize("shape", [(5,), (2, 5), (4, 5), (2, 5, 4), (2, 3, 5, 5), (1, 2, 1, 5, 5)])
def test_attention_masks_of_other_shapes_are_refused(rng, shape):
    with pytest.raises(ValueError, match="`attention_mask` must have the shape"):
        kt.MultiHeadSelfAttention(num_heads=2)(normal(rng, 2, 5, 8), attention_mask=np.ones(shape, bool))


@pytest.mark.parametrize("dtype", ["int32", "uint8", "int64"])
def test_masks_of_ones_and_zeros_are_booleans(rng, dtype):
    x, mask = normal(rng, 2, 5, 8), np.array([[1, 1, 0, 1, 0], [1] * 5])
    layer = kt.MultiHeadSelfAttention(num_heads=2)
    expected = layer(x, padding_mask=mask.astype(bool))
    np.testing.assert_array_equal(layer(x, padding_mask=mask.astype(dtype)), expected)
    square = np.repeat(mask[:, None], 5, axis=1)
    np.testing.assert_array_equal(layer(x, attention_mask=square.astype(dtype)), expected)


@pytest.mark.parametrize("argument, shape", [("padding_mask", (2, 5)), ("attention_mask", (5, 5))])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_float_masks_are_refused(rng, argument, shape, dtype):
    with pytest.raises(ValueError, match=f"`{argument}` must be boolean or integer.*got float.*converted by"):
        kt.MultiHeadSelfAttention(2)(normal(rng, 2, 5, 8), **{argument: np.zeros(shape, dtype)})


def test_float_masks_are_refused_when_a_model_is_composed():
    x, mask = keras.Input((5, 8)), keras.Input((5,), dtype="float32")
    with pytest.raises(ValueError, match="boolean or integer"):
        kt.MultiHeadSelfAttention(2)(x, padding_mask=mask)


def test_explicit_and_travelling_masks_are_both_heeded(rng):
    embedding, layer = kt.TokenEmbedding(9, 8), kt.MultiHeadSelfAttention(2)
    travelling = embedding(np.array([[3, 4, 5, 0]]))
    explicit = np.array([[1, 0, 1, 1]])
    bare = kt.TokenEmbedding(9, 8, mask_zero=False)
    bare.build((None, None))
    bare.set_weights(embedding.get_weights())
    both = layer(bare(np.array([[3, 4, 5, 0]])), padding_mask=np.array([[1, 0, 1, 0]]))
    np.testing.assert_allclose(layer(travelling, padding_mask=explicit), both, atol=1e-6)


def test_the_mask_of_the_input_is_left_alone_and_passed_on():
    x = kt.TokenEmbedding(9, 8)(np.array([[3, 4, 0]]))
    context = kt.TokenEmbedding(9, 8)(np.array([[5, 0]]))
    masks = get_keras_mask(x), get_keras_mask(context)
    for output in (kt.MultiHeadSelfAttention(2)(x), kt.MultiHeadCrossAttention(2)(x, context)):
        assert (get_keras_mask(x), get_keras_mask(context)) == masks
        assert np.asarray(get_keras_mask(output)).tolist() == [[True, True, False]]


def test_cross_attention_does_not_see_padding(rng):
    x, context = normal(rng, 1, 3, 8), normal(rng, 1, 4, 8)
    layer = kt.MultiHeadCrossAttention(2)
    short = layer(x, context[:, :2])
    np.testing.assert_allclose(layer(x, context, context_padding_mask=np.array([[1, 1, 0, 0]])), short, atol=1e-6)


def test_a_query_that_may_look_nowhere_gets_zero_on_every_path(rng):
    x = normal(rng, 2, 4, 8)
    mask = np.ones((4, 4), bool)
    mask[2] = False
    mask[:, 3] = False
    layer = kt.MultiHeadSelfAttention(2)
    output, weights = layer(x, attention_mask=mask, return_attention_scores=True)
    np.testing.assert_array_equal(np.asarray(weights)[:, :, 2], 0)
    np.testing.assert_array_equal(output, layer(x, attention_mask=mask))
    np.testing.assert_allclose(output[:, 2], np.broadcast_to(np.asarray(layer.output_projection.bias), (2, 8)))
    changed = x.copy()
    changed[:, 3] += 5
    np.testing.assert_allclose(layer(changed, attention_mask=mask)[:, :3], output[:, :3], atol=1e-6)
    nothing = layer(x, padding_mask=np.zeros((2, 4), bool))
    np.testing.assert_allclose(nothing, np.broadcast_to(np.asarray(layer.output_projection.bias), (2, 4, 8)))


def test_a_source_of_padding_alone_does_not_matter(rng):
    x, context, other = normal(rng, 2, 3, 8), normal(rng, 2, 4, 8), normal(rng, 2, 4, 8)
    layer, padding = kt.MultiHeadCrossAttention(2), np.array([[0] * 4, [1] * 4])
    output, weights = layer(x, context, context_padding_mask=padding, return_attention_scores=True)
    np.testing.assert_array_equal(np.asarray(weights)[0], 0)
    np.testing.assert_array_equal(layer(x, context, context_padding_mask=padding), output)
    np.testing.assert_array_equal(layer(x, other, context_padding_mask=padding)[0], output[0])


def gradients(f, *arguments):
    """Of a function of tensors to a number."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(arguments)
            loss = f(*arguments)
        return tape.gradient(loss, arguments)
    jax = pytest.importorskip("jax")
    return jax.grad(f, argnums=tuple(range(len(arguments))))(*arguments)


def test_gradients_are_finite_where_a_query_may_look_nowhere(rng):
    q, k, v = heads(rng)
    mask = np.ones((4, 5), bool)
    mask[1] = False
    dq, dk, dv = gradients(lambda *x: ops.sum(kt.dot_product_attention(*x, mask=mask)[0] ** 2), q, k, v)
    assert all(np.all(np.isfinite(np.asarray(gradient))) for gradient in (dq, dk, dv))
    np.testing.assert_array_equal(dq[:, 1], 0)
    assert np.all(np.max(np.abs(np.asarray(dq)), axis=(0, 2, 3))[[0, 2, 3]] > 1e-4)


# precision


def test_float16_does_not_overflow_before_it_is_scaled(rng):
    q = np.full((1, 3, 1, 64), 40.0)
    q[0, 1] = -40
    k, v = q[:, ::-1].copy(), normal(rng, 1, 3, 1, 64)
    half, _ = kt.dot_product_attention(*(ops.cast(x, "float16") for x in (q, k, v)))
    full, _ = kt.dot_product_attention(*(ops.cast(x, "float32") for x in (q, k, v)))
    np.testing.assert_allclose(plain(half), full, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("score", [-6e4, 6e4])
def test_masked_weights_are_zero_and_rows_sum_to_one_at_extreme_scores(dtype, score):
    q = ops.full((1, 2, 1, 1), 240.0, dtype=dtype)
    k = ops.full((1, 3, 1, 1), score / 240, dtype=dtype)
    mask = np.array([[True, True, False], [False, True, False]])
    output, weights = kt.dot_product_attention(q, k, ops.ones_like(k), mask=mask)
    assert np.all(plain(weights)[0, 0][~mask] == 0)
    np.testing.assert_allclose(plain(weights).sum(-1), 1, rtol=1e-2)
    np.testing.assert_allclose(plain(output), 1, rtol=1e-2)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision_is_near_float32(rng, policy):
    x = normal(rng, 2, 5, 16)
    exact = kt.MultiHeadSelfAttention(2, causal=True)
    expected = exact(x)
    layer = kt.MultiHeadSelfAttention(2, causal=True, dtype=policy)
    layer.build(x.shape)
    layer.set_weights(exact.get_weights())
    output = layer(x)
    assert keras.backend.standardize_dtype(output.dtype) == layer.compute_dtype
    np.testing.assert_allclose(plain(output), expected, atol=0.05)


# dropout


def test_dropout_is_seeded_and_acts_in_training_only(rng):
    q, k, v = heads(rng, keys=200)
    first, weights = kt.dot_product_attention(q, k, ops.ones_like(v), dropout=0.3, seed=5)
    again, _ = kt.dot_product_attention(q, k, ops.ones_like(v), dropout=0.3, seed=5)
    other, _ = kt.dot_product_attention(q, k, ops.ones_like(v), dropout=0.3, seed=6)
    np.testing.assert_array_equal(first, again)
    assert np.max(np.abs(np.asarray(first) - np.asarray(other))) > 1e-3
    np.testing.assert_allclose(np.mean(np.asarray(first)), 1, atol=0.05)  # what is kept is scaled up
    np.testing.assert_allclose(np.asarray(weights).sum(-1), 1, rtol=1e-5)  # returned as they were before

    pick = np.tile(np.eye(200, dtype="float32")[None, :, None], (2, 1, 2, 1))  # values that give the weights back
    kept = np.asarray(kt.dot_product_attention(q, k, pick, dropout=0.3, seed=5)[0]).transpose(0, 2, 1, 3)
    exact = np.where(kept == 0, 0, np.asarray(weights) / 0.7)
    np.testing.assert_allclose(kept, exact, rtol=1e-4)
    assert 0.25 < np.mean(kept == 0) < 0.35

    layer, x = kt.MultiHeadSelfAttention(2, dropout=0.5), normal(rng, 2, 5, 8)
    np.testing.assert_array_equal(layer(x), layer(x, training=False))
    assert np.max(np.abs(np.asarray(layer(x, training=True)) - np.asarray(layer(x)))) > 1e-3


# constructors and calls that are refused


def test_width_must_be_divisible_by_heads():
    with pytest.raises(ValueError, match="`d_model` must be divisible by `num_heads`.*got 8 and 3"):
        kt.MultiHeadSelfAttention(3)(np.zeros((1, 2, 8), "float32"))
    assert kt.MultiHeadSelfAttention(3, key_dim=5)(np.zeros((1, 2, 8), "float32")).shape == (1, 2, 8)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"num_heads": 0}, "`num_heads` must be a whole number of at least 1; got 0"),
        ({"num_heads": True}, "`num_heads` must be a whole number of at least 1; got True"),
        ({"num_heads": 2, "key_dim": 1.5}, "`key_dim` must be a whole number of at least 1; got 1.5"),
        ({"num_heads": 2, "dropout": -0.1}, "`dropout` must be at least 0 and below 1; got -0.1"),
    ],
)
@pytest.mark.parametrize("cls", [kt.MultiHeadSelfAttention, kt.MultiHeadCrossAttention])
def test_bad_arguments_are_refused(cls, arguments, message):
    with pytest.raises(ValueError, match=message):
        cls(**arguments)


def test_token_ids_for_vectors_are_refused(rng):
    ids, x = np.array([[1, 2]]), normal(rng, 1, 2, 8)
    with pytest.raises(ValueError, match="`x` must be float vectors"):
        kt.MultiHeadSelfAttention(2)(ids)
    with pytest.raises(ValueError, match="`context` must be float vectors"):
        kt.MultiHeadCrossAttention(2)(x, ids)


@pytest.mark.parametrize("cls", [kt.MultiHeadSelfAttention, kt.MultiHeadCrossAttention, kt.EncoderBlock])
def test_token_ids_are_refused_when_a_model_is_composed(cls):
    ids = keras.Input((None,), dtype="int32")
    layer = cls(2, 8) if cls is kt.EncoderBlock else cls(2)
    with pytest.raises(ValueError, match="float vectors of shape"):
        layer(*([ids, ids] if cls is kt.MultiHeadCrossAttention else [ids]))


@pytest.mark.parametrize("shape", [(1, 1, 8), (0, 3, 8), (3, 1, 8)])
def test_one_token_and_no_row_are_no_special_cases(shape):
    x = np.ones(shape, "float32")
    layer = kt.MultiHeadSelfAttention(2, causal=True)
    values = layer.output_projection(layer.value_projection(x)) if layer(x).shape[1] == 1 else layer(x)
    np.testing.assert_allclose(layer(x), values, atol=1e-6)  # one key has the whole weight
    assert layer(x).shape == kt.MultiHeadCrossAttention(2)(x, x[:, :1]).shape == shape


# the cache


def in_steps(layer, x, sizes, length, **arguments):
    """Runs a layer over pieces of `x` in a cache."""
    cache, outputs, at = None, [], 0
    for size in sizes:
        with kt.DecodingScope(cache, index=np.full(len(x), at), length=length) as scope:
            outputs.append(plain(layer(x[:, at : at + size], **arguments)))
        cache, at = scope.cache, at + size
    return np.concatenate(outputs, axis=1)


@pytest.mark.parametrize("policy, tolerance", [("float32", 1e-5), ("mixed_bfloat16", 0.05), ("mixed_float16", 5e-3)])
@pytest.mark.parametrize("sizes", [[1] * 6, [3, 1, 1, 1], [6], [2, 4]])
def test_cached_steps_equal_the_full_pass(rng, policy, tolerance, sizes):
    x = normal(rng, 2, 6, 8)
    layer = kt.MultiHeadSelfAttention(2, causal=True, dtype=policy)
    np.testing.assert_allclose(in_steps(layer, x, sizes, length=9), plain(layer(x)), atol=tolerance)
    block = kt.DecoderBlock(2, 8, dropout=0.0, dtype=policy)
    context, padding = normal(rng, 2, 4, 8), np.array([[1, 1, 0, 0], [1, 1, 1, 1]])
    arguments = {"context": context, "context_padding_mask": padding}
    np.testing.assert_allclose(
        in_steps(block, x, sizes, length=6, **arguments), plain(block(x, **arguments)), atol=tolerance
    )


def test_rows_stand_at_their_own_index(rng):
    x = normal(rng, 2, 6, 8)
    layer = kt.MultiHeadSelfAttention(2, causal=True)
    full = np.asarray(layer(x))
    with kt.DecodingScope(None, index=np.array([0, 0]), length=6) as scope:
        layer(x[:, :3])  # of the second row only the first token counts: the others are padding
    with kt.DecodingScope(scope.cache, index=np.array([3, 1]), length=6) as scope:
        step = layer(np.stack([x[0, 3:5], x[1, 1:3]]))
    np.testing.assert_allclose(step, np.stack([full[0, 3:5], full[1, 1:3]]), atol=1e-5)


def test_cross_attention_keeps_the_context_of_the_first_call(rng):
    layer, x, context = kt.MultiHeadCrossAttention(2), normal(rng, 2, 3, 8), normal(rng, 2, 4, 8)
    with kt.DecodingScope(None, index=[0, 0], length=3) as scope:
        layer(x[:, :1], context)
    with kt.DecodingScope(scope.cache, index=[1, 1], length=3) as scope:
        step = layer(x[:, 1:], np.zeros_like(context))
    np.testing.assert_allclose(step, layer(x, context)[:, 1:], atol=1e-5)
    assert scope.cache["self"] == {} and len(scope.cache["cross"]) == 1


def test_maps_of_a_cached_step_are_over_the_slots(rng):
    layer, x = kt.MultiHeadSelfAttention(2, causal=True, name="layer"), normal(rng, 2, 3, 8)
    _, full = layer(x, return_attention_scores=True)
    with kt.DecodingScope(None, index=[0, 0], length=5) as scope:
        layer(x[:, :2])
    with kt.AttentionMaps() as maps, kt.DecodingScope(scope.cache, index=[2, 2], length=5):
        layer(x[:, 2:])
    expected = np.pad(np.asarray(full)[:, :, 2:], [(0, 0)] * 3 + [(0, 2)])
    np.testing.assert_allclose(maps["layer"], expected, atol=1e-6)


def test_the_cache_takes_no_more_than_it_holds(rng):
    layer, x = kt.MultiHeadSelfAttention(2, causal=True), normal(rng, 1, 5, 8)
    with pytest.raises(ValueError, match="length 4 for 5 new tokens after 0"), kt.DecodingScope(None, [0], 4):
        layer(x)
    with kt.DecodingScope(None, [0], 4) as scope:
        layer(x[:, :4])
    with pytest.raises(ValueError, match="length 4 for 1 new tokens after 4"), kt.DecodingScope(scope.cache, [4], 4):
        layer(x[:, 4:])


def test_a_layer_that_is_not_causal_and_the_world_outside_ignore_the_scope(rng):
    x = normal(rng, 1, 3, 8)
    layer, causal = kt.MultiHeadSelfAttention(2), kt.MultiHeadSelfAttention(2, causal=True)
    outside = layer(x), causal(x)
    with kt.DecodingScope(None, [0], 3) as scope:
        np.testing.assert_array_equal(layer(x), outside[0])
    assert scope.cache == {"self": {}, "cross": {}}
    np.testing.assert_array_equal(causal(x), outside[1])


# attention maps


def test_maps_collect_every_layer_also_of_nested_models(rng):
    model = kt.build_transformer(10, d_model=8, num_layers=2, num_heads=2, intermediate_dim=8)
    inputs = {"source": np.array([[4, 5, 0]]), "target": np.array([[2, 6]])}
    outside = model(inputs)
    with kt.AttentionMaps() as maps:
        np.testing.assert_array_equal(model(inputs), outside)
    shapes = {name: weights.shape for name, weights in maps.items()}
    assert shapes == {
        **{f"encoder_block_{i}/self_attention": (1, 2, 3, 3) for i in (1, 2)},
        **{f"decoder_block_{i}/self_attention": (1, 2, 2, 2) for i in (1, 2)},
        **{f"decoder_block_{i}/cross_attention": (1, 2, 2, 3) for i in (1, 2)},
    }
    for weights in maps.values():
        np.testing.assert_allclose(np.asarray(weights).sum(-1), 1, rtol=1e-5)
    assert np.all(np.asarray(maps["decoder_block_1/cross_attention"])[..., 2] == 0)


def test_maps_keep_every_call_of_one_layer_and_end_with_the_scope(rng):
    layer, x = kt.MultiHeadSelfAttention(2, name="twice"), normal(rng, 1, 3, 8)
    with kt.AttentionMaps() as outer:
        layer(x)
        with kt.AttentionMaps() as inner:
            layer(x)
        layer(x[:, :2])
    layer(x)
    assert list(outer) == ["twice", "twice (2)"] and list(inner) == ["twice"]
    assert outer["twice (2)"].shape == (1, 2, 2, 2)


@on_tensorflow
def test_a_graph_of_unknown_shape_agrees_with_eager(rng):
    import tensorflow as tf

    layer, x = kt.MultiHeadSelfAttention(2, causal=True), normal(rng, 2, 5, 8)
    expected = layer(x, padding_mask=np.array([[1, 1, 1, 1, 0], [1] * 5]))
    graph = tf.function(
        lambda x, mask: layer(x, padding_mask=mask),
        input_signature=[tf.TensorSpec([None, None, 8]), tf.TensorSpec([None, None], tf.bool)],
    )
    np.testing.assert_allclose(graph(x, np.array([[1, 1, 1, 1, 0], [1] * 5], bool)), expected, atol=1e-6)


def compiled(f, xla=False):
    """`f` as one graph: `tf.function` or `jax.jit`."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.function(f, jit_compile=xla)
    return pytest.importorskip("jax").jit(f)


@pytest.mark.parametrize("xla", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_compiled_call_agrees_with_eager_in_values_and_gradients(rng, xla):
    layer, context = kt.MultiHeadCrossAttention(2), ops.convert_to_tensor(normal(rng, 2, 4, 8))
    x, padding = ops.convert_to_tensor(normal(rng, 2, 3, 8)), np.array([[0] * 4, [1, 1, 0, 0]], bool)
    layer(x, context)

    def run(x, context):
        return layer(x, context, context_padding_mask=padding)

    def gradient(x, context):
        return gradients(lambda *inputs: ops.sum(run(*inputs) ** 2), x, context)

    np.testing.assert_allclose(compiled(run, xla)(x, context), run(x, context), atol=1e-5)
    for found, expected in zip(compiled(gradient, xla)(x, context), gradient(x, context)):
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("xla", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_compiled_cached_step_agrees_with_the_full_pass(rng, xla):
    layer, x = kt.MultiHeadSelfAttention(2, causal=True), ops.convert_to_tensor(normal(rng, 2, 5, 8))
    full = layer(x)

    def step(x, index, cache):
        with kt.DecodingScope(cache, index=index, length=5) as scope:
            return layer(x), scope.cache

    output, cache = compiled(step, xla)(x[:, :2], ops.array([0, 0]), None)
    outputs, one = [output], compiled(step, xla)
    for t in range(2, 5):
        output, cache = one(x[:, t : t + 1], ops.array([t, t]), cache)
        outputs.append(output)
    np.testing.assert_allclose(ops.concatenate(outputs, axis=1), full, atol=1e-5)


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="Keras has flash kernels on JAX")
@pytest.mark.parametrize(
    "options, flash",
    [({}, True), ({"causal": True}, True), ({"dropout": 0.1, "seed": 1}, False), ({"window": 2}, False)],
)
def test_keras_flash_kernels_are_used_where_they_apply(rng, monkeypatch, options, flash):
    q, k, v = heads(rng, keys=4)
    expected, _ = kt.dot_product_attention(q, k, v, **options)
    np.testing.assert_allclose(kt.blockwise_attention(q, k, v, **options), expected, atol=1e-5)  # no such device
    calls = []

    def theirs(query, key, value, is_causal, flash_attention):
        calls.append((is_causal, flash_attention))
        return query

    monkeypatch.setattr(ops, "dot_product_attention", theirs)
    kt.blockwise_attention(q, k, v, **options)
    assert calls == ([(options.get("causal", False), True)] if flash else [])
