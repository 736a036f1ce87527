"""Attention by blocks: the numbers of `dot_product_attention`, values and gradients, in less memory.

Blocks hold 16 x 16 weights here, so that short sequences take many.
"""

import functools
import math
import pathlib
import textwrap

import keras
import numpy as np
import pytest
from fresh import PEAK, run_in_fresh_process
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import ops

import keras_transformer as kt
from keras_transformer import attention, blockwise

IS_TENSORFLOW = keras.backend.backend() == "tensorflow"
tensorflow_only = pytest.mark.skipif(not IS_TENSORFLOW, reason="TensorFlow's own")
SIDE = 16
FUNCTIONS = {"exact": lambda *a, **o: kt.dot_product_attention(*a, **o)[0], "blockwise": kt.blockwise_attention}
KERNELS = list(FUNCTIONS)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(blockwise, "BLOCK", SIDE**2)


def normal(rng, *shape):
    return rng.normal(size=shape).astype("float32")


def plain(x):
    return ops.convert_to_numpy(ops.cast(x, "float32"))


def example(
    seed=0,
    batch=2,
    queries=40,
    keys=33,
    heads=4,
    kv_heads=2,
    size=4,
    value_size=5,
    mask=None,
    looks=0.5,
    bias=None,
    distance=False,
    segments=False,
    **options,
):
    """(what gradients are asked for, other arguments). `mask` and `bias` are letters for their axes, as "b11s"."""
    rng = np.random.default_rng(seed)
    sizes = {"b": batch, "n": heads, "t": queries, "s": keys, "1": 1}
    tensors = {
        "query": normal(rng, batch, queries, heads, size),
        "key": normal(rng, batch, keys, kv_heads, size),
        "value": normal(rng, batch, keys, kv_heads, value_size),
    }
    if bias:
        tensors["bias"] = normal(rng, *(sizes[axis] for axis in bias))
    if distance:
        tensors["distance_bias"] = normal(rng, heads, queries + keys - 1)
    if mask:
        options["mask"] = rng.random([sizes[axis] for axis in mask]) < looks
    if segments:
        options["segments"] = rng.integers(0, 3, (batch, queries)), rng.integers(0, 3, (batch, keys))
    return tensors, options


CASES = {
    "plain": {},
    "causal, more keys": {"causal": True, "queries": 25},
    "causal, more queries": {"causal": True, "kv_heads": 1},
    "causal window": {"causal": True, "window": 7, "keys": 40, "value_size": 4},
    "window": {"window": 20, "keys": 47},
    "mask": {"mask": "bnts", "looks": 0.05, "soft_cap": 2.0},
    "padding": {"mask": "b11s", "causal": True, "dropout": 0.3, "seed": 3},
    "biases": {"bias": "1nts", "distance": True, "soft_cap": 3.0},
    "packed": {"segments": True, "bias": "b1ts", "kv_heads": 4},
    "distances": {"distance": True, "causal": True, "dropout": 0.1, "seed": 5, "mask": "ts"},
}
each_case = pytest.mark.parametrize("name", list(CASES))


def compiled(f, xla=False):
    """`f` as one graph."""
    if IS_TENSORFLOW:
        import tensorflow as tf

        return tf.function(f, jit_compile=xla)
    return pytest.importorskip("jax").jit(f)


def with_gradients(function, names, options, upstream):
    """A function of the tensors of these names to (values, gradients of their sum weighted by `upstream`)."""

    def attend(*tensors):
        return function(**dict(zip(names, tensors)), **options)

    def run(*tensors):
        if not IS_TENSORFLOW:
            values, pull = pytest.importorskip("jax").vjp(attend, *tensors)
            return values, *pull(ops.cast(upstream, values.dtype))
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(tensors)
            values = attend(*tensors)
        upstreams = tf.cast(upstream, values.dtype)
        return values, *tape.gradient(values, tensors, upstreams, unconnected_gradients="zero")

    return run


