"""A generator writes what its whole model would, run anew on every prefix: greedily, by beams and by sampling."""

import functools

import keras
import numpy as np
import pytest
from keras import ops

import keras_transformer as kt

BACKEND = keras.backend.backend()
VOCAB, WIDTH, LENGTH = 12, 8, 7
BLOCK = {"num_heads": 2, "intermediate_dim": 8, "dropout": 0.0}
PROMPTS = np.array([[0, 0, 5, 6, 7], [4, 5, 6, 0, 0], [9, 4, 8, 7, 6], [0, 10, 0, 0, 0]], "int32")
FORCED = np.array([[2, 5, 6, 0], [2, 0, 0, 0], [0, 0, 2, 9], [2, 4, 4, 7]], "int32")
xla_only_here = pytest.mark.skipif(BACKEND != "tensorflow", reason="on JAX every graph is XLA's")
slow_on_jax = pytest.mark.slow if BACKEND == "jax" else lambda test: test  # each of its graphs takes seconds to compile


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


def plain(found):
    return {name: np.asarray(value) for name, value in found.items()}


def assert_same(found, expected, rtol=1e-4):
    found = plain(found)
    np.testing.assert_array_equal(found["ids"], expected["ids"])
    np.testing.assert_array_equal(found["length"], expected["length"])
    np.testing.assert_allclose(found["score"], expected["score"], rtol=rtol, atol=1e-4)


def joined(rows):
    """What was found for one row after the other, as if for a batch of them."""
    return {name: np.concatenate([plain(row)[name] for row in rows]) for name in ("ids", "score", "length")}


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


def unnamed_input():
    ids = keras.Input((None,), dtype="int32")
    return keras.Model(ids, keras.layers.Dense(VOCAB)(kt.DecoderBlock(**BLOCK)(embedded(ids))))


def dict_of_tokens():
    ids = source_input("tokens")
    y = kt.DecoderBlock(**BLOCK, norm_first=True)(kt.DecoderBlock(**BLOCK, norm_first=True)(embedded(ids)))
    return keras.Model({"tokens": ids}, keras.layers.Dense(VOCAB)(keras.layers.LayerNormalization()(y)))


def layers_between_decoders():
    ids = source_input("ids")
    table = kt.TokenEmbedding(VOCAB, WIDTH)
    x = kt.PositionalEncoding()(table(ids))
    first = kt.DecoderBlock(**BLOCK)(x)
    y = keras.layers.LayerNormalization()(keras.layers.Dense(WIDTH, activation="tanh")(first))
    y = kt.DecoderBlock(**BLOCK)(keras.layers.Add()([x, y]))
    y = keras.layers.Dense(WIDTH)(keras.layers.Concatenate()([first, y]))
    return keras.Model(ids, table(y, reverse=True))


def sequential():
    blocks = [kt.TokenEmbedding(VOCAB, WIDTH), kt.PositionalEncoding(), kt.DecoderBlock(**BLOCK)]
    return keras.Sequential([keras.Input((None,), dtype="int32"), *blocks, keras.layers.Dense(VOCAB)])


def built_language_model():
    return kt.build_language_model(VOCAB, d_model=WIDTH, num_layers=2, **BLOCK)


def subclassed_language_model(mix=None):
    class LanguageModel(keras.Model):
        def __init__(self):
            super().__init__(name="my_language_model")
            self.table = kt.TokenEmbedding(VOCAB, WIDTH, mask_zero=mix is None)
            self.positions, self.mix = kt.PositionalEncoding(), mix or keras.layers.Identity()
            self.blocks = [kt.DecoderBlock(**BLOCK) for _ in range(2)]

        def call(self, ids):
            y = self.mix(self.positions(self.table(ids)))
            for block in self.blocks:
                y = block(y)
            return self.table(y, reverse=True)

    return LanguageModel()


def subclassed_translator(mix=None):
    class Translating(keras.Model):
        def __init__(self):
            super().__init__(name="my_translator")
            self.table = kt.TokenEmbedding(VOCAB, WIDTH, mask_zero=mix is None)
            self.positions, self.mix = kt.PositionalEncoding(), mix or keras.layers.Identity()
            self.encoder, self.decoder = kt.EncoderBlock(**BLOCK), kt.DecoderBlock(**BLOCK)
            self.dense = keras.layers.Dense(VOCAB)

        def call(self, inputs):
            memory = self.encoder(self.positions(self.table(inputs["source"])))
            y = self.mix(self.positions(self.table(inputs["target"])))
            return self.dense(self.decoder(y, memory))

    return Translating()


LANGUAGE = [
    unnamed_input,
    dict_of_tokens,
    layers_between_decoders,
    sequential,
    built_language_model,
    subclassed_language_model,
]
by_name = functools.partial(pytest.mark.parametrize, ids=lambda make: make.__name__)


def quick(makes, *these):
    """`makes` as parameters, of which only these run when slow tests are left out."""
    return [make if make in these else pytest.param(make, marks=pytest.mark.slow) for make in makes]


def sources_of(model, batch=4, tokens=5):
    """Random inputs, ids with padded rows; none of a language model."""
    if model.name == "my_translator":
        named = [keras.KerasTensor((None, None), "int32", name="source")]
    else:
        named = getattr(model, "inputs", None) or []
        named = [tensor for tensor in named if tensor.name != "target"] if len(named) > 1 else []
    rng = np.random.default_rng(7)
    sources = {}
    for tensor in named:
        if keras.backend.is_float_dtype(tensor.dtype):
            sources[tensor.name] = rng.normal(size=(batch, tokens, tensor.shape[-1])).astype("float32")
        else:
            ids = rng.integers(1, VOCAB, size=(batch, tokens))
            is_token = np.arange(tokens) < rng.integers(1, tokens + 1, size=(batch, 1))
            sources[tensor.name] = (ids * is_token).astype("int32")
    return sources


def inputs_of(model, sources, target):
    """All inputs, as the model takes them."""
    structure = getattr(model, "input", None) if isinstance(model, keras.src.models.Functional) else None
    if not sources:
        return {"tokens": target} if isinstance(structure, dict) else target
    inputs = {**sources, "target": target}
    return [inputs[tensor.name] for tensor in model.inputs] if isinstance(structure, list) else inputs


