"""`build_transformer`: tables, sizes, submodels, padding, saving, learning, precision, and torch as an oracle."""

import importlib.util
import shutil
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import ops

import keras_transformer as kt

VOCAB, START = 12, 2
TF = keras.backend.backend() == "tensorflow"
ORACLE = Path(__file__).parent / "oracles" / "torch_transformer.npz"
SHORT = {"source": np.array([[3, 4], [5, 6]]), "target": np.array([[2, 7, 8], [2, 6, 3]])}
PADDED = {"source": np.array([[3, 4, 0, 0], [5, 6, 0, 0]]), "target": np.array([[2, 7, 8, 0, 0], [2, 6, 3, 0, 0]])}


def array(x):
    return ops.convert_to_numpy(ops.cast(x, "float32"))


def close(actual, expected, atol=1e-5):
    np.testing.assert_allclose(array(actual), array(expected), atol=atol, rtol=0)


def small(vocab_size=VOCAB, target_vocab_size=None, **options):
    sizes = {"d_model": 16, "num_layers": 1, "num_heads": 2, "intermediate_dim": 32, **options}
    return kt.build_transformer(vocab_size, target_vocab_size, **sizes)


def reloaded(model, tmp_path):
    path = tmp_path / "model.keras"
    model.save(path)
    return keras.saving.load_model(path, safe_mode=True)


def layers_of(model):
    return [layer for layer in model._flatten_layers() if layer is not model]


def tables(model):
    return [weight for weight in model.weights if weight.path.endswith("embeddings")]


def compiled(model, **options):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3), loss, jit_compile=False, **options)
    return model


def copy_batch(rng, size=16, length=4, vocab_size=VOCAB):
    """The labels are the source; the decoder sees them shifted right."""
    source = rng.integers(3, vocab_size, (size, length))
    target = np.concatenate([np.full((size, 1), START), source[:, :-1]], axis=1)
    return {"source": source, "target": target}, source


# embedding tables


@pytest.mark.parametrize(
    ["sizes", "tie", "shapes"],
    [
        ((12, None), None, [(12, 16)]),
        ((12, 12), None, [(12, 16)]),
        ((12, 9), None, [(12, 16), (9, 16)]),
        ((12, None), "all", [(12, 16)]),
        ((12, 12), "all", [(12, 16)]),
        ((12, None), "target", [(12, 16), (12, 16)]),
        ((12, 9), "target", [(12, 16), (9, 16)]),
        ((12, 9), "none", [(12, 16), (9, 16), (16, 9)]),
        ((12, None), "none", [(12, 16), (12, 16), (16, 12)]),
    ],
)
def test_tie_embeddings_says_how_many_tables_there_are(sizes, tie, shapes):
    model = small(*sizes, tie_embeddings=tie)
    assert [tuple(table.shape) for table in tables(model)] == shapes
    assert sum(table.path.endswith("reverse_embeddings") for table in tables(model)) == (tie == "none")
    assert model(SHORT).shape == (2, 3, sizes[1] or sizes[0])


