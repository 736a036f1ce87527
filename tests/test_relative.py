"""Rotary positions, ALiBi and T5's relative bias: keras-hub and published formulas as oracles, distances, gradients."""

import json
import math

import keras
import numpy as np
import pytest
from keras import ops

import keras_transformer as kt

BACKEND = keras.backend.backend()
on_tensorflow = pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow's own")
YARN = {"scaling": "yarn", "factor": 4.0, "original_length": 64}
LINEAR = {"scaling": "linear", "factor": 3.0}


@pytest.fixture
def hub():
    """An oracle that only benchmarks need otherwise."""
    return pytest.importorskip("keras_hub").layers


def array(x):
    return np.asarray(ops.cast(x, "float32"))


def normal(rng, *shape):
    return rng.normal(size=shape).astype("float32")


def turned(x, positions, frequencies, layout="halves"):
    """Pairs of features as complex numbers, times `exp(i position frequency)`: float64."""
    x, size = np.asarray(x, "float64"), x.shape[-1]
    first, second = np.split(np.arange(size), 2) if layout == "halves" else np.arange(size).reshape(-1, 2).T
    angles = np.asarray(positions, "float64")[:, :, None, None] * frequencies
    pairs = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angles)
    y = np.empty(x.shape)
    y[..., first], y[..., second] = pairs.real, pairs.imag
    return y


def plain_frequencies(size, max_wavelength=10000):
    return max_wavelength ** (-np.arange(0, size, 2) / size)


# ---- rotary positions


@pytest.mark.parametrize("size", [2, 8, 64])
@pytest.mark.parametrize("max_wavelength", [10000, 500000])
@pytest.mark.parametrize("factor", [None, 4.0])
def test_halves_are_those_of_keras_hub(hub, rng, size, max_wavelength, factor):
    x, positions = normal(rng, 2, 5, 3, size), np.array([[0, 1, 2, 3, 4], [7, 20, 21, 3, 60]], "int32")
    options = {} if factor is None else {"scaling": "linear", "factor": factor}
    theirs = hub.RotaryEmbedding(max_wavelength, scaling_factor=factor or 1.0)
    expected = theirs(x, positions=positions)
    np.testing.assert_allclose(kt.RotaryPositions(max_wavelength, **options)(x, positions), expected, atol=1e-5)


@pytest.mark.parametrize("factor, original_length", [(4.0, 64), (16.0, 4096)])
def test_yarn_is_that_of_keras_hub(hub, rng, factor, original_length):
    x, positions = normal(rng, 1, 60, 2, 32), np.arange(60, dtype="int32")[None]
    options = {"scaling_factor": factor, "rope_type": "yarn", "original_max_position_embeddings": original_length}
    layer = kt.RotaryPositions(scaling="yarn", factor=factor, original_length=original_length)
    np.testing.assert_allclose(layer(x, positions), hub.RotaryEmbedding(**options)(x), atol=1e-5)