def numbers(kernel, tensors, options, dtype="float32", wrap=compiled):
    """float32 arrays: the output and the gradient of each tensor."""
    shape = (*tensors["query"].shape[:-1], tensors["value"].shape[-1])
    upstream = normal(np.random.default_rng(1), *shape)
    run = wrap(with_gradients(FUNCTIONS[kernel], list(tensors), options, upstream))
    return [plain(x) for x in run(*(ops.cast(tensor, dtype) for tensor in tensors.values()))]


def assert_close(found, expected, tolerance=1e-5):
    """Of the output and each gradient, by the largest of its numbers."""
    assert len(found) == len(expected)
    for own, right in zip(found, expected):
        assert np.all(np.isfinite(right))
        np.testing.assert_allclose(own, right, rtol=0, atol=tolerance * max(1, np.abs(right).max(initial=0)))


# ---- the same numbers


@st.composite
def examples(draw):
    def maybe(strategy):
        return draw(st.none() | strategy)

    queries, keys, kv_heads = draw(st.integers(1, 70)), draw(st.integers(0, 70)), draw(st.integers(1, 3))
    axes = ["ts", "bts", "b1ts", "bnts", "b11s"]
    return {
        "seed": draw(st.integers(0, 999)),
        "batch": draw(st.integers(1, 2)),
        "queries": queries,
        "keys": keys,
        "heads": kv_heads * draw(st.integers(1, 3)),
        "kv_heads": kv_heads,
        "size": draw(st.integers(1, 6)),
        "value_size": draw(st.integers(1, 6)),
        "mask": maybe(st.sampled_from(axes)),
        "looks": draw(st.sampled_from([0.03, 0.5, 1.0])),
        "bias": maybe(st.sampled_from(["11ts", "1nts", "b1ts", "bnts"])),
        "distance": draw(st.booleans()) and keys > 0,
        "segments": draw(st.booleans()),
        "causal": draw(st.booleans()),
        "window": maybe(st.integers(1, 40)),
        "soft_cap": maybe(st.sampled_from([0.7, 5.0])),
        "dropout": draw(st.sampled_from([0.0, 0.3])),
        "seed_of_dropout": draw(st.integers(0, 99)),
    }


def assert_both_give_the_same(wrap, seed_of_dropout=0, **wanted):
    tensors, options = example(**wanted)
    options["seed"] = seed_of_dropout
    found, expected = (numbers(kernel, tensors, options, wrap=wrap) for kernel in ("blockwise", "exact"))
    assert_close(found, expected)


@settings(deadline=None, max_examples=8, derandomize=True)
@given(wanted=examples())
def test_values_and_gradients_are_those_of_the_exact_function(wanted):
    assert_both_give_the_same(compiled, **wanted)


@pytest.mark.slow
@settings(deadline=None, max_examples=40, derandomize=True)
@given(wanted=examples())
def test_values_and_gradients_are_those_of_the_exact_function_in_many_cases(wanted):
    assert_both_give_the_same(compiled, **wanted)


@pytest.mark.slow
@settings(deadline=None, max_examples=10, derandomize=True)
@given(wanted=examples())
def test_eager_mode_gives_the_same(wanted):
    assert_both_give_the_same(lambda f: f, **wanted)


def case(name):
    options = dict(CASES[name])
    seed_of_dropout = options.pop("seed", 0)
    tensors, options = example(**options)
    return tensors, {**options, "seed": seed_of_dropout}


@tensorflow_only
@pytest.mark.slow
@each_case
def test_xla_gives_the_same(name):
    found = numbers("blockwise", *case(name), wrap=functools.partial(compiled, xla=True))
    assert_close(found, numbers("exact", *case(name)))


@pytest.mark.parametrize("lengths", [(1, 47), (20, 1), (1, 1), (0, 5), (5, 0), (16, 16)])
def test_odd_lengths_give_the_same(lengths):
    kv_heads = 2 if lengths[0] else 4  # Keras's product of grouped heads knows no tensor of no query
    case = example(queries=lengths[0], keys=lengths[1], kv_heads=kv_heads, causal=True, mask="b11s", bias="bnts")
    assert_close(numbers("blockwise", *case), numbers("exact", *case))