@pytest.mark.parametrize(
    ["arguments", "message"],
    [
        ({"tie_embeddings": "both"}, "`tie_embeddings` must be 'all', 'target' or 'none'; got 'both'"),
        ({"tie_embeddings": True}, "`tie_embeddings` must be 'all', 'target' or 'none'; got True"),
        ({"target_vocab_size": 9, "tie_embeddings": "all"}, "needs one vocabulary; got sizes 12 and 9"),
        ({"target_vocab_size": 0}, "`vocab_size` must be.*0"),
        ({"vocab_size": 0}, "`vocab_size` must be.*0"),
        ({"d_model": 15}, "divisible by `num_heads`.*15 and 2"),
        ({"d_model": 0}, "`d_model` must be.*0"),
        ({"num_layers": 0}, "`num_layers` must be.*0"),
        ({"num_layers": -1}, "`num_layers` must be.*-1"),
        ({"num_layers": 1.5}, "`num_layers` must be.*1.5"),
        ({"num_heads": 0}, "`num_heads` must be.*0"),
        ({"dropout": 1.0}, "`dropout` must be.*1.0"),
        ({"attention": {"heads": 2}}, "`attention` takes the options.*'heads'"),
        ({"no_such_argument": 2}, "no_such_argument"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        small(**arguments)


def test_numpy_arguments_build_a_model_that_can_be_saved(tmp_path):
    sizes = {"d_model": 16, "num_layers": 1, "num_heads": 2, "intermediate_dim": 32}
    model = kt.build_transformer(
        np.int64(VOCAB), np.int64(9), dropout=np.float32(0.1), **{name: np.int64(size) for name, size in sizes.items()}
    )
    close(reloaded(model, tmp_path)(SHORT), model(SHORT))


# sizes


def parameters(vocab_size, d_model, num_layers, intermediate_dim, tables=1, **_):
    """Of a post-norm model: tables, attentions, feed-forwards and normalizations, with all biases."""
    attention = 4 * (d_model * d_model + d_model)
    feed_forward = 2 * d_model * intermediate_dim + intermediate_dim + d_model
    norm = 2 * d_model
    encoder_block = attention + feed_forward + 2 * norm
    decoder_block = 2 * attention + feed_forward + 3 * norm
    return tables * vocab_size * d_model + num_layers * (encoder_block + decoder_block)


@pytest.mark.parametrize("name", ["tiny", pytest.param("base", marks=pytest.mark.slow)])
def test_a_preset_has_the_parameters_of_its_sizes(name):
    model = kt.build_transformer(1000, **kt.PRESETS[name])
    assert model.count_params() == parameters(1000, **kt.PRESETS[name])


def test_options_change_the_number_of_parameters():
    sizes = {"vocab_size": VOCAB, "d_model": 16, "num_layers": 1, "intermediate_dim": 32}
    assert small(tie_embeddings="none").count_params() == parameters(**sizes, tables=3)
    assert small(norm_first=True).count_params() == parameters(**sizes) + 2 * 2 * 16
    gates = 2 * (16 * 32 + 32)
    assert small(feed_forward={"gated": True}).count_params() == parameters(**sizes) + gates


def test_presets_have_the_sizes_of_the_paper():
    """Table 3 of https://arxiv.org/abs/1706.03762; 37000 tokens (section 5.1) give its 65 and 213 million weights."""
    columns = ("num_layers", "d_model", "intermediate_dim", "num_heads", "dropout")
    assert set(kt.PRESETS) == {"tiny", "small", "base", "big", "llama"}
    for name, values, millions in (("base", (6, 512, 2048, 8, 0.1), 65), ("big", (6, 1024, 4096, 16, 0.3), 213)):
        assert kt.PRESETS[name] == dict(zip(columns, values))
        assert parameters(37000, **kt.PRESETS[name]) == pytest.approx(millions * 1e6, rel=0.04)
    assert kt.PRESETS["tiny"] == dict(zip(columns, (2, 128, 512, 4, 0.1)))


# the model and its parts


def test_inputs_are_a_dict_of_source_and_target():
    model = small(name="mine")
    assert model.name == "mine"
    assert sorted(model.input) == ["source", "target"]
    assert {name: x.name for name, x in model.input.items()} == {"source": "source", "target": "target"}
    logits = model(SHORT)
    assert logits.shape == (2, 3, VOCAB)
    close(model.predict(SHORT, verbose=0), logits)


def whole_from_parts(model, batch):
    """The logits by way of `get_layer`, as in a decoding loop of one's own."""
    names = {layer.name for layer in model.layers}
    source_embedding, target_embedding = (
        model.get_layer("embedding" if "embedding" in names else f"{side}_embedding") for side in ("source", "target")
    )
    source_mask, target_mask = (ops.convert_to_tensor(batch[side] != 0) for side in ("source", "target"))
    x = model.get_layer("source_positions")(source_embedding(batch["source"]))
    memory = model.get_layer("encoder")([x, source_mask])
    y = model.get_layer("target_positions")(target_embedding(batch["target"]))
    y = model.get_layer("decoder")([y, target_mask, memory, source_mask])
    return target_embedding(y, reverse=True)


@pytest.mark.parametrize(["norm_first", "tie"], [(False, "all"), (True, "target"), (False, "none")])
def test_the_parts_make_the_whole_before_and_after_a_reload(norm_first, tie, tmp_path):
    model = small(num_layers=2, norm_first=norm_first, tie_embeddings=tie)
    again = reloaded(model, tmp_path)
    for batch in (SHORT, PADDED):
        logits = model(batch)
        for other in (whole_from_parts(model, batch), again(batch), whole_from_parts(again, batch)):
            close(other, logits)


def test_encoder_and_decoder_are_models_that_a_reload_keeps(tmp_path, rng):
    model = small()
    again = reloaded(model, tmp_path)
    x, y = (ops.convert_to_tensor(rng.normal(size=(2, n, 16)), "float32") for n in (4, 5))
    x_mask, y_mask = (ops.convert_to_tensor(PADDED[side] != 0) for side in ("source", "target"))
    memory = model.get_layer("encoder")([x, x_mask])
    assert memory.shape == x.shape
    close(again.get_layer("encoder")([x, x_mask]), memory)
    vectors = model.get_layer("decoder")([y, y_mask, memory, x_mask])
    assert vectors.shape == y.shape
    close(again.get_layer("decoder")([y, y_mask, memory, x_mask]), vectors)
    for name in ("encoder", "decoder"):
        assert isinstance(model.get_layer(name), keras.Model) and isinstance(again.get_layer(name), keras.Model)


def test_no_layer_holds_code_of_its_own():
    """What `safe_mode` would refuse."""
    assert not any(isinstance(layer, keras.layers.Lambda) for layer in layers_of(small(norm_first=True)))


def test_a_model_of_every_option_comes_back(tmp_path):
    model = small(
        target_vocab_size=9,
        num_layers=2,
        tie_embeddings="none",
        norm_first=True,
        activation="silu",
        use_bias=False,
        epsilon=1e-5,
        attention={"key_dim": 4, "dropout": 0.1},
        feed_forward={"gated": True, "dropout": 0.1},
    )
    again = reloaded(model, tmp_path)
    close(again(PADDED), model(PADDED))
    blocks, same = (
        [layer.get_config() for layer in layers_of(m) if isinstance(layer, (kt.EncoderBlock, kt.DecoderBlock))]
        for m in (model, again)
    )
    assert len(blocks) == 4 and blocks == same
    assert all(config["norm_first"] and config["feed_forward"]["gated"] for config in same)


def test_weights_alone_come_back(tmp_path):
    model, other = small(), small()
    path = tmp_path / "model.weights.h5"
    model.save_weights(path)
    other.load_weights(path)
    close(other(PADDED), model(PADDED))


def test_summary_shows_encoder_and_decoder():
    lines = []
    small().summary(print_fn=lambda line, **_: lines.append(line))
    text = "\n".join(lines)
    for name in ("source", "target", "embedding", "encoder", "decoder"):
        assert f"│ {name} " in text
    lines.clear()
    small(num_layers=2).get_layer("decoder").summary(print_fn=lambda line, **_: lines.append(line))
    assert "decoder_block_1" in "\n".join(lines) and "decoder_block_2" in "\n".join(lines)


@pytest.mark.skipif(
    not (importlib.util.find_spec("pydot") and shutil.which("dot")), reason="plotting needs pydot and graphviz"
)
def test_a_model_can_be_plotted(tmp_path):
    path = tmp_path / "model.png"
    keras.utils.plot_model(small(), path, expand_nested=True, show_shapes=True)
    assert path.stat().st_size > 0


# padding and causality


def assert_padding_changes_nothing(f):
    close(f(PADDED)[:, :3], f(SHORT))
    close(f({**SHORT, "source": PADDED["source"]}), f(SHORT))
    close(f({**SHORT, "target": PADDED["target"]})[:, :3], f(SHORT))


@pytest.mark.parametrize(["norm_first", "sizes"], [(False, (VOCAB, None)), (True, (VOCAB, 10))])
def test_padding_does_not_change_logits_before_and_after_a_reload(norm_first, sizes, tmp_path):
    model = small(*sizes, num_layers=2, norm_first=norm_first)
    assert_padding_changes_nothing(model)
    assert_padding_changes_nothing(reloaded(model, tmp_path))


@pytest.mark.skipif(not TF, reason="SavedModel export needs TensorFlow")
@pytest.mark.slow
def test_padding_does_not_change_logits_after_an_export(tmp_path):
    import tensorflow as tf

    model = small()
    model.export(tmp_path / "exported", verbose=False)
    loaded = tf.saved_model.load(str(tmp_path / "exported"))

    def serve(batch):
        return loaded.serve({name: ids.astype("int32") for name, ids in batch.items()})

    close(serve(PADDED), model(PADDED))
    assert_padding_changes_nothing(serve)


@pytest.mark.parametrize("norm_first", [False, True])
def test_logits_depend_on_the_whole_source_and_on_the_target_so_far(norm_first):
    model = small(norm_first=norm_first)
    before = array(model(SHORT))
    target = SHORT["target"].copy()
    target[:, 2] = 4
    after = array(model({**SHORT, "target": target}))
    close(after[:, :2], before[:, :2])
    assert np.abs(after[:, 2] - before[:, 2]).max() > 1e-3
    source = SHORT["source"].copy()
    source[:, 1] = 9
    assert np.all(np.abs(array(model({**SHORT, "source": source})) - before).max(axis=-1) > 1e-4)


# training


@pytest.mark.parametrize("norm_first", [False, True])
def test_it_learns_to_copy(norm_first, rng):
    model = compiled(small(d_model=32, intermediate_dim=64, dropout=0.0, norm_first=norm_first))
    inputs, labels = copy_batch(rng)
    losses = [float(model.train_on_batch(inputs, labels)) for _ in range(40)]
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize(["norm_first", "tie"], [(False, "all"), (True, "none")])
def test_one_step_of_fit_changes_every_weight(norm_first, tie, rng):
    model = compiled(small(norm_first=norm_first, tie_embeddings=tie))
    inputs, labels = copy_batch(rng)
    before = [array(weight) for weight in model.trainable_weights]
    history = model.fit(inputs, labels, batch_size=16, epochs=1, verbose=0)
    assert np.isfinite(history.history["loss"]).all()
    for weight, old in zip(model.trainable_weights, before):
        new = array(weight)
        assert np.isfinite(new).all(), weight.path
        assert weight.path.endswith("key/bias") or np.abs(new - old).max() > 1e-6, weight.path


def test_a_tied_table_is_one_variable_after_a_reload_and_a_step(tmp_path, rng):
    inputs, labels = copy_batch(rng)
    model = compiled(small(dropout=0.0))
    model.train_on_batch(inputs, labels)
    again = reloaded(model, tmp_path)
    assert len(tables(again)) == 1 and again.count_params() == model.count_params()
    before = array(tables(again)[0])
    for each in (model, again):
        each.train_on_batch(inputs, labels)
    assert len(tables(again)) == 1
    assert np.abs(array(tables(again)[0]) - before).max() > 1e-6
    embedding = again.get_layer("embedding")
    close(embedding(np.arange(VOCAB)[None])[0], array(tables(again)[0]) * 4)  # the table that both directions read
    close(embedding(np.eye(16, dtype="float32")[None], reverse=True)[0], array(tables(again)[0]).T)
    for weight, same in zip(again.trainable_weights, model.trainable_weights):  # the optimizer came back too
        close(weight, same)


# precision


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize(["dtype", "atol"], [("mixed_bfloat16", 0.2), ("mixed_float16", 0.03)])
def test_half_precision_is_near_float32(dtype, atol, norm_first):
    full = small(num_layers=2, norm_first=norm_first)
    keras.config.set_dtype_policy(dtype)
    half = small(num_layers=2, norm_first=norm_first)
    half.set_weights(full.get_weights())
    logits = half(PADDED)
    assert np.isfinite(array(logits)).all()
    close(logits, full(PADDED), atol=atol)
    assert {keras.backend.standardize_dtype(weight.dtype) for weight in half.trainable_weights} == {"float32"}


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "mixed_float16"])
def test_half_precision_model_is_the_same_when_it_comes_back_under_float32(dtype, tmp_path):
    keras.config.set_dtype_policy(dtype)
    model = small()
    logits = array(model(PADDED))
    model.save(tmp_path / "model.keras")
    keras.config.set_dtype_policy("float32")
    close(keras.saving.load_model(tmp_path / "model.keras")(PADDED), logits, atol=1e-6)


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "mixed_float16"])
def test_half_precision_trains(dtype, rng):
    keras.config.set_dtype_policy(dtype)
    model = compiled(small(dropout=0.0), run_eagerly=TF)  # faster for few steps
    inputs, labels = copy_batch(rng)
    losses = [float(model.train_on_batch(inputs, labels)) for _ in range(4)]
    assert np.isfinite(losses).all() and losses[-1] < losses[0]


