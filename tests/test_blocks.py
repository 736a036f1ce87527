"""Feed-forward, encoder and decoder blocks: padding, causality, masks, configs, errors, precision and export."""

import json

import keras
import numpy as np
import pytest
from keras import ops
from keras.src.backend import get_keras_mask

import keras_transformer as kt

WIDTH, VOCAB = 8, 12
TF = keras.backend.backend() == "tensorflow"
tf_only = pytest.mark.skipif(not TF, reason="SavedModel export needs TensorFlow")
BLOCKS = [kt.EncoderBlock, kt.DecoderBlock]
SHORT, PADDED = np.array([[3, 4], [5, 6]]), np.array([[3, 4, 0, 0], [5, 6, 0, 0]])
SHORT_TARGET, PADDED_TARGET = np.array([[2, 7, 8], [2, 9, 3]]), np.array([[2, 7, 8, 0, 0], [2, 9, 3, 0, 0]])


def array(x):
    return ops.convert_to_numpy(ops.cast(x, "float32"))


def close(actual, expected, atol=1e-5):
    np.testing.assert_allclose(array(actual), array(expected), atol=atol, rtol=0)


def block(cls, **options):
    return cls(num_heads=2, intermediate_dim=16, **options)


def embedded(ids, embedding, masked=True):
    """Vectors with positions, whose padding has vectors as large as those of tokens."""
    if embedding == "TokenEmbedding":
        x = kt.TokenEmbedding(VOCAB, WIDTH, mask_zero=masked)(ids)
    else:
        x = keras.layers.Embedding(VOCAB, WIDTH, mask_zero=masked, embeddings_initializer="random_normal")(ids)
    return kt.PositionalEncoding()(x)


def stack(cls, depth, norm_first=False, embedding="TokenEmbedding", pooled=False, explicit=None):
    """A model of `depth` blocks. `explicit` masks go to `"all"` blocks or to the `"first"`, which passes them on."""
    ids = keras.Input((None,), dtype="int32")
    x = embedded(ids, embedding, masked=explicit is None)
    for i in range(depth):
        given = explicit == "all" or (explicit == "first" and i == 0)
        options = {"padding_mask": ops.not_equal(ids, 0)} if given else {}
        x = block(cls, norm_first=norm_first)(x, **options)
    if norm_first:
        x = keras.layers.LayerNormalization()(x)
    if pooled:
        x = keras.layers.GlobalAveragePooling1D()(x)
    return scrambled(keras.Model(ids, x))


def pair(depth, norm_first=False, explicit=False):
    """An encoder-decoder of `depth` blocks each, with masks that travel or with explicit ones."""
    source, target = keras.Input((None,), dtype="int32"), keras.Input((None,), dtype="int32")
    encoder, decoder = {}, {}
    if explicit:
        encoder = {"padding_mask": ops.not_equal(source, 0)}
        decoder = {"padding_mask": ops.not_equal(target, 0), "context_padding_mask": ops.not_equal(source, 0)}
    x, y = (embedded(ids, "TokenEmbedding", masked=not explicit) for ids in (source, target))
    for _ in range(depth):
        x = block(kt.EncoderBlock, norm_first=norm_first)(x, **encoder)
    for _ in range(depth):
        y = block(kt.DecoderBlock, norm_first=norm_first)(y, x, **decoder)
    return scrambled(keras.Model([source, target], y))


def scrambled(layer):
    """Weights that are nowhere 0 or 1, so that biases and normalizations take part."""
    rng = np.random.default_rng(1)
    for weight in layer.trainable_weights:
        weight.assign(array(weight) + rng.normal(0, 0.2, weight.shape))
    return layer


def reloaded(model, tmp_path):
    path = tmp_path / "model.keras"
    model.save(path)
    return keras.saving.load_model(path, safe_mode=True)


def exported(model, tmp_path):
    """The function that an exported model serves."""
    import tensorflow as tf

    model.export(tmp_path / "exported", verbose=False)
    loaded = tf.saved_model.load(str(tmp_path / "exported"))
    return lambda *args: loaded.serve(*args)  # keeps `loaded`, which owns the variables, alive


def assert_padding_changes_nothing(f, pooled=False):
    short, padded = f(SHORT), f(PADDED)
    close(padded if pooled else padded[:, :2], short)