@tensorflow_only
def test_one_graph_takes_any_batch_and_any_lengths():
    import tensorflow as tf

    names = ["query", "key", "value", "distance_bias", "mask", "upstream"]
    shapes = [[None, None, 4, 4], [None, None, 2, 4], [None, None, 2, 5], [4, None], [None, 1, 1, None]]

    def graph(kernel):
        types = [tf.float32] * 4 + [tf.bool, tf.float32]

        @tf.function(input_signature=[*map(tf.TensorSpec, [*shapes, [None, None, 4, 5]], types, names)])
        def run(query, key, value, distance_bias, mask, upstream):
            rules = {"mask": mask, "causal": True, "window": 30, "soft_cap": 3.0, "dropout": 0.3, "seed": 2}
            return with_gradients(FUNCTIONS[kernel], names[:4], rules, upstream)(query, key, value, distance_bias)

        return run

    blocks, exact = graph("blockwise"), graph("exact")
    for batch, queries, keys in ((2, 40, 33), (1, 17, 50), (3, 1, 20), (1, 16, 16), (0, 20, 30)):
        tensors, rules = example(batch=batch, queries=queries, keys=keys, distance=True, mask="b11s")
        arguments = *tensors.values(), rules["mask"], normal(np.random.default_rng(1), batch, queries, 4, 5)
        assert_close([*map(plain, blocks(*arguments))], [*map(plain, exact(*arguments))])


@pytest.mark.parametrize("wrap", [compiled, lambda f: f], ids=["graph", "eager"])
def test_no_row_is_no_special_case(wrap):
    case = example(batch=0, bias="1nts", distance=True)
    assert_close(numbers("blockwise", *case, wrap=wrap), numbers("exact", *case, wrap=wrap))


# ---- precision


@pytest.mark.parametrize("dtype, tolerance", [("bfloat16", 0.03), ("float16", 0.005)])
@pytest.mark.parametrize("name", ["causal, more keys", pytest.param("biases", marks=pytest.mark.slow)])
def test_half_precision_is_near_float32(dtype, tolerance, name):
    tensors, options = case(name)
    rounded = {key: plain(ops.cast(tensor, dtype)) for key, tensor in tensors.items()}
    expected = numbers("exact", rounded, options)
    assert_close(numbers("blockwise", rounded, options, dtype), expected, tolerance)
    assert_close(numbers("exact", rounded, options, dtype), expected, tolerance)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("signs", [[1], [-1], [1, -1]])
def test_extreme_scores_overflow_nowhere(kernel, dtype, signs):
    keys = np.resize(signs, 40)[None, :, None, None] * 6e4 / 240
    tensors = {"query": np.full((1, 20, 1, 1), 240.0), "key": keys, "value": keys}
    output, *gradients = numbers(kernel, tensors, {"causal": True}, dtype)
    np.testing.assert_allclose(output, max(signs) * 6e4 / 240, rtol=1e-2)  # the highest score has all the weight
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients)


@pytest.mark.parametrize("policy, tolerance", [("mixed_bfloat16", 0.05), ("mixed_float16", 0.005)])
def test_layers_in_mixed_precision_are_near_float32(rng, policy, tolerance):
    x = normal(rng, 2, 40, 16)
    layers = [
        kt.MultiHeadSelfAttention(4, causal=True, num_kv_heads=2, position="rotary", kernel=kernel, dtype=dtype)
        for kernel, dtype in (("exact", "float32"), ("blockwise", policy))
    ]
    expected = layers[0](x)
    layers[1].build(x.shape)
    layers[1].set_weights(layers[0].get_weights())
    output = layers[1](x)
    assert keras.backend.standardize_dtype(output.dtype) == layers[1].compute_dtype
    np.testing.assert_allclose(plain(output), expected, atol=tolerance)


# ---- queries that may look nowhere