def yarn(size, base, factor, original_length, beta_fast=32, beta_slow=1):
    """Frequencies and the stretch of vectors of https://arxiv.org/abs/2309.00071, as `_compute_yarn_parameters` has
    them in Hugging Face's transformers."""

    def correction_dim(rotations):
        return size * math.log(original_length / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(correction_dim(beta_fast)), 0), min(math.ceil(correction_dim(beta_slow)), size - 1)
    high = high + 0.001 if low == high else high
    ramp = np.clip((np.arange(size // 2) - low) / (high - low), 0, 1)
    position_frequencies = base ** (np.arange(0, size, 2) / size)
    interpolation, extrapolation = 1 / (factor * position_frequencies), 1 / position_frequencies
    extrapolation_factor = 1 - ramp
    stretch = 0.1 * math.log(factor) + 1.0
    return interpolation * (1 - extrapolation_factor) + extrapolation * extrapolation_factor, stretch


@pytest.mark.parametrize("layout", ["halves", "interleaved"])
@pytest.mark.parametrize("base, factor, original_length", [(10000, 4.0, 64), (500000, 16.0, 4096), (10000, 1.0, 128)])
@pytest.mark.parametrize("size", [2, 16, 64])
def test_yarn_is_the_published_formula(rng, size, base, factor, original_length, layout):
    x, positions = normal(rng, 2, 7, 2, size), rng.integers(0, 1000, size=(2, 7)).astype("int32")
    layer = kt.RotaryPositions(base, layout, "yarn", factor, original_length)
    frequencies, stretch = yarn(size, base, factor, original_length)
    np.testing.assert_allclose(layer(x, positions), stretch * turned(x, positions, frequencies, layout), atol=1e-5)


@pytest.mark.parametrize("layout", ["halves", "interleaved"])
@pytest.mark.parametrize("scaling", [{}, LINEAR], ids=["plain", "linear"])
def test_pairs_are_multiplied_as_complex_numbers(rng, layout, scaling):
    x, positions = normal(rng, 2, 6, 2, 10), rng.integers(0, 5000, size=(2, 6)).astype("int32")
    frequencies = plain_frequencies(10, 100) / scaling.get("factor", 1)
    found = kt.RotaryPositions(100, layout, **scaling)(x, positions)
    np.testing.assert_allclose(found, turned(x, positions, frequencies, layout), atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"layout": "interleaved"}, LINEAR, YARN], ids=str)
def test_far_positions_are_precise(rng, options):
    positions = np.array([[10**6, 10**6 + 1, 10**6 - 7, 999, 2**20 + 1]], "int32")
    x = normal(rng, 1, 5, 2, 64)
    frequencies, stretch = plain_frequencies(64) / (3 if options is LINEAR else 1), 1.0
    if options is YARN:
        frequencies, stretch = yarn(64, 10000, 4.0, 64)
    expected = stretch * turned(x, positions, frequencies, options.get("layout", "halves"))
    np.testing.assert_allclose(kt.RotaryPositions(**options)(x, positions), expected, atol=1e-4)


def test_one_row_of_positions_serves_all_rows(rng):
    x = normal(rng, 3, 4, 2, 6)
    layer, positions = kt.RotaryPositions(), np.arange(4, dtype="int32")[None]
    np.testing.assert_array_equal(layer(x, positions), layer(x, np.repeat(positions, 3, axis=0)))
    np.testing.assert_array_equal(layer(x[:, :1], positions[:, :1]), x[:, :1])  # position 0 turns by nothing


@pytest.mark.parametrize("options", [{}, {"layout": "interleaved"}, LINEAR, YARN], ids=str)
def test_the_product_of_a_query_and_a_key_depends_on_their_distance_alone(rng, options):
    layer = kt.RotaryPositions(**options)
    query, key = normal(rng, 1, 1, 1, 16), normal(rng, 1, 1, 1, 16)
    starts, distances = np.array([0, 3, 100, 5000, 10**6]), np.array([-7, 0, 1, 40])
    where = (starts + 10)[:, None] + distances  # [starts, distances]

    def at(x, positions):
        positions = positions.reshape(1, -1).astype("int32")
        return array(layer(np.broadcast_to(x, (1, positions.shape[1], 1, 16)), positions))[0, :, 0]

    products = at(query, starts + 10)[:, None] * at(key, where).reshape(len(starts), len(distances), 16)
    products = products.sum(-1)
    np.testing.assert_allclose(products[:4], products[:1].repeat(4, axis=0), atol=1e-4)
    np.testing.assert_allclose(products[4], products[0], atol=1e-3)
    assert np.ptp(products[0]) > 0.1


@pytest.mark.parametrize("policy", ["bfloat16", "mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("layout", ["halves", "interleaved"])
def test_angles_are_float32_whatever_the_policy(rng, policy, layout):
    layer = kt.RotaryPositions(layout=layout, dtype=policy)
    x = ops.cast(normal(rng, 1, 50, 2, 16), layer.compute_dtype)
    positions = np.arange(4000, 4050, dtype="int32")[None]
    found = layer(x, positions)
    assert keras.backend.standardize_dtype(found.dtype) == layer.compute_dtype
    expected = turned(array(x), positions, plain_frequencies(16), layout)
    rounding = 2.0**-8 if layer.compute_dtype == "bfloat16" else 2.0**-11
    np.testing.assert_allclose(array(found), expected, atol=2e-6, rtol=rounding)


# ---- ALiBi


def by_distance(bias, distances):
    """Biases `[N, T, S]` for scores `[1, N, T, S]`."""
    return array(bias(np.asarray(distances, "int32")))[None]


@pytest.mark.parametrize("num_heads", [1, 2, 6, 8, 12, 16])
def test_alibi_is_that_of_keras_hub_but_for_what_softmax_does_not_see(hub, rng, num_heads):
    scores = normal(rng, 2, num_heads, 7, 7)
    distances = np.arange(7) - np.arange(7)[:, None]
    hidden = np.where(distances > 0, -1e9, 0).astype("float32")
    theirs = ops.softmax(hub.AlibiBias()(scores) + hidden)
    ours = ops.softmax(scores + by_distance(kt.AlibiBias(num_heads), distances) + hidden)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_alibi_of_eight_heads_has_the_slopes_of_the_paper():
    """https://arxiv.org/abs/2108.12409, section 3: 1/2, 1/4, ... 1/256."""
    slopes = 2.0 ** -np.arange(1, 9)
    found = array(kt.AlibiBias(8)(np.array([[-3, -1, 0], [0, 2, 1000]])))
    assert found.shape == (8, 2, 3) and found.dtype == "float32"
    np.testing.assert_array_equal(found, -slopes[:, None, None] * [[3, 1, 0], [0, 2, 1000]])


@pytest.mark.parametrize("policy", ["bfloat16", "mixed_float16"])
def test_alibi_is_float32_whatever_the_policy(policy):
    bias = kt.AlibiBias(8, dtype=policy)(np.array([-4097, -1]))
    assert keras.backend.standardize_dtype(bias.dtype) == "float32"
    np.testing.assert_array_equal(bias, kt.AlibiBias(8)(np.array([-4097, -1])))


# ---- T5's relative bias


def t5_bucket(relative_position, bidirectional, num_buckets, max_distance):
    """`_relative_position_bucket` of Mesh TensorFlow's Transformer, in NumPy; memory position less query position."""
    bucket = 0
    n = -relative_position
    if bidirectional:
        num_buckets //= 2
        bucket = bucket + (n < 0).astype(int) * num_buckets
        n = np.abs(n)
    else:
        n = np.maximum(n, 0)
    max_exact = num_buckets // 2
    is_small = n < max_exact
    large = np.log(np.maximum(n, 1).astype("float32") / max_exact) / math.log(max_distance / max_exact)
    large = max_exact + (large * (num_buckets - max_exact)).astype(int)
    return bucket + np.where(is_small, n, np.minimum(large, num_buckets - 1))


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("num_buckets, max_distance", [(32, 128), (8, 20), (64, 1000), (4, 3), (320, 800)])
def test_buckets_are_those_of_t5(bidirectional, num_buckets, max_distance):
    layer = kt.RelativeBias(3, bidirectional, num_buckets, max_distance)
    layer.table.assign(np.arange(num_buckets)[:, None] + np.array([0.0, 0.25, 0.5]))
    distances = np.arange(-3 * max_distance, 3 * max_distance + 1)
    found = array(layer(distances.astype("int32")))
    expected = t5_bucket(distances, bidirectional, num_buckets, max_distance)
    np.testing.assert_array_equal(found, expected + np.array([[0.0], [0.25], [0.5]]))
    backward = np.unique(expected[distances <= 0])
    assert len(backward) == num_buckets // (2 if bidirectional else 1)  # each is used


def test_a_relative_bias_has_the_shape_of_its_distances():
    layer = kt.RelativeBias(2)
    layer.table.assign(np.arange(64).reshape(32, 2))
    assert layer(np.array([-1, 0, 1])).shape == (2, 3)
    found = array(layer(np.array([[-1, 0, 1], [-200, 5, 200]])))
    assert found[0].tolist() == [[2, 0, 34], [30, 42, 62]]
    np.testing.assert_array_equal(found[1], found[0] + 1)


@pytest.mark.parametrize("policy", ["bfloat16", "mixed_bfloat16"])
def test_a_relative_bias_is_float32_whatever_the_policy(policy):
    layer = kt.RelativeBias(2, dtype=policy)
    assert layer.table.dtype == layer.variable_dtype
    bias = layer(np.array([-1, 0]))
    assert keras.backend.standardize_dtype(bias.dtype) == "float32"
    np.testing.assert_array_equal(bias[:, 0], ops.cast(layer.table, "float32")[1])


def bias_after_one_step(distances):
    """The change of the table by one step of Adam, at rate 0.1, on the sum of all biases."""
    keras.utils.set_random_seed(0)
    layer = kt.RelativeBias(2, num_buckets=8, max_distance=16)
    source = keras.Input((None,), dtype="int32")
    model = keras.Model(source, ops.sum(layer(source), axis=(0, 2)))
    model.compile(keras.optimizers.Adam(0.1), loss=lambda y, x: ops.mean(x), jit_compile=False)
    before = np.array(layer.table)
    model.train_on_batch(np.asarray(distances, "int32"), np.zeros((len(distances), 1)))
    return np.asarray(layer.table) - before


def test_an_adam_step_does_not_depend_on_how_often_a_distance_occurs():
    once, often = bias_after_one_step([[-1, 1]]), bias_after_one_step([[-1] * 99 + [1]])
    np.testing.assert_allclose(often, once, rtol=1e-4)
    np.testing.assert_allclose(once[[1, 5]], -0.1, rtol=1e-4)
    np.testing.assert_array_equal(once[[0, 2, 3, 4, 6, 7]], 0)


@on_tensorflow
def test_the_gradient_of_a_relative_bias_is_dense():
    import tensorflow as tf

    layer = kt.RelativeBias(2, num_buckets=8, max_distance=16)
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(layer(np.array([-1, -1, -1, 0, 1])))
    gradient = tape.gradient(y, layer.table.value)
    assert isinstance(gradient, tf.Tensor)
    np.testing.assert_array_equal(gradient[:, 0], [1, 3, 0, 0, 0, 1, 0, 0])


# ---- configs

CONFIGURED = [
    (kt.RotaryPositions, {}),
    (kt.RotaryPositions, {"max_wavelength": 500.0, "layout": "interleaved", **YARN}),
    (kt.RotaryPositions, LINEAR),
    (kt.AlibiBias, {"num_heads": 6}),
    (kt.RelativeBias, {"num_heads": 2}),
    (kt.RelativeBias, {"num_heads": 2, "bidirectional": False, "num_buckets": 8, "max_distance": 20}),
]
LAYERS = [kt.RotaryPositions, kt.AlibiBias, kt.RelativeBias]


def call(layer):
    x = (np.arange(24, dtype="float32").reshape(1, 3, 2, 4), [[0, 1, 5]]) if layer.name == "rotary" else ([-3, 0, 2],)
    return array(layer(*(np.asarray(value) for value in x)))


@pytest.mark.parametrize("policy", ["mixed_bfloat16", keras.DTypePolicy("mixed_bfloat16")], ids=["name", "object"])
@pytest.mark.parametrize("cls, arguments", CONFIGURED)
def test_a_layer_comes_back_from_its_config(cls, arguments, policy):
    name = "rotary" if cls is kt.RotaryPositions else "bias"
    layer = cls(**arguments, name=name, trainable=False, dtype=policy)
    config = json.loads(json.dumps(layer.get_config()))
    again = cls.from_config(config)
    assert again.get_config() == layer.get_config()
    assert again.name == name and not again.trainable and again.dtype_policy.name == "mixed_bfloat16"
    assert {option: config[option] for option in arguments} == arguments
    again.set_weights(layer.get_weights())
    np.testing.assert_array_equal(call(again), call(layer))


@pytest.mark.parametrize(
    "layer",
    [
        lambda: kt.RotaryPositions(np.float32(500), "halves", "yarn", np.float32(2), np.int64(16)),
        lambda: kt.RotaryPositions(np.int64(500), np.str_("interleaved"), "linear", np.int32(2)),
        lambda: kt.AlibiBias(np.int64(3)),
        lambda: kt.RelativeBias(np.int64(3), np.bool_(True), np.int32(8), np.int64(20)),
    ],
)
def test_numpy_arguments_become_plain(layer):
    config = layer().get_config()
    assert type(layer()).from_config(json.loads(json.dumps(config))).get_config() == config


@pytest.mark.parametrize("cls", LAYERS)
def test_layers_are_registered_under_the_names_of_this_package(cls):
    assert keras.saving.get_registered_name(cls) == f"keras_transformer>{cls.__name__}"


# ---- what is refused


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"layout": "stacked"}, "`layout` must be 'halves' or 'interleaved'; got 'stacked'"),
        ({"scaling": "dynamic"}, "`scaling` must be None, 'linear', 'yarn' or 'llama3'; got 'dynamic'"),
        (
            {"scaling": "yarn", "factor": 2.0},
            "`original_length` belongs to the scalings 'yarn', 'llama3'; got None and 'yarn'",
        ),
        ({"original_length": 64}, "`original_length` belongs to the scalings 'yarn', 'llama3'; got 64 and None"),
        (
            {**LINEAR, "original_length": 64},
            "`original_length` belongs to the scalings 'yarn', 'llama3'; got 64 and 'linear'",
        ),
        ({"factor": 2.0}, "`factor` belongs to a `scaling`; got 2.0 and None"),
        ({"scaling": "linear", "factor": 0.5}, "`factor` must be at least 1; got 0.5"),
        ({**YARN, "original_length": 0}, "`original_length` must be a whole number of at least 1; got 0"),
        ({"max_wavelength": 1}, "`max_wavelength` must be above 1 .*; got 1"),
        ({"max_wavelength": float("nan")}, "`max_wavelength` must be above 1 .*; got nan"),
        ({"max_wavelength": "long"}, "`max_wavelength` must be one number; got 'long'"),
    ],
)
def test_bad_arguments_of_rotary_positions_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        kt.RotaryPositions(**arguments)