# torch as an oracle


def like_torch(norm_first):
    """`torch.nn.Transformer`: blocks and, also behind post-norm ones, a normalization of encoder and decoder."""
    source, target = keras.Input((None, 16)), keras.Input((None, 16))
    source_mask, target_mask = keras.Input((None,), dtype="bool"), keras.Input((None,), dtype="bool")
    options = {"num_heads": 2, "intermediate_dim": 32, "dropout": 0.0, "epsilon": 1e-5, "norm_first": norm_first}
    x, y = source, target
    for i in range(2):
        x = kt.EncoderBlock(**options, name=f"encoder_{i}")(x, padding_mask=source_mask)
    x = keras.layers.LayerNormalization(epsilon=1e-5, name="encoder_norm")(x)
    for i in range(2):
        y = kt.DecoderBlock(**options, name=f"decoder_{i}")(
            y, x, padding_mask=target_mask, context_padding_mask=source_mask
        )
    y = keras.layers.LayerNormalization(epsilon=1e-5, name="decoder_norm")(y)
    return keras.Model([source, target, source_mask, target_mask], y)


def set_from_torch(model, state):
    """Assigns torch's state dict, by its names, and counts that nothing was left out."""
    used = set()

    def take(name):
        used.add(name)
        return state[name]

    def dense(layer, kernel, bias):
        layer.set_weights([kernel.T, bias])

    def norm(layer, name):
        layer.set_weights([take(f"{name}.weight"), take(f"{name}.bias")])

    def attention(layer, name):
        kernels = np.split(take(f"{name}.in_proj_weight"), 3)
        biases = np.split(take(f"{name}.in_proj_bias"), 3)
        for part, kernel, bias in zip(("query", "key", "value"), kernels, biases):
            dense(getattr(layer, f"{part}_projection"), kernel, bias)
        dense(layer.output_projection, take(f"{name}.out_proj.weight"), take(f"{name}.out_proj.bias"))

    for side in ("encoder", "decoder"):
        for i in range(2):
            block, name = model.get_layer(f"{side}_{i}"), f"{side}.layers.{i}"
            norms = [block.self_attention_norm, block.feed_forward_norm]
            attention(block.self_attention, f"{name}.self_attn")
            if side == "decoder":
                attention(block.cross_attention, f"{name}.multihead_attn")
                norms.insert(1, block.cross_attention_norm)
            for number, layer in enumerate(norms, start=1):
                norm(layer, f"{name}.norm{number}")
            feed_forward = block.feed_forward_layer
            dense(feed_forward.inner, take(f"{name}.linear1.weight"), take(f"{name}.linear1.bias"))
            dense(feed_forward.output_projection, take(f"{name}.linear2.weight"), take(f"{name}.linear2.bias"))
        norm(model.get_layer(f"{side}_norm"), f"{side}.norm")
    assert used == set(state)