def assert_padding_changes_nothing_on_both_sides(f):
    close(f([PADDED, PADDED_TARGET])[:, :3], f([SHORT, SHORT_TARGET]))
    close(f([PADDED, SHORT_TARGET]), f([SHORT, SHORT_TARGET]))
    close(f([SHORT, PADDED_TARGET])[:, :3], f([SHORT, SHORT_TARGET]))


# padding


@pytest.mark.parametrize("embedding", ["TokenEmbedding", "Embedding"])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("cls", BLOCKS)
def test_padding_does_not_change_tokens(cls, depth, norm_first, embedding):
    assert_padding_changes_nothing(stack(cls, depth, norm_first, embedding))


@pytest.mark.parametrize("explicit", [None, "first", "all"])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("cls", BLOCKS)
def test_padding_does_not_change_the_average_of_tokens(cls, norm_first, explicit):
    assert_padding_changes_nothing(stack(cls, 2, norm_first, pooled=True, explicit=explicit), pooled=True)


@pytest.mark.parametrize("explicit", ["first", "all"])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("cls", BLOCKS)
def test_explicit_padding_masks_do_as_well(cls, norm_first, explicit):
    assert_padding_changes_nothing(stack(cls, 2, norm_first, explicit=explicit))


@pytest.mark.parametrize("explicit", [None, "first"])
@pytest.mark.parametrize("cls", BLOCKS)
def test_padding_does_not_change_what_is_predicted(cls, explicit):
    """Keras predicts in a compiled graph; a call outside one is what the tests above probe."""
    model = stack(cls, 2, explicit=explicit)
    model.compile(jit_compile=False)
    assert_padding_changes_nothing(lambda ids: model.predict(ids, verbose=0))


def test_a_stack_without_masks_does_see_padding():
    """What the tests above would miss if padding had no effect anyway."""
    ids = keras.Input((None,), dtype="int32")
    f = scrambled(keras.Model(ids, block(kt.EncoderBlock)(embedded(ids, "TokenEmbedding", masked=False))))
    assert np.abs(array(f(PADDED)[:, :2]) - array(f(SHORT))).max() > 1e-2


@pytest.mark.parametrize("cls", BLOCKS)
def test_an_explicit_mask_and_one_that_travels_are_anded(cls):
    embedding, layer = kt.TokenEmbedding(VOCAB, WIDTH), block(cls)
    x = embedding(np.array([[3, 4, 5, 0]]))
    hidden = layer(x, padding_mask=np.array([[True, False, True, True]]))
    close(get_keras_mask(hidden), np.array([[1, 0, 1, 0]]))
    close(hidden, layer(ops.convert_to_tensor(x), padding_mask=np.array([[1, 0, 1, 0]])))


@pytest.mark.parametrize("explicit", [None, "first", "all"])
@pytest.mark.parametrize("embedding", ["TokenEmbedding", "Embedding"])
@pytest.mark.parametrize("cls", BLOCKS)
def test_padding_does_not_change_tokens_after_a_reload(cls, embedding, explicit, tmp_path):
    model = stack(cls, 2, embedding=embedding, explicit=explicit)
    again = reloaded(model, tmp_path)
    close(again(PADDED), model(PADDED))
    assert_padding_changes_nothing(again)


@tf_only
@pytest.mark.slow
@pytest.mark.parametrize("explicit", [None, "first", "all"])
@pytest.mark.parametrize("cls", BLOCKS)
def test_padding_does_not_change_tokens_after_an_export(cls, explicit, tmp_path):
    model = stack(cls, 2, norm_first=True, explicit=explicit)
    served = exported(model, tmp_path)
    close(served(PADDED.astype("int32")), model(PADDED))
    assert_padding_changes_nothing(lambda ids: served(ids.astype("int32")))


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_padding_on_both_sides_does_not_change_tokens(depth, norm_first, explicit):
    assert_padding_changes_nothing_on_both_sides(pair(depth, norm_first, explicit))


@pytest.mark.parametrize("norm_first", [False, True])
def test_an_explicit_mask_hides_the_padding_of_the_context(norm_first, rng):
    x, context = (rng.normal(size=(2, n, WIDTH)).astype("float32") for n in (3, 4))
    layer = block(kt.DecoderBlock, norm_first=norm_first)
    expected = layer(x, context[:, :2])
    close(layer(x, context, context_padding_mask=PADDED != 0), expected)
    assert np.abs(array(layer(x, context)) - array(expected)).max() > 1e-3


