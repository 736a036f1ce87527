"""Writing 64 tokens for each of 16 rows: ours, keras-hub, the uncached recipe and CTranslate2, side by side.

    python benchmarks/decode.py     # some minutes on 2 cores

4+4 layers, post-norm, width 256, 8 heads, inner width 1024, vocabulary 8000, sources of 64 tokens, random weights, no
row ends early. The runs alternate, so that what else the machine does falls on all of them; each figure is a median.
"""

import argparse
import os
import tempfile

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
import tensorflow as tf
from keras import ops
from results import median_seconds, record, table, versions

import keras_transformer as kt

WIDTH, LAYERS, HEADS, INNER, VOCABULARY, ROWS, LENGTH, START = 256, 4, 8, 1024, 8000, 16, 64, 2


def transformer():
    return kt.build_transformer(
        VOCABULARY, d_model=WIDTH, num_layers=LAYERS, num_heads=HEADS, intermediate_dim=INNER, dropout=0.0
    )


def ours(model, source):
    """Greedy and beam search, each as a graph and under XLA."""
    for width in (1, 4):
        generate = kt.Generator(model, LENGTH, width=width, end_id=-1)  # no token ends a row
        for mode, xla in (("graph", False), ("XLA", True)):
            run = tf.function(lambda source, generate=generate: generate({"source": source})["ids"], jit_compile=xla)
            yield f"keras_transformer, {'greedy' if width == 1 else 'beam 4'}, {mode}", lambda run=run: run(source)


def uncached(model, source):
    """As Keras's published translation example decodes: the whole model anew for each token, in a Python loop."""

    @tf.function
    def following(source, target):
        return model({"source": source, "target": target})

    def run():
        target = np.zeros((ROWS, LENGTH + 1), "int32")
        target[:, 0] = START
        for i in range(LENGTH):
            target[:, i + 1] = np.argmax(following(source, target[:, :-1])[:, i], axis=-1)
        return target[:, 1:]

    yield "uncached recipe, greedy", run


def keras_hub(source):
    """keras-hub's decoder layers with their caches, and its greedy sampler."""
    import keras_hub

    layers = keras_hub.layers
    embedding, positions = layers.ReversibleEmbedding(VOCABULARY, WIDTH), layers.SinePositionEncoding()
    encoder = [layers.TransformerEncoder(INNER, HEADS) for _ in range(LAYERS)]
    decoder = [layers.TransformerDecoder(INNER, HEADS) for _ in range(LAYERS)]

    def embed(ids, start=0):
        x = embedding(ids)
        return x * WIDTH**0.5 + positions(x, start_index=start)

    def generate(source):
        memory = embed(source)
        for block in encoder:
            memory = block(memory)
        sizes = ROWS, LAYERS, 2, LENGTH + 1, HEADS, WIDTH // HEADS
        self_cache, cross_cache = ops.zeros(sizes), ops.zeros((*sizes[:3], source.shape[1], *sizes[4:]))

        def decode(tokens, self_cache, cross_cache, index, cross_index):
            x, self_caches, cross_caches = embed(tokens, index), [], []
            for i, block in enumerate(decoder):
                x, self_new, cross_new = block(
                    x,
                    memory,
                    self_attention_cache=self_cache[:, i],
                    self_attention_cache_update_index=index,
                    cross_attention_cache=cross_cache[:, i],
                    cross_attention_cache_update_index=cross_index,
                )
                self_caches.append(self_new)
                cross_caches.append(cross_new)
            return embedding(x, reverse=True), ops.stack(self_caches, axis=1), ops.stack(cross_caches, axis=1)

        prompt = ops.pad(ops.full((ROWS, 1), START, dtype="int32"), [[0, 0], [0, LENGTH]])
        _, _, cross_cache = decode(prompt[:, :1], self_cache, cross_cache, 0, 0)

        def following(prompt, cache, index):
            tokens = ops.slice(prompt, [0, index - 1], [ROWS, 1])
            logits, cache, _ = decode(tokens, cache, cross_cache, index - 1, None)
            return logits[:, 0], None, cache

        return keras_hub.samplers.GreedySampler()(following, prompt, self_cache, index=1)

    for mode, xla in (("graph", False), ("XLA", True)):
        run = tf.function(generate, jit_compile=xla)
        yield f"keras-hub, greedy, {mode}", lambda run=run: run(source)