@functools.lru_cache(maxsize=2)
def whole(model):
    """The model as one graph: a function (sources, target) -> logits."""
    if BACKEND == "tensorflow":
        return compiled(lambda sources, target: model(inputs_of(model, sources, target)))

    def call(weights, sources, target):
        return model.stateless_call(*weights, inputs_of(model, sources, target))[0]

    call = compiled(call)

    def with_weights(sources, target):
        weights = [v.value for v in model.trainable_variables], [v.value for v in model.non_trainable_variables]
        return call(weights, sources, target)

    return with_weights


def log_softmax(logits):
    logits = np.asarray(ops.cast(logits, "float32"), "float64")
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def repeated(sources, times):
    return {name: np.repeat(value, times, axis=0) for name, value in sources.items()}


def right_padded(rows, columns):
    ids = np.zeros((len(rows), columns), "int32")
    for row, tokens in zip(ids, rows):
        row[: len(tokens)] = tokens
    return ids


def tokens_of(ids):
    """Each row without its padding."""
    return [[int(token) for token in row if token] for row in np.asarray(ids)]


def searched(
    model, sources=None, prompt=None, length=LENGTH, width=1, n=1, alpha=0.6, least=0, start=2, ends=(3,), forbidden=()
):
    """Beam search as `beam` defines it, in Python: for each token, the whole model reads every prefix anew.

    `length` and `least`, the most tokens and the fewest, are numbers or one for each row.
    """
    sources = sources_of(model) if sources is None else sources
    batch = len(prompt) if prompt is not None else len(next(iter(sources.values())))
    prompts = [[start]] * batch if prompt is None else tokens_of(prompt)
    limits, least = np.broadcast_to(length, batch), np.broadcast_to(least, batch)
    columns = max(map(len, prompts)) + max(limits)
    live, ended, sources = [[(0.0, [])] for _ in prompts], [[] for _ in prompts], repeated(sources, width)
    for count in range(1, max(limits) + 1):
        rows = [prompts[b] + (live[b][k][1] if k < len(live[b]) else []) for b in range(batch) for k in range(width)]
        log_probs = log_softmax(whole(model)(sources, right_padded(rows, columns)))
        for b in range(batch):
            not_now = {0, *forbidden, *(ends if count < least[b] else ())}
            continued = [
                (score + log_probs[b * width + k, len(prompts[b]) + count - 2, token], [*ids, token])
                for k, (score, ids) in enumerate(live[b])
                for token in set(range(VOCAB)) - not_now
            ]
            best = sorted(continued, reverse=True)[:width]
            leaves = [ids[-1] in ends or count == limits[b] for _, ids in best]
            live[b] = [one for one, leaving in zip(best, leaves) if not leaving]
            ended[b] += [one for one, leaving in zip(best, leaves) if leaving]
    best = [sorted(row, key=lambda one: -one[0] / ((5 + len(one[1])) / 6) ** alpha)[:n] for row in ended]
    return {
        "ids": np.stack([right_padded([ids for _, ids in row], max(limits)) for row in best]),
        "score": np.array([[score for score, _ in row] for row in best]),
        "length": np.array([[len(ids) for _, ids in row] for row in best]),
    }


def uncached(model, sources, columns):
    """A step for `kt.sample` that keeps no keys and values: it reads all that was written, up to `columns`, anew."""

    def step(tokens, index, cache):
        if cache is None:
            written = ops.pad(tokens, [[0, 0], [0, columns - tokens.shape[1]]])
            cache = {"sources": sources, "written": written}
            return model(inputs_of(model, sources, written))[:, : tokens.shape[1]], cache
        written = ops.where(ops.arange(columns) == index[:, None], tokens, cache["written"])
        logits = model(inputs_of(model, cache["sources"], written))
        return ops.take_along_axis(logits, index[:, None, None], axis=1), {**cache, "written": written}

    return step


def shaken(model):
    """The model with random weights, such that what it writes varies: most untrained ones repeat a token."""
    sources, prompt = sources_of(model), None
    if not sources:
        prompt = PROMPTS
    model(inputs_of(model, sources, PROMPTS))
    fresh = [ops.convert_to_numpy(weight) for weight in model.trainable_weights]
    for seed in range(20):
        rng = np.random.default_rng(seed)
        for weight, value in zip(model.trainable_weights, fresh):
            scale = 0.2 if "embedding" in weight.path else len(value) ** -0.5
            noise = rng.normal(size=value.shape)
            weight.assign(scale * noise if value.ndim > 1 else value + 0.1 * noise)
        if len(set(searched(model, sources, prompt)["ids"].flatten())) > 3:
            return model
    raise AssertionError("each seed gave the same few tokens")


@functools.cache
def ready(make):
    """A shaken model, for tests that leave it as it is."""
    return shaken(make())


@functools.cache
def generator(make, max_length=LENGTH, **options):
    """(model, its generator of up to `LENGTH` tokens)."""
    model = ready(make)
    example = {"source": np.array([[4, 5], [6, 0]], "int32")} if make is subclassed_translator else None
    return model, kt.Generator(model, max_length, example=example, **options)


# the generator


@pytest.mark.parametrize("norm_first", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["post", "pre"])
@pytest.mark.parametrize("tie_embeddings", quick(["all", "target", "none"], "all"))
def test_a_built_transformer_writes_as_it_does_on_growing_prefixes(norm_first, tie_embeddings):
    model = shaken(built(norm_first=norm_first, tie_embeddings=tie_embeddings, num_layers=2))
    assert_same(kt.Generator(model, LENGTH)(sources_of(model)), searched(model))


@by_name("compose", quick(COMPOSED, layers_between, nested_decoder, frames_as_they_are, sublayers_and_one_table))
def test_a_composed_model_writes_as_it_does_on_growing_prefixes(compose):
    model, generate = generator(compose)
    assert_same(generate(sources_of(model)), searched(model))


@pytest.mark.slow
@by_name("compose", COMPOSED)
def test_a_composed_model_writes_the_same_in_a_graph(compose):
    model, generate = generator(compose)
    assert_same(compiled(lambda sources: generate(sources))(sources_of(model)), searched(model))