def nowhere(kind):
    """A case, and which of its 40 queries look nowhere, by row, head and query."""
    hidden = np.zeros((2, 4, 40), bool)
    tensors, options = example(bias="1nts" if kind == "bias" else None)
    if kind in ("mask", "bias"):
        hidden[:, :, 5:30] = True
        hidden[1, 2:] = True
    if kind == "mask":
        options["mask"] = np.repeat(~hidden[..., None], 33, axis=-1)
    elif kind == "bias":
        hidden[0] = hidden[1]
        tensors["bias"][hidden[:1]] = -np.inf
    elif kind == "causal":
        hidden[:, :, :7] = True  # the last query stands at the last key
        options["causal"] = True
    elif kind == "segments":
        hidden[:, :, 20:] = True
        options["segments"] = np.where(hidden[:, 0], 2, 1), np.ones((2, 33), int)
    elif kind == "padding":
        hidden[1] = True
        options["mask"] = np.array([True, False])[:, None, None, None] & np.ones((2, 1, 1, 33), bool)
    return (tensors, options), hidden


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", ["mask", "bias", "causal", "segments", "padding"])
def test_a_query_that_may_look_nowhere_gives_zero(kernel, kind):
    case, hidden = nowhere(kind)
    output, of_query, *others = numbers(kernel, *case)
    hidden = hidden.transpose(0, 2, 1)
    assert np.all(output[hidden] == 0) and np.all(of_query[hidden] == 0)
    assert np.all(np.any(output[~hidden] != 0, axis=-1)) and np.any(of_query[~hidden] != 0)
    assert all(np.all(np.isfinite(x)) for x in (output, of_query, *others))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_layer_gives_its_bias_where_a_query_may_look_nowhere(rng, kernel):
    layer, mask = kt.MultiHeadSelfAttention(2, kernel=kernel), np.ones((40, 40), bool)
    mask[20:] = False
    x = normal(rng, 2, 40, 8)
    layer.build(x.shape)
    layer.output_projection.bias.assign(np.arange(8))
    output = plain(layer(x, attention_mask=mask))
    np.testing.assert_array_equal(output[:, 20:], np.broadcast_to(np.arange(8.0), (2, 20, 8)))
    assert np.all(np.max(np.abs(output[:, :20] - np.arange(8)), axis=-1) > 1e-3)


@pytest.mark.parametrize("hides", [-np.inf, pytest.param(-1e30, marks=pytest.mark.slow)])
def test_a_bias_hides_as_a_mask_does(hides):
    tensors, options = example(keys=40, mask="ts")
    expected = numbers("exact", tensors, options)
    tensors["bias"] = np.where(options.pop("mask"), 0, hides)[None, None].astype("float32")
    for kernel in KERNELS:
        assert_close(numbers(kernel, tensors, options)[:4], expected)
    line = np.where(np.arange(79) < 40, 0, hides).astype("float32")  # the triangle
    tensors["bias"] = np.zeros_like(tensors["bias"])
    expected = numbers("exact", tensors, {"causal": True})
    tensors["distance_bias"] = np.repeat(line[None], 4, axis=0)
    for kernel in KERNELS:
        assert_close(numbers(kernel, tensors, {})[:4], expected[:4])


# ---- dropout