def ctranslate2(source, folder):
    """CTranslate2 with random weights of the same shapes."""
    import ctranslate2
    from ctranslate2.specs import TransformerSpec

    spec = TransformerSpec.from_config((LAYERS, LAYERS), HEADS, pre_norm=False)
    _fill(spec)
    tokens = [f"token{i}" for i in range(VOCABULARY - 3)]
    vocabulary = ["<unk>", "<s>", "</s>", *tokens]
    spec.register_source_vocabulary(vocabulary)
    spec.register_target_vocabulary(vocabulary)
    spec.validate()
    spec.save(folder)
    batch = [[vocabulary[i] for i in row] for row in source.numpy()]
    exactly = {"min_decoding_length": LENGTH, "max_decoding_length": LENGTH}
    for kind in ("float32", "int8"):
        translator = ctranslate2.Translator(folder, compute_type=kind, inter_threads=1, intra_threads=os.cpu_count())
        for name, width in (("greedy", 1), ("beam 4", 4)):
            yield (
                f"CTranslate2, {name}, {kind}",
                lambda translator=translator, width=width: translator.translate_batch(
                    batch, beam_size=width, max_batch_size=ROWS, **exactly
                ),
            )


def _fill(spec):
    """Random weights for every part of a CTranslate2 encoder-decoder."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return (rng.normal(size=shape) * shape[-1] ** -0.5).astype("float32")

    def dense(linear, outputs, inputs):
        linear.weight, linear.bias = normal(outputs, inputs), np.zeros(outputs, "float32")

    def norm(layer):
        layer.gamma, layer.beta = np.ones(WIDTH, "float32"), np.zeros(WIDTH, "float32")

    table = normal(VOCABULARY, WIDTH)
    spec.encoder.embeddings[0].weight = spec.decoder.embeddings.weight = table
    dense(spec.decoder.projection, VOCABULARY, WIDTH)
    for layer in (*spec.encoder.layer, *spec.decoder.layer):
        dense(layer.self_attention.linear[0], 3 * WIDTH, WIDTH)
        dense(layer.self_attention.linear[1], WIDTH, WIDTH)
        dense(layer.ffn.linear_0, INNER, WIDTH)
        dense(layer.ffn.linear_1, WIDTH, INNER)
        for part in (layer.self_attention, layer.ffn):
            norm(part.layer_norm)
    for layer in spec.decoder.layer:
        for linear, outputs in zip(layer.attention.linear, (WIDTH, 2 * WIDTH, WIDTH)):
            dense(linear, outputs, WIDTH)
        norm(layer.attention.layer_norm)
    positions = np.asarray(kt.positions.sinusoid(np.arange(LENGTH + 2), WIDTH))
    for side in (spec.encoder, spec.decoder):
        side.position_encodings.encodings = positions


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    keras.utils.set_random_seed(0)
    model = transformer()
    source = tf.constant(np.random.default_rng(0).integers(4, VOCABULARY, size=(ROWS, LENGTH)), "int32")
    with tempfile.TemporaryDirectory() as folder:
        runs = dict([*ours(model, source), *keras_hub(source), *ctranslate2(source, folder), *uncached(model, source)])
        seconds = median_seconds(runs, rounds)
    rows = [[name, f"{time:.3f}", f"{ROWS * LENGTH / time:,.0f}"] for name, time in seconds.items()]
    text = f"{versions('keras', 'tensorflow', 'keras-hub', 'ctranslate2')}. {__doc__.split(chr(10) * 2)[2]}\n\n"
    record("Writing", text + table(["what", "seconds", "tokens a second"], rows))


if __name__ == "__main__":
    main()