def assert_scores_are_those_of_score(generate, sources, found, prompt=None, atol=1e-4):
    for i in range(found["ids"].shape[1]):
        scored = generate.score(sources, found["ids"][:, i], prompt)
        np.testing.assert_allclose(scored["score"], found["score"][:, i], rtol=1e-4, atol=atol)
        np.testing.assert_array_equal(scored["length"], found["length"][:, i])


@by_name("compose", quick(COMPOSED, sources_one_after_the_other, one_vector))
def test_a_beam_through_a_composed_model_is_one_over_whole_prefixes(compose):
    model, generate = generator(compose, width=3, n=2)
    sources = sources_of(model)
    found = plain(compiled(lambda sources: generate(sources))(sources))
    assert_same(found, searched(model, width=3, n=2))
    assert_scores_are_those_of_score(generate, sources, found)


@pytest.mark.slow
@by_name("compose", COMPOSED)
def test_a_beam_through_a_composed_model_needs_no_graph(compose):
    model, generate = generator(compose, width=3, n=2)
    assert_same(generate(sources_of(model)), searched(model, width=3, n=2))


@slow_on_jax
@pytest.mark.parametrize("alpha", quick([0.0, 3.0], 3.0))
def test_the_length_penalty_ranks_what_a_beam_found(alpha):
    model, generate = generator(concatenated_sources, width=4, n=4)
    found = plain(jitted(lambda sources: generate(sources, length_penalty=alpha))(sources_of(model)))
    assert_same(found, searched(model, width=4, n=4, alpha=alpha))
    rank = found["score"] / ((5 + found["length"]) / 6) ** alpha
    assert np.all(np.diff(rank, axis=1) <= 1e-6)


def test_padding_of_the_source_changes_nothing():
    _, generate = generator(implicit_masks, width=3, n=2)
    source = np.array([[4, 5, 6]], "int32")
    padded = np.pad(source, [(0, 0), (0, 4)])
    run = jitted(lambda sources: generate(sources))
    assert_same(run({"source": padded}), plain(run({"source": source})))


@slow_on_jax
@pytest.mark.parametrize("end_id, ends", [(7, (7,)), ((7, 4, 3), (7, 4, 3))], ids=["one end", "three ends"])
def test_ids_of_start_and_end_are_the_callers(end_id, ends):
    model, generate = generator(built, start_id=5, end_id=end_id, width=3, n=3)
    expected = searched(model, width=3, n=3, start=5, ends=ends)
    assert_same(jitted(lambda sources: generate(sources))(sources_of(model)), expected)
    ended = {row[-1] for rows in expected["ids"] for row in tokens_of(rows)} & set(ends)
    assert len(ended) > 1 or len(ends) == 1


@pytest.mark.slow
@xla_only_here
@by_name("make", [built, implicit_masks, concatenated_sources])
@pytest.mark.parametrize("width, n", [(1, 1), (3, 2)], ids=["greedy", "beam"])
def test_xla_writes_the_same(make, width, n):
    model, generate = generator(make, width=width, n=n)
    found = compiled(lambda sources: generate(sources), jit_compile=True)(sources_of(model))
    assert_same(found, searched(model, width=width, n=n))


@by_name("make", quick([implicit_masks, sources_one_after_the_other], sources_one_after_the_other))
def test_samples_are_a_seeds_in_a_graph_too_and_their_scores_those_of_score(make):
    model, generate = generator(make, width=3, n=3)
    sources = sources_of(model)
    found = plain(generate(sources, temperature=1.5, seed=4))
    in_graph = compiled(lambda sources, seed: generate(sources, temperature=1.5, seed=seed))
    assert_same(in_graph(sources, 4), found)
    assert not np.array_equal(in_graph(sources, 5)["ids"], found["ids"])
    assert len(np.unique(found["ids"].reshape(-1, LENGTH), axis=0)) > 6
    assert_scores_are_those_of_score(generate, sources, found)


@slow_on_jax
def test_more_samples_are_drawn_than_a_beam_is_wide():
    model, generate = generator(implicit_masks, width=2, n=2)
    run = jitted(lambda sources: generate(sources, temperature=1.0, n=5))
    assert run(sources_of(model))["ids"].shape == (4, 5, LENGTH)


@slow_on_jax
@pytest.mark.parametrize("policy", quick(["mixed_bfloat16", "mixed_float16", "bfloat16", "float16"], "mixed_float16"))
@by_name("make", quick([built, implicit_masks], built))
def test_half_precision_writes_ids_with_finite_scores(policy, make):
    keras.config.set_dtype_policy(policy)
    model = make()
    found = plain(kt.Generator(model, LENGTH, width=3, n=2)(sources_of(model)))
    assert found["ids"].dtype == "int32" and found["score"].dtype == "float32" and found["length"].dtype == "int32"
    assert np.all(np.isfinite(found["score"])) and np.all(found["score"] < 0)
    assert np.all((found["ids"] >= 0) & (found["ids"] < VOCAB)) and np.all(found["length"] >= 1)


# prompts, language models and subclassed ones

LONG = 64
SEEDS = np.array([5, 6, 7, 8], "int32")
AT = {"length": LONG, "least": 40}


def beam_and_samples(generate, **graph):
    """A graph of 64 tokens: (prompt, temperature, seeds) -> by beam at temperature 0, by sampling above."""

    def run(prompt, temperature, seeds):
        return generate(prompt=prompt, temperature=temperature, seed=seeds, min_length=40)

    graph = compiled(run, **graph)
    return lambda prompt, temperature, seeds: graph(prompt, ops.convert_to_tensor(temperature, "float32"), seeds)


def resampled(model, prompt, seeds, n=3):
    columns = prompt.shape[1] + LONG
    options = {"n": n, "seed": seeds, "min_length": 40}
    return plain(compiled(lambda p: kt.sample(uncached(model, {}, columns), p, LONG, **options))(prompt))


@by_name("make", quick(LANGUAGE, layers_between_decoders))
def test_a_language_model_continues_prompts_for_64_tokens_as_it_does_on_growing_prefixes(make):
    model, generate = generator(make, max_length=LONG, width=3, n=3)
    run = beam_and_samples(generate)
    assert_same(run(PROMPTS, 0.0, SEEDS), searched(model, {}, PROMPTS, width=3, n=3, **AT), rtol=1e-5)
    assert_same(run(PROMPTS, 1.0, SEEDS), resampled(model, PROMPTS, SEEDS), rtol=1e-5)