@pytest.mark.parametrize("explicit", [False, True])
def test_padding_on_both_sides_does_not_change_tokens_after_a_reload(explicit, tmp_path):
    assert_padding_changes_nothing_on_both_sides(reloaded(pair(2, explicit=explicit), tmp_path))


@tf_only
@pytest.mark.slow
def test_padding_on_both_sides_does_not_change_tokens_after_an_export(tmp_path):
    served = exported(pair(2), tmp_path)
    assert_padding_changes_nothing_on_both_sides(lambda pair: served([ids.astype("int32") for ids in pair]))


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("cls", BLOCKS)
def test_padding_does_not_change_tokens_in_half_precision(cls, dtype):
    keras.config.set_dtype_policy(dtype)
    f = stack(cls, 2)
    close(f(PADDED)[:, :2], f(SHORT), atol=5e-2 if dtype == "mixed_bfloat16" else 5e-3)


# masks that travel


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("cls", BLOCKS)
def test_a_call_leaves_the_mask_of_its_input_as_it_is(cls, norm_first, explicit):
    x = kt.TokenEmbedding(VOCAB, WIDTH)(PADDED)
    mask, options = get_keras_mask(x), {"padding_mask": np.ones((2, 4), bool)} if explicit else {}
    layer = block(cls, norm_first=norm_first)
    output = layer(x, **options)
    assert mask is not None and get_keras_mask(x) is mask
    close(get_keras_mask(output), PADDED != 0)


@pytest.mark.parametrize("cls", BLOCKS)
def test_an_input_without_a_mask_stays_without_one(cls, rng):
    x = ops.convert_to_tensor(rng.normal(size=(2, 4, WIDTH)), "float32")
    output = block(cls)(x, padding_mask=PADDED != 0)
    assert get_keras_mask(x) is None
    close(get_keras_mask(output), PADDED != 0)
    assert get_keras_mask(block(cls)(x)) is None


def test_cross_attention_leaves_the_mask_of_the_context_as_it_is():
    embedding = kt.TokenEmbedding(VOCAB, WIDTH)
    x, context = embedding(PADDED_TARGET), embedding(PADDED)
    mask = get_keras_mask(context)
    output = block(kt.DecoderBlock)(x, context, context_padding_mask=np.array([[1, 0, 1, 1]] * 2))
    assert get_keras_mask(context) is mask
    close(get_keras_mask(output), PADDED_TARGET != 0)


def test_feed_forward_passes_the_mask_on():
    x = kt.TokenEmbedding(VOCAB, WIDTH)(PADDED)
    mask = get_keras_mask(x)
    assert get_keras_mask(kt.FeedForward(16)(x)) is mask is get_keras_mask(x)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("norm_first", [False, True])
def test_a_decoder_stack_does_not_look_ahead(norm_first, dropout, rng):
    options = {"attention": {"dropout": dropout}, "feed_forward": {"dropout": dropout}, "dropout": dropout}
    inputs = keras.Input((6, WIDTH))
    x = inputs
    for _ in range(3):
        x = block(kt.DecoderBlock, norm_first=norm_first, **options)(x)
    model = scrambled(keras.Model(inputs, x))
    seeds = [(v, array(v)) for v in model.non_trainable_variables]

    def run(x):
        for variable, state in seeds:
            variable.assign(state)
        return array(model(x, training=True))

    x = rng.normal(size=(2, 6, WIDTH)).astype("float32")
    before = run(x)
    for t in range(1, 6):
        changed = x.copy()
        changed[:, t:] = rng.normal(size=changed[:, t:].shape)
        after = run(changed)
        close(after[:, :t], before[:, :t])
        assert np.all(np.abs(after[:, t:] - before[:, t:]).max(axis=-1) > 1e-3)


def test_an_encoder_block_looks_ahead_and_takes_an_attention_mask(rng):
    x = rng.normal(size=(1, 4, WIDTH)).astype("float32")
    encoder, decoder = block(kt.EncoderBlock), block(kt.DecoderBlock)
    encoder.build(x.shape), decoder.build(x.shape)
    decoder.set_weights(encoder.get_weights())
    assert np.abs(array(encoder(x)) - array(decoder(x))).max() > 1e-3
    close(encoder(x, attention_mask=kt.lower_triangular_mask(4)), decoder(x))