@pytest.mark.parametrize(["name", "norm_first"], [("post", False), ("pre", True)])
def test_it_computes_what_torch_computes(name, norm_first):
    with np.load(ORACLE) as file:
        arrays = dict(file)
    state = {key.removeprefix(f"{name}/"): value for key, value in arrays.items() if key.startswith(f"{name}/")}
    expected = state.pop("output")
    model = like_torch(norm_first)
    set_from_torch(model, state)
    output = array(model([arrays[key] for key in ("source", "target", "source_mask", "target_mask")]))
    assert output.shape == expected.shape == (2, 4, 16)
    real = arrays["target_mask"]
    close(output[real], expected[real])


# which positions are added to embeddings


def language_model(**options):
    return kt.build_language_model(
        VOCAB, **{"d_model": 16, "num_layers": 1, "num_heads": 2, "intermediate_dim": 32, **options}
    )


BUILDERS = {"transformer": small, "language model": language_model}
of_both_builders = pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)


def inputs_of(model, batch=SHORT):
    return batch if isinstance(model.input, dict) else batch["target"]


def position_layers(model):
    """What stands between embeddings and blocks, by name."""
    return {layer.name: type(layer).__name__ for layer in model.layers if layer.name.endswith("positions")}


@pytest.mark.parametrize(
    ["options", "kind"],
    [
        ({}, "PositionalEncoding"),
        ({"positions": "sinusoid"}, "PositionalEncoding"),
        ({"positions": "learned", "max_length": 8}, "LearnedPositions"),
        ({"positions": "none"}, "Dropout"),
        ({"attention": {"position": "rotary"}}, "Dropout"),
        ({"attention": {"position": {"type": "alibi"}}}, "Dropout"),
        ({"attention": {"window": 2}}, "PositionalEncoding"),
        ({"attention": {"position": None}}, "PositionalEncoding"),
        ({"attention": {"position": "relative"}, "positions": "sinusoid"}, "PositionalEncoding"),
        ({"attention": {"position": "alibi"}, "positions": "learned", "max_length": 8}, "LearnedPositions"),
    ],
    ids=str,
)
def test_positions_say_what_is_added_and_where_attention_has_some_it_is_nothing(options, kind):
    assert position_layers(small(**options)) == {"source_positions": kind, "target_positions": kind}
    assert position_layers(language_model(**options)) == {"positions": kind}