@by_name("make", quick(LANGUAGE, dict_of_tokens, sequential, subclassed_language_model))
def test_a_language_model_greedily_continues_prompts_as_it_does_on_growing_prefixes(make):
    model, generate = generator(make)
    assert_same(generate(prompt=PROMPTS), searched(model, {}, PROMPTS), rtol=1e-5)


@pytest.mark.slow
@by_name("make", LANGUAGE)
def test_a_language_model_continues_prompts_for_64_tokens_outside_a_graph_and_greedily_inside(make):
    model, generate = generator(make, max_length=LONG, width=3, n=3)
    run = beam_and_samples(generate)
    for temperature in (0.0, 1.0):
        found = generate(prompt=PROMPTS, temperature=temperature, seed=SEEDS, min_length=40)
        assert_same(found, plain(run(PROMPTS, temperature, SEEDS)))
    _, greedy = generator(make, max_length=LONG)
    found = compiled(lambda prompt: greedy(prompt=prompt, min_length=40))(PROMPTS)
    assert_same(found, searched(model, {}, PROMPTS, **AT))


@pytest.mark.slow
@xla_only_here
@by_name("make", LANGUAGE)
def test_a_language_model_continues_prompts_under_xla(make):
    model, generate = generator(make, max_length=LONG, width=3, n=3)
    run = beam_and_samples(generate, jit_compile=True)
    assert_same(run(PROMPTS, 0.0, SEEDS), searched(model, {}, PROMPTS, width=3, n=3, **AT))
    assert_same(run(PROMPTS, 1.0, SEEDS), resampled(model, PROMPTS, SEEDS))


@slow_on_jax
@by_name("make", quick(LANGUAGE, unnamed_input))
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["beam", "sampling"])
def test_a_prompt_is_continued_in_a_batch_as_alone_wherever_its_padding_stands(make, temperature):
    _, generate = generator(make, width=3, n=3)
    run = jitted(lambda prompt, seeds: generate(prompt=prompt, temperature=temperature, seed=seeds))
    alone = [run(np.array([row], "int32"), SEEDS[i : i + 1]) for i, row in enumerate(tokens_of(PROMPTS))]
    assert_same(run(PROMPTS, SEEDS), joined(alone))


@slow_on_jax
@by_name("make", quick([implicit_masks, sources_one_after_the_other, subclassed_translator], implicit_masks))
@pytest.mark.parametrize("width, n", [pytest.param(1, 1, marks=pytest.mark.slow), (3, 2)], ids=["greedy", "beam"])
def test_a_translation_goes_on_from_a_forced_beginning(make, width, n):
    model, generate = generator(make, width=width, n=n)
    sources = sources_of(model)
    found = plain(compiled(lambda sources, prompt: generate(sources, prompt))(sources, FORCED))
    assert_same(found, searched(model, sources, FORCED, width=width, n=n))
    assert_scores_are_those_of_score(generate, sources, found, FORCED)


@slow_on_jax
@pytest.mark.parametrize("width, n", [(1, 1), (3, 2)], ids=["greedy", "beam"])
def test_a_subclassed_translator_writes_as_it_does_on_growing_prefixes(width, n):
    model, generate = generator(subclassed_translator, width=width, n=n)
    assert_same(generate(sources_of(model)), searched(model, width=width, n=n))


def test_a_language_model_without_a_prompt_is_refused():
    _, generate = generator(unnamed_input)
    with pytest.raises(ValueError, match="without other inputs needs a `prompt`; got none"):
        generate()


def test_a_prompt_that_is_padding_alone_is_refused():
    _, generate = generator(unnamed_input)
    with pytest.raises(ValueError, match="Each prompt must hold a token"):
        generate(prompt=np.array([[4, 5], [0, 0]], "int32"))


# the cache, step by step