# configs


CONFIGURED = [
    (kt.Pooling, {"method": "attention"}),
    (
        kt.EncoderBlock,
        {"num_heads": 2, "intermediate_dim": 16, "dropout": 0.2, "activation": "gelu", "norm_first": True},
    ),
    (
        kt.DecoderBlock,
        {
            "num_heads": 2,
            "intermediate_dim": 16,
            "use_bias": False,
            "epsilon": 1e-5,
            "attention": {"key_dim": 3, "dropout": 0.1, "use_bias": True},
            "feed_forward": {"gated": True, "dropout": 0.2, "use_bias": True},
        },
    ),
    (kt.LearnedPositions, {"max_length": 9, "dropout": 0.1}),
    (kt.RotaryPositions, {"max_wavelength": 500.0, "layout": "interleaved", "scaling": "linear", "factor": 2.0}),
    (kt.AlibiBias, {"num_heads": 3}),
    (kt.RelativeBias, {"num_heads": 3, "bidirectional": False, "num_buckets": 8, "max_distance": 20}),
    (kt.FeedForward, {"intermediate_dim": 16, "activation": "silu", "gated": True, "dropout": 0.1, "use_bias": False}),
    (kt.MultiHeadSelfAttention, {"num_heads": 2, "key_dim": 3, "causal": True, "dropout": 0.1, "use_bias": False}),
    (kt.MultiHeadCrossAttention, {"num_heads": 2, "key_dim": 3, "dropout": 0.1, "use_bias": False}),
    (kt.PositionalEncoding, {"dropout": 0.1}),
    (kt.TokenEmbedding, {"vocab_size": VOCAB, "d_model": WIDTH, "mask_zero": False, "tie_weights": False}),
]


def round_trip(layer):
    return type(layer).from_config(json.loads(json.dumps(layer.get_config())))


OF_IDS_OR_TEXT = ("SegmentIds", "TextGenerator", "Tokenizer", "Translator", "WordPiece")


def test_every_exported_layer_of_vectors_is_configured_here():
    exported = [getattr(kt, name) for name in kt.__all__ if name not in OF_IDS_OR_TEXT]
    layers = {cls for cls in exported if isinstance(cls, type) and issubclass(cls, keras.layers.Layer)}
    assert layers == {cls for cls, _ in CONFIGURED}


@pytest.mark.parametrize("policy", ["mixed_bfloat16", keras.DTypePolicy("mixed_bfloat16")], ids=["name", "object"])
@pytest.mark.parametrize(["cls", "arguments"], CONFIGURED)
def test_a_layer_comes_back_from_its_config(cls, arguments, policy):
    layer = cls(**arguments, name="mine", trainable=False, dtype=policy)
    again = round_trip(layer)
    assert again.get_config() == layer.get_config()
    assert again.name == "mine" and not again.trainable and again.dtype_policy.name == "mixed_bfloat16"
    assert {name: again.get_config()[name] for name in arguments} == arguments


@pytest.mark.parametrize("cls", BLOCKS)
def test_a_config_does_not_change_when_the_layer_is_built(cls, rng):
    layer = block(cls, attention={"key_dim": 3}, feed_forward={"gated": True})
    config = json.dumps(layer.get_config())
    x = rng.normal(size=(1, 3, WIDTH)).astype("float32")
    layer(x)
    assert json.dumps(layer.get_config()) == config
    again = round_trip(layer)
    again.build(x.shape)
    again.set_weights(layer.get_weights())
    close(again(x), layer(x), atol=1e-6)


def test_children_take_the_policy_of_their_block(rng):
    layer = block(kt.DecoderBlock, dtype="mixed_bfloat16")
    x = rng.normal(size=(1, 3, WIDTH))
    assert keras.backend.standardize_dtype(layer(x, x).dtype) == "bfloat16"
    assert {child.dtype_policy.name for child in layer._flatten_layers()} == {"mixed_bfloat16"}
    assert {keras.backend.standardize_dtype(weight.dtype) for weight in layer.trainable_weights} == {"float32"}