@of_both_builders
def test_dropout_behind_embeddings_acts_without_positions_too(build):
    model = build(positions="none", dropout=0.5)
    layers = [model.get_layer(name) for name in position_layers(model)]
    assert {layer.rate for layer in layers} == {0.5}


def test_without_positions_the_order_of_a_source_does_not_matter_and_with_them_it_does():
    turned = {**SHORT, "source": SHORT["source"][:, ::-1]}
    model = small(positions="none")
    close(model(turned), model(SHORT))
    for options in ({}, {"positions": "learned", "max_length": 4}, {"attention": {"position": "rotary"}}):
        model = small(**options)
        for weight in model.trainable_weights:  # learned positions and biases start near 0
            weight.assign(array(weight) + 0.3 * np.random.default_rng(0).normal(size=weight.shape))
        assert np.abs(array(model(turned)) - array(model(SHORT))).max() > 1e-2


@of_both_builders
@pytest.mark.parametrize("packed", [False, True])
def test_learned_positions_are_a_table_of_each_side_and_come_back(build, packed, tmp_path):
    model = build(positions="learned", max_length=np.int64(5), packed=packed)
    plain, sides = build(positions="none"), len(position_layers(model))
    assert model.count_params() == plain.count_params() + sides * 5 * 16
    again, inputs = reloaded(model, tmp_path), inputs_of(model)
    close(again(inputs), model(inputs))
    assert position_layers(again) == position_layers(model)
    long = np.full((2, 6), 4)
    with pytest.raises(ValueError, match="has 5 positions; got tokens up to the 6th"):
        again(inputs_of(model, {"source": long, "target": long}))