def test_an_odd_head_size_is_refused():
    with pytest.raises(ValueError, match="the head size must be even; got 5"):
        kt.RotaryPositions()(np.zeros((1, 2, 2, 5), "float32"), np.array([[0, 1]]))


@pytest.mark.parametrize("num_heads", [0, 1.5, True, None])
@pytest.mark.parametrize("cls", [kt.AlibiBias, kt.RelativeBias])
def test_numbers_of_heads_that_are_none_are_refused(cls, num_heads):
    with pytest.raises(ValueError, match=f"`num_heads` must be a whole number of at least 1; got {num_heads}"):
        cls(num_heads)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"num_buckets": 3}, "`num_buckets` must be a whole number of at least 4; got 3"),
        ({"max_distance": 0}, "`max_distance` must be a whole number of at least 1; got 0"),
        ({"num_buckets": 30}, "`num_buckets` must be a multiple of 4.*the 25% of them.*; got 30 and 128"),
        ({"num_buckets": 5, "bidirectional": False}, "must be a multiple of 2.*the 50% of them.*; got 5 and 128"),
        ({"max_distance": 8}, "`max_distance` above the 25% of them.*; got 32 and 8"),
        ({"max_distance": 16, "bidirectional": False}, "`max_distance` above the 50% of them.*; got 32 and 16"),
    ],
)
def test_bad_arguments_of_a_relative_bias_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        kt.RelativeBias(2, **arguments)
    kt.RelativeBias(2, max_distance=9), kt.RelativeBias(2, bidirectional=False, num_buckets=6, max_distance=4)