def dropped_weights(kernel, rate, seed, block=SIDE, **options):
    """The weights `[B, N, T, S]` after dropout: values that are an identity matrix give them back."""
    tensors, _ = example(keys=40, kv_heads=4)
    tensors["value"] = np.tile(np.eye(40, dtype="float32")[None, :, None], (2, 1, 4, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise, "BLOCK", block**2)
        output = compiled(lambda: FUNCTIONS[kernel](**tensors, dropout=rate, seed=seed, **options))()
    return plain(output).transpose(0, 2, 1, 3)


def test_the_same_seed_drops_the_same_weights_whatever_the_block(rate=0.3):
    whole = dropped_weights("exact", 0.0, 0)
    expected = dropped_weights("exact", rate, 7)
    for block in (8, SIDE, 512):
        np.testing.assert_allclose(dropped_weights("blockwise", rate, 7, block), expected, atol=1e-6)
    np.testing.assert_allclose(np.mean(expected == 0), rate, atol=0.02)  # of 12800
    np.testing.assert_allclose(expected, np.where(expected == 0, 0, whole / (1 - rate)), rtol=1e-3)
    other = dropped_weights("blockwise", rate, 8)
    np.testing.assert_allclose(np.mean((other == 0) == (expected == 0)), rate**2 + (1 - rate) ** 2, atol=0.02)


# ---- cost


def visits(monkeypatch, queries, keys, **options):
    """Which blocks (of queries, of keys) are computed: {"forward": a set of pairs, "backward": one}."""
    seen, stage = {"forward": set(), "backward": set()}, ["forward"]
    scores, backward = blockwise._Blocks._scores, blockwise._Blocks.backward

    def counted(self, index, i, j, *rest):
        def see(i, j, pairs=seen[stage[0]]):
            pairs.add((int(np.asarray(i)), int(np.asarray(j))))

        see(i, j) if IS_TENSORFLOW else pytest.importorskip("jax").debug.callback(see, i, j)
        return scores(self, index, i, j, *rest)

    def entered(self, *arguments):
        stage[0] = "backward"
        return backward(self, *arguments)

    monkeypatch.setattr(blockwise._Blocks, "_scores", counted)
    monkeypatch.setattr(blockwise._Blocks, "backward", entered)
    tensors, options = example(batch=1, queries=queries, keys=keys, heads=1, kv_heads=1, soft_cap=9.0, **options)
    numbers("blockwise", tensors, options, wrap=(lambda f: f) if IS_TENSORFLOW else compiled)
    if not IS_TENSORFLOW:
        pytest.importorskip("jax").effects_barrier()
    return seen


@pytest.mark.parametrize("lengths", [(80, 80), (48, 80), (80, 48)])
@pytest.mark.parametrize("options", [{"causal": True}, {"window": 20}, {"causal": True, "window": 17}])
def test_blocks_that_positions_hide_are_never_computed(monkeypatch, lengths, options):
    queries, keys = lengths
    distance = np.arange(keys) - (np.arange(queries) + keys - queries)[:, None]
    visible = np.abs(distance) < options.get("window", 999)
    visible &= (distance <= 0) | (not options.get("causal"))
    blocks = visible.reshape(queries // SIDE, SIDE, keys // SIDE, SIDE).any((1, 3))
    expected = set(zip(*map(np.ndarray.tolist, np.nonzero(blocks))))
    assert visits(monkeypatch, queries, keys, **options) == {"forward": expected, "backward": expected}


@tensorflow_only
@pytest.mark.slow
@pytest.mark.skipif(not pathlib.Path("/proc/self/status").exists(), reason="peak memory is Linux's to tell")
def test_memory_does_not_grow_with_the_product_of_the_lengths():
    code = """
        import json, sys
        import tensorflow as tf
        import keras_transformer as kt

        x = tf.random.normal([1, 4096, 4, 16])
        attend = kt.blockwise_attention if sys.argv[1] == "blockwise" else lambda *a: kt.dot_product_attention(*a)[0]

        @tf.function
        def gradients(x):
            return tf.gradients(tf.reduce_sum(attend(x, x, x) ** 2), x)

        before = peak()
        gradients(x)[0].numpy()
        print(json.dumps(peak() - before))
    """
    megabytes = {kernel: run_in_fresh_process(PEAK + textwrap.dedent(code), kernel) for kernel in KERNELS}
    assert megabytes["exact"] > 500  # 4 x 4096 x 4096 weights are 268 MB
    assert megabytes["blockwise"] < megabytes["exact"] / 5


# ---- what is refused


REFUSED = {
    "kv heads": ({"kv_heads": 3}, {}, "kv heads must divide that of heads; got 3 and 4"),
    "bias of 3 axes": ({}, {"bias": np.zeros((4, 40, 33))}, r"`bias` must be floats \[B or 1, 4 or 1, 40, 33\]"),
    "bias of other heads": ({}, {"bias": np.zeros((1, 3, 40, 33))}, r"got float64 of shape \[1, 3, 40, 33\]"),
    "bias turned round": ({}, {"bias": np.zeros((1, 1, 33, 40))}, r"got float64 of shape \[1, 1, 33, 40\]"),
    "bias of integers": ({}, {"bias": np.zeros((1, 1, 40, 33), int)}, r"got int64 of shape \[1, 1, 40, 33\]"),
    "too few distances": (
        {},
        {"distance_bias": np.zeros((4, 40))},
        r"must be floats \[N, T \+ S - 1\], here \[4, 72",
    ),
    "distances of no head": ({}, {"distance_bias": np.zeros(72)}, r"got float64 of shape \[72\]"),
    "integer distances": ({}, {"distance_bias": np.zeros((4, 72), int)}, r"got int64 of shape \[4, 72\]"),
    "window": ({}, {"window": 0}, "`window` must be a whole number of at least 1; got 0"),
    "soft cap": ({}, {"soft_cap": 0}, "`soft_cap` must be above 0; got 0"),
    "half the segments": ({}, {"segments": (np.zeros((2, 40), int), None)}, "for queries and keys, or for neither"),
    "float segments": ({}, {"segments": (np.zeros((2, 40)), np.zeros((2, 33)))}, "must be integers of shape"),
    "float mask": ({}, {"mask": np.zeros((40, 33))}, "`mask` must be boolean or integer.*got float64.*converted by"),
    "mask of 1 axis": ({}, {"mask": np.ones(33, bool)}, r"`mask` must have the shape.*got \[33\]"),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", list(REFUSED))
def test_bad_arguments_are_refused(kernel, name):
    sizes, options, message = REFUSED[name]
    tensors, _ = example(**sizes)
    with pytest.raises(ValueError, match=message):
        FUNCTIONS[kernel](**tensors, **options)


@pytest.mark.parametrize("cls", [kt.MultiHeadSelfAttention, kt.MultiHeadCrossAttention])
def test_bad_options_of_layers_are_refused(cls):
    with pytest.raises(ValueError, match=r"`kernel` must be one of \['auto', 'exact', 'blockwise'\]; got 'flash'"):
        cls(2, kernel="flash")
    with pytest.raises(ValueError, match="`num_kv_heads` must divide `num_heads`; got 3 and 4"):
        cls(4, num_kv_heads=3)
    with pytest.raises(ValueError, match="`soft_cap` must be above 0; got -1"):
        cls(4, soft_cap=-1)


# ---- layers


@pytest.fixture
def runs(monkeypatch):
    """A list that grows by one with every run by blocks; "auto" takes them from 20 x 20 weights on."""
    runs, run = [], attention.blockwise

    def counted(*arguments):
        runs.append(1)
        return run(*arguments)

    monkeypatch.setattr(attention, "blockwise", counted)
    monkeypatch.setattr(attention, "LONG", 400)
    return runs


def test_blocks_are_taken_where_lengths_are_known_and_long(rng, runs):
    layer = kt.MultiHeadSelfAttention(2, causal=True)
    cross = kt.MultiHeadCrossAttention(2)
    x = normal(rng, 1, 20, 8)
    layer(x[:, :19]), cross(x[:, :19], x)
    assert not runs
    layer(x), cross(x, x)
    assert len(runs) == 2
    cross(x[:, :10], np.concatenate([x, x], axis=1))
    assert len(runs) == 3
    for kernel, more in (("exact", 0), ("blockwise", 1)):
        before = len(runs)
        kt.MultiHeadSelfAttention(2, kernel=kernel)(x[:, :3])
        kt.MultiHeadSelfAttention(2, kernel=kernel)(x)
        assert len(runs) - before == 2 * more


@tensorflow_only
@pytest.mark.parametrize("kernel, expected", [("auto", 0), ("blockwise", 1)])
def test_lengths_that_are_unknown_when_a_graph_is_made_are_not_long(rng, runs, kernel, expected):
    import tensorflow as tf

    layer = kt.MultiHeadSelfAttention(2, kernel=kernel)
    layer.build((None, None, 8))
    graph = tf.function(layer, input_signature=[tf.TensorSpec([None, None, 8])])
    x = normal(rng, 1, 30, 8)
    output = graph(x)
    assert len(runs) == expected
    np.testing.assert_allclose(output, layer(x, return_attention_scores=True)[0], atol=1e-5)


@pytest.mark.parametrize("kernel", ["auto", "blockwise"])
def test_all_weights_are_kept_where_they_are_asked_for(rng, runs, kernel):
    layer, x = kt.MultiHeadSelfAttention(2, kernel=kernel, name="layer"), normal(rng, 1, 30, 8)
    expected = layer(x)
    assert len(runs) == 1
    output, weights = layer(x, return_attention_scores=True)
    with kt.AttentionMaps() as maps:
        np.testing.assert_array_equal(layer(x), output)
    assert len(runs) == 1
    np.testing.assert_allclose(output, expected, atol=1e-5)
    assert weights.shape == (1, 2, 30, 30)
    np.testing.assert_array_equal(maps["layer"], weights)


def model(kernel, dropout=0.0, seed=1):
    """A model of any length with everything that its attention may have."""
    keras.utils.set_random_seed(seed)
    x = keras.Input((None, 8))
    options = {"num_kv_heads": 2, "window": 10, "soft_cap": 5.0, "qk_norm": True, "dropout": dropout}
    y = kt.MultiHeadSelfAttention(4, causal=True, position="relative", kernel=kernel, **options)(x)
    y = kt.MultiHeadCrossAttention(2, kernel=kernel, dropout=dropout)(y, x)
    return keras.Model(x, y)


def test_a_reloaded_model_goes_by_blocks_too(rng, tmp_path, runs):
    saved, x = model("blockwise"), normal(rng, 1, 20, 8)
    saved.save(tmp_path / "model.keras")
    reloaded = keras.models.load_model(tmp_path / "model.keras")
    assert not runs  # nor where a model is composed
    np.testing.assert_array_equal(reloaded(x), saved(x))
    assert len(runs) == 4
    np.testing.assert_allclose(saved(x), model("exact")(x), atol=1e-5)


@tensorflow_only
@pytest.mark.slow
def test_an_exported_model_gives_the_same_at_every_length(rng, tmp_path, runs):
    import tensorflow as tf

    saved = model("blockwise")
    saved.export(tmp_path / "exported", verbose=False)
    assert runs
    loaded = tf.saved_model.load(str(tmp_path / "exported"))
    for batch, length in ((2, 40), (1, 7), (3, 33)):
        x = normal(rng, batch, length, 8)
        np.testing.assert_allclose(loaded.serve(x), model("exact")(x), atol=1e-5)


def test_fit_learns_the_same_by_either_kernel(rng, runs):
    x, y, weights = normal(rng, 6, 20, 8), normal(rng, 6, 20, 8), {}
    for kernel in KERNELS:
        trained = model(kernel, dropout=0.3)
        start = trained.get_weights()
        trained.compile(keras.optimizers.SGD(1.0), "mse", jit_compile=not IS_TENSORFLOW)
        trained.fit(x, y, batch_size=2, shuffle=False, verbose=0)
        weights[kernel] = trained.get_weights()
    assert runs
    for own, right, before in zip(weights["blockwise"], weights["exact"], start):
        np.testing.assert_allclose(own, right, atol=1e-5)
        assert np.any(np.abs(right - before) > 1e-4) or np.all(before == 0)


@tensorflow_only
@pytest.mark.slow
def test_two_replicas_train_as_one_device_does_also_where_one_has_no_row():
    found = run_in_fresh_process(
        """
        import json
        import keras, numpy as np, tensorflow as tf
        import keras_transformer as kt
        from keras_transformer import blockwise
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
        blockwise.BLOCK = 16 * 16
        x, y = np.random.default_rng(0).normal(size=(2, 5, 40, 8)).astype("float32")

        def trained(strategy, kernel):
            keras.utils.set_random_seed(0)
            with strategy.scope():
                inputs = keras.Input((None, 8))
                attention = kt.MultiHeadSelfAttention(2, causal=True, position="alibi", kernel=kernel)
                model = keras.Model(inputs, attention(inputs))
                model.compile(keras.optimizers.SGD(1e-3), keras.losses.MeanSquaredError("sum"), jit_compile=False)
            model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(4), verbose=0)
            return np.concatenate([weight.ravel() for weight in model.get_weights()])

        one, two = tf.distribute.get_strategy(), tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        runs = [trained(one, "exact"), trained(one, "blockwise"), trained(two, "blockwise")]
        print(json.dumps(np.array(runs, "float64").tolist()))
        """
    )
    exact, by_one, by_two = map(np.array, found)
    np.testing.assert_allclose(by_one, exact, atol=1e-4)
    np.testing.assert_allclose(by_two, exact, atol=1e-4)


# ---- oracles that nobody here wrote


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", ["plain", "causal", "bias", "mask"])
def test_values_and_gradients_are_those_of_pytorch(rng, kernel, kind):
    torch = pytest.importorskip("torch")
    bias = "bnts" if kind == "bias" else None
    tensors, options = example(keys=40, value_size=4, heads=6, bias=bias, causal=kind == "causal")
    if kind == "mask":
        options["mask"] = rng.random((2, 6, 40, 40)) < 0.3
        options["mask"][..., 0] = True
    theirs = {key: torch.tensor(value, requires_grad=True) for key, value in tensors.items()}
    mask = theirs["bias"] if bias else torch.tensor(options["mask"]) if kind == "mask" else None
    heads = (theirs[key].transpose(1, 2) for key in ("query", "key", "value"))
    output = torch.nn.functional.scaled_dot_product_attention(
        *heads, attn_mask=mask, is_causal=options["causal"], enable_gqa=True
    ).transpose(1, 2)
    output.backward(torch.tensor(normal(np.random.default_rng(1), *output.shape)))
    expected = [output.detach().numpy(), *(tensor.grad.numpy() for tensor in theirs.values())]
    assert_close(numbers(kernel, tensors, options), expected)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("window", [None, 5, 20])
@pytest.mark.parametrize("causal", [False, True])
def test_grouped_heads_and_windows_are_those_of_keras(rng, kernel, window, causal):
    x = normal(rng, 2, 40, 12)
    theirs = keras.layers.GroupQueryAttention(3, 4, 2, sliding_window=window)
    theirs.build(x.shape, x.shape)
    for weight in theirs.weights:
        weight.assign(normal(rng, *weight.shape))
    ours = kt.MultiHeadSelfAttention(4, num_kv_heads=2, causal=causal, window=window, kernel=kernel)
    ours.build(x.shape)
    for name in ("query", "key", "value", "output"):
        target = getattr(ours, f"{name}_projection")
        weights = getattr(theirs, f"_{name}_dense").get_weights()
        target.set_weights([weight.reshape(own.shape) for weight, own in zip(weights, target.weights)])
    padding = np.arange(40) < np.array([[33], [40]])
    expected = theirs(x, x, attention_mask=padding[:, None], use_causal_mask=causal)
    output = plain(ours(x, padding_mask=padding))  # Keras's padding looks everywhere where it may look nowhere
    assert_close([output[padding]], [plain(expected)[padding]])


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_soft_cap_is_that_of_its_formula(kernel):
    tensors, _ = example(kv_heads=4, keys=40, causal=True)
    query, key, value = (tensors[name].astype("float64") for name in ("query", "key", "value"))
    scores = 2 * np.tanh(np.einsum("btnh,bsnh->bnts", query, key) / math.sqrt(4) / 2)
    weights = np.exp(np.where(np.tri(40), scores, -np.inf))
    expected = np.einsum("bnts,bsnh->btnh", weights / weights.sum(-1, keepdims=True), value)
    assert_close([plain(FUNCTIONS[kernel](**tensors, causal=True, soft_cap=2.0))], [expected])