@pytest.mark.parametrize("cls", BLOCKS)
def test_numpy_arguments_become_plain(cls):
    layer = cls(
        num_heads=np.int64(2),
        intermediate_dim=np.int32(16),
        dropout=np.float32(0.5),
        norm_first=np.bool_(True),
        use_bias=np.bool_(False),
        epsilon=np.float32(2**-10),
        attention={"key_dim": np.int64(3), "dropout": np.float32(0.5), "use_bias": np.bool_(True)},
        feed_forward={"gated": np.bool_(True), "dropout": np.float64(0.5), "use_bias": np.bool_(True)},
    )
    assert round_trip(layer).get_config() == layer.get_config()
    config = layer.get_config()
    for value in [*config.values(), *config["attention"].values(), *config["feed_forward"].values()]:
        assert not isinstance(value, np.generic) or isinstance(value, str)


def test_numpy_arguments_of_the_parts_become_plain():
    for layer in (
        kt.FeedForward(np.int64(16), gated=np.bool_(True), dropout=np.float32(0.5), use_bias=np.bool_(False)),
        kt.MultiHeadSelfAttention(np.int64(2), np.int64(3), np.bool_(True), np.float32(0.5), np.bool_(False)),
        kt.MultiHeadCrossAttention(np.int64(2), np.int64(3), np.float32(0.5), np.bool_(False)),
    ):
        assert round_trip(layer).get_config() == layer.get_config()


# errors


@pytest.mark.parametrize(
    ["arguments", "message"],
    [
        ({"attention": {"heads": 2}}, "`attention` takes the options.*'heads'"),
        ({"attention": {"num_heads": 2}}, "`attention` takes the options.*'num_heads'"),
        ({"feed_forward": {"activation": "gelu"}}, "`feed_forward` takes the options.*'activation'"),
        ({"dropout": 1.0}, "`dropout` must be.*1.0"),
        ({"dropout": -0.1}, "`dropout` must be.*-0.1"),
        ({"num_heads": 0}, "`num_heads` must be.*0"),
        ({"num_heads": 2.5}, "`num_heads` must be.*2.5"),
        ({"intermediate_dim": 0}, "`intermediate_dim` must be.*0"),
        ({"activation": keras.activations.gelu}, "`activation` must be the name"),
        ({"activation": "no such one"}, "no such one"),
        ({"attention": {"dropout": 1.0}}, "`dropout` must be.*1.0"),
        ({"attention": {"key_dim": 0}}, "`key_dim` must be.*0"),
        ({"feed_forward": {"dropout": -0.1}}, "`dropout` must be.*-0.1"),
    ],
)
@pytest.mark.parametrize("cls", BLOCKS)
def test_wrong_arguments_are_refused_when_the_block_is_made(cls, arguments, message):
    with pytest.raises(ValueError, match=message):
        cls(**{"num_heads": 2, "intermediate_dim": 16, **arguments})


def test_feed_forward_refuses_wrong_arguments():
    for arguments in ({"intermediate_dim": 2.5}, {"dropout": 1.0}, {"activation": len}, {"activation": "no such one"}):
        with pytest.raises(ValueError):
            kt.FeedForward(**{"intermediate_dim": 16, **arguments})


def test_heads_have_to_divide_the_width(rng):
    with pytest.raises(ValueError, match="divisible by `num_heads`.*8 and 3"):
        kt.EncoderBlock(3, 16)(rng.normal(size=(1, 4, WIDTH)))
    assert kt.EncoderBlock(3, 16, attention={"key_dim": 4})(rng.normal(size=(1, 4, WIDTH))).shape == (1, 4, WIDTH)


def test_a_decoder_block_is_called_as_it_was_built(rng):
    x = rng.normal(size=(1, 4, WIDTH))
    with_context, without = block(kt.DecoderBlock), block(kt.DecoderBlock)
    with_context(x, x), without(x)
    with pytest.raises(ValueError, match="built with `context`.*call without"):
        with_context(x)
    with pytest.raises(ValueError, match="built without `context`.*call with"):
        without(x, x)
    assert with_context(x, x).shape == without(x).shape == x.shape


@pytest.mark.parametrize("cls", BLOCKS)
def test_wrong_masks_are_refused(cls, rng):
    x, layer = rng.normal(size=(1, 4, WIDTH)), block(cls)
    with pytest.raises(ValueError, match="`padding_mask` must be boolean or integer"):
        layer(x, padding_mask=np.ones((1, 4), "float32"))
    with pytest.raises(ValueError, match=r"`padding_mask` must have the shape \[B, 4\]; got \[1, 3\]"):
        layer(x, padding_mask=np.ones((1, 3), bool))
    with pytest.raises(ValueError, match="`padding_mask` must have the shape"):
        layer(x, padding_mask=np.ones((1, 1, 1, 4), bool))
    with pytest.raises(ValueError, match="`attention_mask` must be boolean or integer"):
        layer(x, attention_mask=np.ones((4, 4), "float32"))
    with pytest.raises(ValueError, match="`attention_mask` must have the shape"):
        layer(x, attention_mask=np.ones((4, 3), bool))