def random_steps(rng, rows, steps=6):
    """New tokens for each row, now one and now two."""
    return [rng.integers(1, VOCAB, size=(rows, 1 + i % 3 // 2)).astype("int32") for i in range(steps)]


@by_name("make", quick([implicit_masks, one_block_twice, concatenated_sources, *LANGUAGE], implicit_masks))
@pytest.mark.parametrize("spread", ["widen", "repeat"])
def test_cached_logits_are_those_of_the_whole_model_also_of_many_rows_a_source(make, spread, rng):
    model, generate = generator(make)
    sources, columns, times = sources_of(model), 16, 3
    written = tokens_of(PROMPTS)

    def assert_close(logits, sources, written):
        """`logits` are those of the last tokens of what was written."""
        full = np.asarray(whole(model)(sources, right_padded(written, columns)))
        new = logits.shape[1]
        expected = np.stack([full[r, len(row) - new : len(row)] for r, row in enumerate(written)])
        np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)

    context, _ = generate.begin(sources, PROMPTS)
    step = generate.step(context, columns)
    run = jitted(step)
    logits, cache = run(right_padded(written, 5), np.zeros(4, "int32"), None)
    for row, tokens in enumerate(written):
        mine = {name: value[row : row + 1] for name, value in sources.items()}
        assert_close(np.asarray(logits)[row : row + 1, : len(tokens)], mine, [tokens])

    cache = getattr(step, spread)(cache, times)
    sources, written = repeated(sources, times), [list(row) for row in written for _ in range(times)]
    for tokens in random_steps(rng, len(written)):
        logits, cache = run(tokens, np.array([len(row) for row in written], "int32"), cache)
        written = [[*row, *new.tolist()] for row, new in zip(written, tokens)]
        assert_close(np.asarray(logits), sources, written)
        if spread == "widen":
            rows = np.arange(len(written)) // times * times + rng.integers(times, size=len(written))
            cache = step.reorder(cache, rows.astype("int32"))
            written = [list(written[row]) for row in rows]


def test_a_scope_around_a_model_goes_on_from_widened_and_reordered_rows(rng):
    """As above, of a scope that somebody opens around the model himself."""
    model = ready(layers_between_decoders)
    start = rng.integers(1, VOCAB, size=(2, 3)).astype("int32")
    with kt.DecodingScope(None, [0, 0], 8) as scope:
        model(start)
    cache, written = kt.DecodingScope.widen(scope.cache, 2, 8), np.repeat(start, 2, axis=0)
    for rows in ([0, 0, 3, 2], [1, 0, 2, 2], [1, 1, 3, 3], [0, 1, 2, 3]):
        new = rng.integers(1, VOCAB, size=(4, 1)).astype("int32")
        with kt.DecodingScope(cache, [written.shape[1]] * 4, 8) as scope:
            logits = model(new)
        written = np.concatenate([written, new], axis=1)
        expected = whole(model)({}, right_padded(written, 8))[:, written.shape[1] - 1]
        np.testing.assert_allclose(logits[:, 0], expected, rtol=1e-5, atol=1e-5)
        cache, written = kt.DecodingScope.reorder(scope.cache, np.array(rows, "int32")), written[rows]


# scores of given targets

TARGETS = np.array([[5, 6, 3, 0], [4, 3, 0, 0], [7, 7, 8, 9], [3, 0, 0, 0]], "int32")


@by_name("make", quick([implicit_masks, built, unnamed_input, subclassed_translator], built, unnamed_input))
@pytest.mark.parametrize("prompts", [None, FORCED], ids=["start", "prompts"])
def test_a_score_is_the_log_probability_of_a_target_that_the_model_is_made_to_read(make, prompts):
    model, generate = generator(make)
    sources = sources_of(model)
    if prompts is None and not sources:
        prompts = np.full((4, 1), 2, "int32")
    starts, targets = [[2]] * 4 if prompts is None else tokens_of(prompts), tokens_of(TARGETS)
    log_probs = log_softmax(whole(model)(sources, right_padded([a + b for a, b in zip(starts, targets)], 8)))
    expected = np.zeros(TARGETS.shape)
    for row, (start, target) in enumerate(zip(starts, targets)):
        for i, token in enumerate(target):
            expected[row, i] = log_probs[row, len(start) - 1 + i, token]
    scored = plain(generate.score(sources, TARGETS, prompts))
    np.testing.assert_allclose(scored["token_scores"], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(scored["score"], expected.sum(1), rtol=1e-4, atol=1e-5)
    assert scored["length"].tolist() == [3, 2, 4, 1]
    assert {name: value.dtype.name for name, value in scored.items()} == {
        "token_scores": "float32",
        "score": "float32",
        "length": "int32",
    }
    graph = compiled(lambda sources, target, prompt: generate.score(sources, target, prompt))
    np.testing.assert_allclose(graph(sources, TARGETS, prompts)["score"], scored["score"], rtol=1e-5)


@slow_on_jax
@pytest.mark.parametrize("prompts", [None, FORCED], ids=["start", "prompts"])
def test_padding_and_the_rest_of_the_batch_change_no_score(prompts):
    model, generate = generator(implicit_masks)
    sources, score = sources_of(model), jitted(generate.score)
    together = plain(score(sources, TARGETS, prompts))
    wider = {name: np.pad(value, [(0, 0), (0, 3)]) for name, value in sources.items()}
    longer = plain(score(wider, np.pad(TARGETS, [(0, 0), (0, 2)]), prompts))
    np.testing.assert_allclose(longer["token_scores"][:, :4], together["token_scores"], rtol=1e-5, atol=1e-6)
    assert not longer["token_scores"][:, 4:].any() and np.array_equal(longer["length"], together["length"])
    for row in range(4):
        source = {name: np.array(tokens_of(value[row : row + 1]), "int32") for name, value in sources.items()}
        prompt = None if prompts is None else np.array(tokens_of(prompts[row : row + 1]), "int32")
        alone = plain(score(source, np.array(tokens_of(TARGETS[row : row + 1]), "int32"), prompt))
        np.testing.assert_allclose(alone["score"], together["score"][row : row + 1], rtol=1e-5)


# where a model looks


@by_name("make", quick([implicit_masks, sources_one_after_the_other, subclassed_translator], implicit_masks))
@pytest.mark.parametrize("prompts", [None, FORCED], ids=["start", "prompts"])
def test_attention_is_what_a_model_looks_at_as_it_writes_token_by_token(make, prompts):
    model, generate = generator(make)
    sources = sources_of(model)
    padding = list(sources.values())[-1] == 0
    weights = np.asarray(generate.attention(sources, TARGETS, prompts))
    assert weights.shape == (4, 4, 5)
    is_token = TARGETS != 0
    np.testing.assert_allclose(weights.sum(-1), is_token, atol=1e-5)
    assert not weights[~is_token].any() and not weights[np.broadcast_to(padding[:, None], weights.shape)].any()

    context, prompt = generate.begin(sources, prompts)
    starts = tokens_of(prompt)
    step, cache, index = generate.step(context, 12), None, np.zeros(4, "int32")
    for i in range(4):
        tokens = right_padded(starts, prompt.shape[1]) if i == 0 else TARGETS[:, i - 1 : i]
        with kt.AttentionMaps() as maps:
            _, cache = step(tokens, index, cache)
        last = np.array([len(row) for row in starts]) - 1 if i == 0 else np.zeros(4, int)
        looked = np.mean(maps[maps.cross[-1]], axis=1)[np.arange(4), last]
        np.testing.assert_allclose(looked[is_token[:, i]], weights[is_token[:, i], i], atol=1e-5)
        index = np.array([len(row) for row in starts], "int32") + i


def test_attention_of_a_layer_is_asked_for_by_its_path():
    model, generate = generator(sources_one_after_the_other)
    with kt.AttentionMaps() as maps:
        model({**sources_of(model), "target": TARGETS})
    first, last = maps.cross
    one, two = (np.asarray(generate.attention(sources_of(model), TARGETS, layer=name)) for name in (first, last))
    assert not np.allclose(one, two)
    np.testing.assert_array_equal(two, generate.attention(sources_of(model), TARGETS))


def test_attention_of_a_layer_that_is_not_there_is_refused():
    model, generate = generator(implicit_masks)
    with pytest.raises(ValueError, match=r"one of the model's cross-attention layers, \['.*'\]; got 'nowhere'"):
        generate.attention(sources_of(model), TARGETS, layer="nowhere")
    model, generate = generator(unnamed_input)
    with pytest.raises(ValueError, match=r"cross-attention layers, \[\]; got None"):
        generate.attention(None, TARGETS, PROMPTS)


# options

SEARCHES = {"beam": {}, "sampling": {"temperature": 1.0}}
both_searches = pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)


def written(search, **options):
    """(ids `[B * n, L]`, lengths) that `implicit_masks` writes."""
    model, generate = generator(implicit_masks, width=3, n=3)
    found = plain(jitted(lambda sources: generate(sources, **search, **options))(sources_of(model)))
    return found["ids"].reshape(-1, found["ids"].shape[-1]), found["length"].reshape(-1)


@pytest.mark.parametrize("least", [5, np.array([1, 3, 7, 5], "int32")], ids=["one", "each"])
def test_the_fewest_tokens_and_the_most_are_a_numbers_or_each_rows(least):
    model, generate = generator(implicit_masks, width=3, n=2, end_id=(3, 4, 5))
    sources, ends = sources_of(model), (3, 4, 5)
    wanted = ops.convert_to_tensor(least)
    found = plain(generate(sources, min_length=least if isinstance(least, int) else wanted))
    assert_same(found, searched(model, width=3, n=2, least=least, ends=ends))
    assert np.all(least <= found["length"].T)
    assert not np.all(least <= searched(model, width=3, n=2, ends=ends)["length"].T)
    found = plain(generate(sources, max_length=least if isinstance(least, int) else wanted))
    assert_same(found, searched(model, width=3, n=2, length=least, ends=ends))
    assert found["ids"].shape == (4, 2, np.max(least)) and np.all(least >= found["length"].T)


def test_samples_have_the_fewest_and_the_most_tokens_of_their_rows():
    bounds = {"min_length": np.array([2, 1, 6, 4], "int32"), "max_length": np.array([2, 3, 6, 9], "int32")}
    ids, length = written(SEARCHES["sampling"], **bounds)
    assert ids.shape == (12, 9)
    assert np.all(length >= np.repeat(bounds["min_length"], 3)) and np.all(length <= np.repeat(bounds["max_length"], 3))


@slow_on_jax
@both_searches
def test_forbidden_ids_are_not_written(search):
    often = [token for token in np.argsort(np.bincount(written(search)[0].flatten()))[::-1] if token not in (0, 3)][:2]
    assert set(often) <= set(written(search)[0].flatten())
    ids, _ = written(search, forbidden_ids=often)
    assert not set(often) & set(ids.flatten())


def test_a_beam_does_without_forbidden_ids_and_takes_the_next_best():
    model, generate = generator(implicit_masks, width=3, n=2)
    found = jitted(lambda sources: generate(sources, forbidden_ids=[4, 5, 9]))(sources_of(model))
    assert_same(found, searched(model, width=3, n=2, forbidden=(4, 5, 9)))


def repeats(ids, size):
    """Whether a row has a sequence of `size` tokens twice, the start included."""
    rows = [[2, *row] for row in tokens_of(ids)]
    grams = [[tuple(row[i : i + size]) for i in range(len(row) - size + 1)] for row in rows]
    return np.array([len(set(row)) < len(row) for row in grams])


@slow_on_jax
@both_searches
@pytest.mark.parametrize("size", quick([1, 2], 2))
def test_no_ngram_is_repeated(search, size):
    freely, bound = ({"min_length": 7, "forbidden_ids": range(6, VOCAB), **more} for more in ({}, {"max_length": 4}))
    assert np.any(repeats(written(search, **freely)[0], size))
    options = bound | {"min_length": 1} if size == 1 else freely
    assert not np.any(repeats(written(search, **options, no_repeat_ngram=size)[0], size))


@slow_on_jax
@both_searches
def test_a_repetition_penalty_makes_repetition_rarer_and_below_one_more_frequent(search):
    def distinct(**options):
        return np.mean([len(set(row)) for row in tokens_of(written(search, min_length=7, **options)[0])])

    assert distinct(repetition_penalty=1e6) == 7
    assert distinct(repetition_penalty=1e-3) < distinct() < 7


@slow_on_jax
def test_a_temperature_that_is_a_tensor_chooses_between_beam_and_sampling():
    model, generate = generator(implicit_masks, width=3, n=2)
    sources = sources_of(model)
    graph = compiled(lambda sources, temperature: generate(sources, temperature=temperature))
    drawn = plain(jitted(lambda sources: generate(sources, temperature=1.3))(sources))
    for temperature, expected in ((0.0, searched(model, width=3, n=2)), (1.3, drawn)):
        assert_same(graph(sources, ops.convert_to_tensor(temperature)), expected)
        if BACKEND == "tensorflow":
            assert_same(generate(sources, temperature=ops.convert_to_tensor(temperature)), expected)


WRONG = [
    ("max_length", 0),
    ("max_length", 2.5),
    ("min_length", -1),
    ("length_penalty", -0.1),
    ("temperature", -1.0),
    ("temperature", float("nan")),
    ("top_k", -1),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("repetition_penalty", 0.0),
    ("no_repeat_ngram", -1),
    ("no_repeat_ngram", 1.5),
]


@pytest.mark.parametrize("option, value", WRONG)
def test_a_wrong_value_of_an_option_is_refused(option, value):
    model, generate = generator(implicit_masks, width=2)
    with pytest.raises(ValueError, match=f"`{option}` must be .*; got {value}"):
        generate(sources_of(model), **{option: value})


@pytest.mark.parametrize("width, temperature", [(1, 0.0), (1, 1.0), (2, 1.0)])
def test_a_wrong_length_penalty_is_refused_where_nothing_reads_it(width, temperature):
    model, generate = generator(implicit_masks, width=width)
    with pytest.raises(ValueError, match="`length_penalty` must be .*; got -1"):
        generate(sources_of(model), length_penalty=-1, temperature=temperature)


def test_a_forbidden_id_below_zero_is_refused():
    model, generate = generator(implicit_masks)
    with pytest.raises(ValueError, match="`forbidden id` must be .*; got -1"):
        generate(sources_of(model), forbidden_ids=[4, -1])


@pytest.mark.parametrize("name, value", [("max_length", 0), ("max_length", 2.5), ("width", 0), ("n", 0)])
def test_a_generator_of_wrong_counts_is_refused(name, value):
    with pytest.raises(ValueError, match=f"`{name}` must be a whole number of at least 1; got {value}"):
        kt.Generator(ready(implicit_masks), **{"max_length": LENGTH, name: value})


def test_more_outputs_than_beams_are_refused():
    with pytest.raises(ValueError, match="`width` must be a whole number of at least 3; got 2"):
        kt.Generator(ready(implicit_masks), LENGTH, width=2, n=3)
    model, generate = generator(implicit_masks, width=2, n=2)
    with pytest.raises(ValueError, match="`n` must be at most `width`; got 3 and 2"):
        generate(sources_of(model), n=3)


def test_an_end_that_is_padding_is_refused():
    model, generate = generator(implicit_masks, end_id=(3, 0))
    with pytest.raises(ValueError, match="An end must not be `pad_id`"):
        generate(sources_of(model))


def test_an_option_that_there_is_not_is_a_type_error():
    model, generate = generator(implicit_masks)
    with pytest.raises(TypeError, match="beams"):
        generate(sources_of(model), beams=4)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="JAX traces anew for each shape")
@pytest.mark.parametrize("search", [{}, {"temperature": 1.2, "seed": 3}], ids=["beam", "sampling"])
def test_one_graph_serves_all_batch_sizes_and_lengths(search):
    import tensorflow as tf

    _, generate = generator(implicit_masks, width=3, n=2)
    traces = []

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.int32), tf.TensorSpec([], tf.int32)])
    def graph(source, max_length):
        traces.append(source)
        return generate({"source": source}, max_length=max_length, **search)

    for batch, tokens, length in [(1, 1, 1), (4, 5, 7), (2, 9, 3), (5, 3, 12), (3, 1, 4)]:
        source = np.random.default_rng(batch).integers(1, VOCAB, size=(batch, tokens)).astype("int32")
        expected = plain(generate({"source": source}, max_length=length, **search))
        assert_same(graph(source, length), expected)
        assert expected["ids"].shape == (batch, 2, length)
    assert len(traces) == 1