def test_a_packed_row_may_be_longer_than_a_table_of_positions():
    plain, packed = (language_model(positions="learned", max_length=3, packed=p) for p in (False, True))
    packed.set_weights(plain.get_weights())
    texts = SHORT["target"]
    close(ops.reshape(packed(texts.reshape(1, 6)), (2, 3, VOCAB)), plain(texts))


def test_a_model_with_learned_positions_writes_up_to_its_last_position():
    model = small(positions="learned", max_length=7, dropout=0.0)
    source, options = {"source": SHORT["source"]}, {"min_length": 7, "max_length": 7}
    found = kt.Generator(model, 7)(source, **options)
    ids = array(found["ids"])[:, 0].astype("int32")
    logits = array(model({**source, "target": np.concatenate([[[2], [2]], ids[:, :-1]], axis=1)}))
    logits[:, :, 0] = logits[:, :-1, 3] = -np.inf
    np.testing.assert_array_equal(np.argmax(logits[:, :6, :], -1), ids[:, :6])
    if TF:  # inside a graph of JAX's a row cannot be refused: it is NaN
        with pytest.raises(Exception, match="has 7 positions|is not in"):
            kt.Generator(model, 8)(source, min_length=8)


@of_both_builders
@pytest.mark.parametrize(
    ["arguments", "message"],
    [
        ({"positions": "rotary"}, "`positions` must be 'sinusoid', 'learned', 'none' or None; got 'rotary'"),
        ({"positions": True}, "`positions` must be 'sinusoid', 'learned', 'none' or None; got True"),
        ({"positions": "learned"}, "`max_length` belongs to `positions='learned'`; got None and 'learned'"),
        ({"max_length": 8}, "`max_length` belongs to `positions='learned'`; got 8 and 'sinusoid'"),
        ({"positions": "none", "max_length": 8}, "`max_length` belongs to `positions='learned'`; got 8 and 'none'"),
        ({"positions": "learned", "max_length": 0}, "`max_length` must be a whole number of at least 1; got 0"),
    ],
)
def test_wrong_positions_are_refused(build, arguments, message):
    with pytest.raises(ValueError, match=message):
        build(**arguments)


# the form of Llama 2


def test_the_llama_preset_has_the_parts_of_llama():
    """Query heads in groups, gates, scales of RMS norms, one also behind the last block, and no biases."""
    model = kt.build_language_model(VOCAB, **{**kt.PRESETS["llama"], "num_layers": 1})
    decoder = model.get_layer("decoder")
    shapes = {weight.path.removeprefix("decoder_block_1/"): tuple(weight.shape) for weight in decoder.weights}
    assert shapes == {
        "self_attention/query/kernel": (256, 256),
        "self_attention/key/kernel": (256, 64),
        "self_attention/value/kernel": (256, 64),
        "self_attention/output/kernel": (256, 256),
        "self_attention_norm/scale": (256,),
        "feed_forward/inner/kernel": (256, 688),
        "feed_forward/gate/kernel": (256, 688),
        "feed_forward/output/kernel": (688, 256),
        "feed_forward_norm/scale": (256,),
        "decoder_norm/scale": (256,),
    }
    assert position_layers(model) == {"positions": "Dropout"}
    assert small(**{**kt.PRESETS["llama"], "num_layers": 1})(PADDED).shape == (2, 5, VOCAB)