def test_wrong_masks_of_the_context_are_refused(rng):
    x, context, layer = rng.normal(size=(1, 4, WIDTH)), rng.normal(size=(1, 3, WIDTH)), block(kt.DecoderBlock)
    with pytest.raises(ValueError, match="`context_padding_mask` must be boolean or integer"):
        layer(x, context, context_padding_mask=np.ones((1, 3), "float32"))
    with pytest.raises(ValueError, match=r"`context_padding_mask` must have the shape \[B, 3\]; got \[1, 4\]"):
        layer(x, context, context_padding_mask=np.ones((1, 4), bool))


@pytest.mark.parametrize("shape", [(1, 4), (1, 3), (1, 4, WIDTH)])
@pytest.mark.parametrize("cls", [*BLOCKS, lambda **_: kt.FeedForward(16)])
def test_token_ids_are_refused(cls, shape):
    with pytest.raises(ValueError, match="float vectors of shape"):
        block(cls)(np.ones(shape, "int32"))


@pytest.mark.parametrize("cls", BLOCKS)
def test_symbolic_token_ids_of_any_length_are_refused(cls):
    with pytest.raises(ValueError, match="float vectors of shape"):
        block(cls)(keras.Input((None,), dtype="int32"))


# what the parts compute


@pytest.mark.parametrize("activation", ["gelu", "silu", "relu"])
@pytest.mark.parametrize("gated", [False, True])
def test_feed_forward_computes_its_formula(gated, activation, rng):
    x = rng.normal(size=(2, 3, WIDTH)).astype("float32")
    layer = kt.FeedForward(16, activation=activation, gated=gated)
    layer.build(x.shape)
    scrambled(layer)
    w = {weight.path.removeprefix(f"{layer.path}/"): array(weight) for weight in layer.weights}
    hidden = array(keras.activations.get(activation)(x @ w["inner/kernel"] + w["inner/bias"]))
    if gated:
        hidden = hidden * (x @ w["gate/kernel"] + w["gate/bias"])
    close(layer(x), hidden @ w["output/kernel"] + w["output/bias"])


def test_blocks_compute_their_formula(rng):
    x, memory = (rng.normal(size=(2, n, WIDTH)).astype("float32") for n in (3, 5))
    for norm_first in (False, True):
        layer = block(kt.DecoderBlock, norm_first=norm_first)
        layer(x, memory)
        scrambled(layer)
        expected = x
        for sublayer, norm, *context in (
            (layer.self_attention, layer.self_attention_norm),
            (layer.cross_attention, layer.cross_attention_norm, memory),
            (layer.feed_forward_layer, layer.feed_forward_norm),
        ):
            if norm_first:
                expected = expected + sublayer(norm(expected), *context)
            else:
                expected = norm(expected + sublayer(expected, *context))
        close(layer(x, memory), expected)


@pytest.mark.parametrize(
    ["options", "biased"],
    [
        ({"use_bias": True}, {"self_attention", "cross_attention", "feed_forward"}),
        ({"use_bias": False}, set()),
        ({"use_bias": False, "attention": {"use_bias": True}}, {"self_attention", "cross_attention"}),
        ({"use_bias": False, "feed_forward": {"use_bias": True, "gated": True}}, {"feed_forward"}),
        ({"feed_forward": {"use_bias": False, "gated": True}}, {"self_attention", "cross_attention"}),
    ],
)
def test_use_bias_says_where_biases_are(options, biased, rng):
    x, layer = rng.normal(size=(1, 3, WIDTH)), block(kt.DecoderBlock, **options)
    layer(x, x)
    paths = [weight.path.removeprefix(f"{layer.path}/").split("/") for weight in layer.weights]
    assert {path[0] for path in paths if path[-1] == "bias"} == biased