@pytest.mark.skipif(BACKEND != "tensorflow", reason="JAX traces anew for each shape")
def test_one_graph_serves_all_prompts():
    import tensorflow as tf

    _, generate = generator(unnamed_input, width=3, n=2)
    traces = []

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.int32), tf.TensorSpec([], tf.int32)])
    def graph(prompt, max_length):
        traces.append(prompt)
        return generate(prompt=prompt, max_length=max_length)

    for prompt, length in [(PROMPTS, 7), (FORCED[:2], 3), (FORCED[3:, :1], 9)]:
        assert_same(graph(prompt, length), plain(generate(prompt=prompt, max_length=length)))
    assert len(traces) == 1


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


@pytest.mark.parametrize("before", quick([True, False], True), ids=["before", "behind"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_a_layer_that_mixes_target_positions_is_refused_by_name(mixer, before):
    with pytest.raises(ValueError, match="from layer 'mixer'"):
        kt.Generator(mixed(MIXERS[mixer], before), LENGTH)


def test_a_language_model_that_mixes_positions_is_refused_by_the_name_of_the_layer():
    ids = keras.Input((None,), dtype="int32")
    y = kt.DecoderBlock(**BLOCK)(MIXERS["convolution"](embedded(ids, mask_zero=False)))
    with pytest.raises(ValueError, match="from layer 'mixer'"):
        kt.Generator(keras.Model(ids, keras.layers.Dense(VOCAB)(y)), LENGTH)


def test_a_subclassed_model_that_mixes_positions_is_refused_by_its_name():
    mix = keras.layers.Conv1D(WIDTH, 3, padding="causal")
    with pytest.raises(ValueError, match="from layer 'my_language_model'"):
        kt.Generator(subclassed_language_model(mix), LENGTH)
    mix, example = keras.layers.Conv1D(WIDTH, 3, padding="causal"), {"source": np.array([[4, 5], [6, 0]], "int32")}
    with pytest.raises(ValueError, match="from layer 'my_translator'"):
        kt.Generator(subclassed_translator(mix), LENGTH, example=example)


def test_a_model_without_a_target_is_refused():
    one, two = source_input("one"), source_input("two")
    y = kt.DecoderBlock(**BLOCK)(embedded(one), encoded(two))
    model = keras.Model({"one": one, "two": two}, keras.layers.Dense(VOCAB)(y), name="lost")
    with pytest.raises(ValueError, match=r"input named 'target' or 'tokens'.*got 'lost' with inputs \['one', 'two'\]"):
        kt.Generator(model, LENGTH)


def test_an_encoder_is_no_language_model():
    ids = keras.Input((None,), dtype="int32")
    y = kt.EncoderBlock(**BLOCK, name="looks_ahead")(embedded(ids))
    with pytest.raises(ValueError, match="from layer 'looks_ahead'"):
        kt.Generator(keras.Model(ids, keras.layers.Dense(VOCAB)(y)), LENGTH)


def test_a_model_of_two_outputs_is_refused():
    source, target = source_input(), source_input("target")
    y = kt.DecoderBlock(**BLOCK)(embedded(target), encoded(source))
    model = keras.Model({"source": source, "target": target}, [keras.layers.Dense(VOCAB)(y), y])
    with pytest.raises(ValueError, match="the logits as its one output.* and 2 outputs"):
        kt.Generator(model, LENGTH)


@pytest.mark.parametrize("name", ["source", "target"])
def test_logits_that_depend_on_one_input_only_are_refused(name):
    inputs = {"source": source_input(), "target": source_input("target")}
    y = kt.DecoderBlock(**BLOCK)(embedded(inputs[name]))
    with pytest.raises(ValueError, match="must depend on 'target' and on the other inputs"):
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
@by_name("make", [built, implicit_masks, nested_encoder])
def test_a_generator_leaves_the_model_as_it_was_and_follows_its_training(make, tmp_path):
    model = shaken(make())
    model.compile(keras.optimizers.SGD(0.5), kt.TokenCrossentropy(), jit_compile=False)
    inputs = {**sources_of(model), "target": np.array([[2, 5, 6]] * 4, "int32")}
    outputs, paths = np.asarray(model(inputs)), [weight.path for weight in model.weights]
    nodes = [len(layer._inbound_nodes) for layer in model.layers]
    generate = kt.Generator(model, LENGTH, width=3, n=2)
    before = plain(generate(sources_of(model)))

    np.testing.assert_array_equal(model(inputs), outputs)
    assert [weight.path for weight in model.weights] == paths
    assert len(model.layers) == len(nodes)
    model.save(tmp_path / "model.keras")
    reloaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(reloaded(inputs), outputs, rtol=1e-5, atol=1e-5)
    assert_same(kt.Generator(reloaded, LENGTH, width=3, n=2)(sources_of(model)), before)

    assert np.isfinite(model.train_on_batch(inputs, np.array([[5, 6, 3]] * 4, "int32")))
    assert not np.allclose(model(inputs), outputs)
    after = generate(sources_of(model))
    assert_same(after, searched(model, width=3, n=2))
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


# input that does not fit


def test_inputs_that_the_model_does_not_have_are_refused():
    generate = kt.Generator(implicit_masks(), LENGTH)
    source = np.array([[4, 5]], "int32")
    for sources in (None, {}, {"sources": source}, {"source": source, "more": source}):
        with pytest.raises(ValueError, match=r"other inputs are \['source'\]; got"):
            generate(sources)
    tokens = keras.Input((None,), dtype="int32")
    writer = kt.Generator(keras.Model(tokens, keras.layers.Dense(VOCAB)(embedded(tokens))), LENGTH)
    with pytest.raises(ValueError, match=r"other inputs are \[\]; got \['source'\]"):
        writer({"source": source}, prompt=source)
    with pytest.raises(ValueError, match="needs a `prompt`"):
        writer()


def test_ids_of_another_kind_or_number_are_refused():
    generate = kt.Generator(implicit_masks(), LENGTH)
    sources = {"source": np.array([[4, 5], [6, 7]], "int32")}
    for prompt in ([[2.0], [2.0]], [2, 2]):
        with pytest.raises(ValueError, match="`prompt` must be integer ids of shape"):
            generate(sources, prompt=np.array(prompt))
    with pytest.raises(ValueError, match="`target` must be integer ids of shape"):
        generate.score(sources, np.ones((2, 3)))
    three = np.full((3, 1), 2, "int32")
    with pytest.raises(ValueError, match="`prompt` must have a row for each of the 2 sources"):
        generate(sources, prompt=three)
    with pytest.raises(ValueError, match="`target` must have a row for each of the 2 sources"):
        generate.score(sources, three)
    with pytest.raises(ValueError, match=f"below the vocabulary's size, {VOCAB}; got {VOCAB}"):
        generate(sources, forbidden_ids=[VOCAB])
    with pytest.raises(ValueError, match="`min_length` must be at most `max_length`; got 8 and 7"):
        generate(sources, min_length=8)


def test_padding_of_a_target_may_stand_anywhere():
    generate = kt.Generator(shaken(implicit_masks()), LENGTH)
    sources = {"source": np.array([[4, 5, 6]] * 3, "int32")}
    target = np.array([[7, 8, 3, 0, 0], [0, 0, 7, 8, 3], [0, 7, 0, 8, 3]], "int32")
    scores = np.asarray(generate.score(sources, target)["token_scores"])
    np.testing.assert_array_equal(scores != 0, target != 0)
    weights = np.asarray(generate.attention(sources, target))
    for one, where in zip((scores, weights), (target != 0, target != 0)):
        rows = [row[real] for row, real in zip(one, where)]
        np.testing.assert_allclose(rows[1], rows[0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(rows[2], rows[0], rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="a server meets batches of none, and servers run TensorFlow")
def test_a_batch_of_none_has_its_shapes():
    generate = kt.Generator(built(), LENGTH, width=3, n=2)
    sources = {"source": np.zeros((0, 3), "int32")}
    for options in ({}, {"temperature": 1.0, "top_p": 0.5}):
        assert generate(sources, **options)["ids"].shape == (0, 2, LENGTH)
    assert generate.score(sources, np.zeros((0, 3), "int32"))["token_scores"].shape == (0, 3)


def test_one_number_for_all_rows_is_not_a_list_of_them():
    generate = kt.Generator(built(), LENGTH, width=3)
    sources = {"source": np.array([[4, 5]] * 3, "int32")}
    with pytest.raises(ValueError, match="`length_penalty` must be one number"):
        generate(sources, length_penalty=np.array([0.0, 1.0, 2.0]))
    with pytest.raises(ValueError, match="`seed` must have a row for each of the 3"):
        generate(sources, temperature=1.0, seed=np.array([1], "int32"))


def test_prompts_of_padding_alone_and_ids_below_0_are_refused():
    generate = kt.Generator(built(), LENGTH)
    sources = {"source": np.array([[4, 5]], "int32")}
    for use in (lambda p: generate(sources, p), lambda p: generate.score(sources, [[4, 3]], p)):
        with pytest.raises(ValueError, match="Each prompt must hold a token"):
            use(np.zeros((1, 2), "int32"))
    with pytest.raises(ValueError, match="`target` must be ids of at least 0; got -1"):
        generate.score(sources, [[4, -1]])


def test_sources_of_a_fixed_length_are_fine():
    source, target = keras.Input((10,), dtype="int32", name="source"), source_input("target")
    y = kt.DecoderBlock(**BLOCK)(embedded(target), encoded(source))
    model = keras.Model({"source": source, "target": target}, keras.layers.Dense(VOCAB)(y))
    assert kt.Generator(model, LENGTH)({"source": np.ones((2, 10), "int32")})["ids"].shape == (2, 1, LENGTH)


def test_fewer_layers_than_before_are_an_error(rng):
    one, two = (kt.MultiHeadSelfAttention(2, causal=True) for _ in range(2))
    x = rng.normal(size=(1, 3, WIDTH)).astype("float32")
    with kt.DecodingScope(None, [0], 4) as scope:
        two(one(x))
    with pytest.raises(ValueError, match="got 1 calls where the cache holds"), kt.DecodingScope(scope.cache, [3], 4):
        one(x[:, :1])