@pytest.mark.parametrize(
    "options", [{"attention": {"dropout": 0.5}}, {"feed_forward": {"dropout": 0.5}}, {"dropout": 0.5}, {}]
)
@pytest.mark.parametrize("cls", BLOCKS)
def test_dropout_acts_only_in_training(cls, options, rng):
    x, layer = rng.normal(size=(2, 6, WIDTH)), block(cls, **{"dropout": 0.0, **options})
    inference = array(layer(x))
    close(layer(x), inference, atol=1e-7)
    close(layer(x, training=False), inference, atol=1e-7)
    difference = np.abs(array(layer(x, training=True)) - inference).max()
    assert difference > 1e-2 if options else difference < 1e-6
    if options:
        assert np.abs(array(layer(x, training=True)) - array(layer(x, training=True))).max() > 1e-2


# precision and gradients


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("norm_first", [False, True])
def test_half_precision_is_near_float32(norm_first, dtype, rng):
    x, memory = rng.normal(size=(2, 4, WIDTH)), rng.normal(size=(2, 5, WIDTH))
    full, half = (block(kt.DecoderBlock, norm_first=norm_first, dtype=d) for d in ("float32", dtype))
    masks = {"padding_mask": PADDED != 0, "context_padding_mask": PADDED_TARGET != 0}
    full(x, memory), half(x, memory)
    half.set_weights(full.get_weights())
    output = half(x, memory, **masks)
    assert keras.backend.standardize_dtype(output.dtype) == dtype.removeprefix("mixed_")
    close(output, full(x, memory, **masks), atol=1e-1 if dtype == "mixed_bfloat16" else 1e-2)


def gradients(layer, args, coefficients):
    if TF:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = ops.sum(layer(*args) * coefficients)
        return tape.gradient(loss, [weight.value for weight in layer.trainable_weights])
    jax = pytest.importorskip("jax")
    fixed = [variable.value for variable in layer.non_trainable_variables]
    return jax.grad(lambda values: ops.sum(layer.stateless_call(values, fixed, *args)[0] * coefficients))(
        [variable.value for variable in layer.trainable_variables]
    )


@pytest.mark.skipif(keras.backend.backend() == "torch", reason="gradients here are TensorFlow's and JAX's")
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize(["cls", "num_inputs"], [(kt.EncoderBlock, 1), (kt.DecoderBlock, 1), (kt.DecoderBlock, 2)])
def test_every_weight_gets_a_gradient(cls, num_inputs, norm_first, rng):
    args = [ops.convert_to_tensor(rng.normal(size=(2, n, WIDTH)), "float32") for n in (4, 3)[:num_inputs]]
    layer = block(cls, norm_first=norm_first, feed_forward={"gated": True})
    layer(*args)
    scrambled(layer)
    coefficients = rng.normal(size=(2, 4, WIDTH)).astype("float32")
    for weight, gradient in zip(layer.trainable_weights, gradients(layer, args, coefficients)):
        assert gradient is not None, weight.path
        assert np.isfinite(array(gradient)).all(), weight.path
        # a bias of the keys adds the same to all scores of a query, which softmax does not see
        assert weight.path.endswith("key/bias") or np.abs(array(gradient)).max() > 1e-6, weight.path


# export


@tf_only
@pytest.mark.slow
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize(["cls", "num_inputs"], [(kt.EncoderBlock, 1), (kt.DecoderBlock, 1), (kt.DecoderBlock, 2)])
def test_a_block_is_exported_for_any_batch_and_length(cls, num_inputs, norm_first, tmp_path, rng):
    inputs = [keras.Input((None, WIDTH)) for _ in range(num_inputs)]
    model = scrambled(keras.Model(inputs, block(cls, norm_first=norm_first)(*inputs)))
    served = exported(model, tmp_path)
    for batch, lengths in ((1, (4, 2)), (3, (1, 5))):
        args = [rng.normal(size=(batch, n, WIDTH)).astype("float32") for n in lengths[:num_inputs]]
        close(served(args), model(args))


@pytest.mark.parametrize("what", ["context_padding_mask", "context_segment_ids"])
def test_masks_and_segments_of_a_context_that_is_not_there_are_refused(what):
    block = kt.DecoderBlock(num_heads=2, intermediate_dim=8)
    with pytest.raises(ValueError, match="Masks and segments of a context need the context; got them without one"):
        block(ops.ones((1, 3, 8)), **{what: np.ones((1, 3), "int32")})
