"""One training step of an encoder-decoder: ours, of keras.layers parts, and of keras-hub blocks, side by side.

    python benchmarks/train_step.py     # some minutes on 2 cores

4+4 layers, width 256, 8 heads, inner width 1024, vocabulary 8000, 32 rows of 64 + 64 tokens without padding, dropout
0.1 where each package puts it, Adam, the same loss for all, no XLA. The steps of the three alternate, so that what else
the machine does falls on all of them; each figure is a median.
"""

import argparse

import keras
import numpy as np
from results import median_seconds, record, table, versions

import keras_transformer as kt

WIDTH, LAYERS, HEADS, INNER, VOCABULARY, DROPOUT = 256, 4, 8, 1024, 8000, 0.1
LENGTH = 64


def ours(**options):
    return kt.build_transformer(
        VOCABULARY,
        d_model=WIDTH,
        num_layers=LAYERS,
        num_heads=HEADS,
        intermediate_dim=INNER,
        dropout=DROPOUT,
        attention={"dropout": DROPOUT},  # the others drop attention weights too
        **options,
    )


def keras_parts():
    """As Keras's own examples compose it."""
    layers = keras.layers

    def attend(x, context, mask, causal=False):
        attention = layers.MultiHeadAttention(HEADS, WIDTH // HEADS, dropout=DROPOUT)
        y = attention(x, context, attention_mask=mask[:, None], use_causal_mask=causal)
        return layers.LayerNormalization()(layers.Add()([x, layers.Dropout(DROPOUT)(y)]))

    def feed_forward(x):
        y = layers.Dense(WIDTH)(layers.Dense(INNER, activation="relu")(x))
        return layers.LayerNormalization()(layers.Add()([x, layers.Dropout(DROPOUT)(y)]))

    class ScaledWithPositions(layers.Layer):
        def call(self, x):
            sinusoids = kt.positions.sinusoid(np.arange(LENGTH), WIDTH)
            return x * WIDTH**0.5 + keras.ops.cast(sinusoids, x.dtype)[: keras.ops.shape(x)[1]]

    def embed(ids, table):
        return layers.Dropout(DROPOUT)(ScaledWithPositions()(table(ids)))

    source, target = inputs()
    table = layers.ReversibleEmbedding(VOCABULARY, WIDTH)
    x, y = embed(source, table), embed(target, table)
    source_mask, target_mask = source != 0, target != 0
    for _ in range(LAYERS):
        x = feed_forward(attend(x, x, source_mask))
    for _ in range(LAYERS):
        y = attend(y, y, target_mask, causal=True)
        y = feed_forward(attend(y, x, source_mask))
    return keras.Model({"source": source, "target": target}, table(y, reverse=True))


def keras_hub_blocks():
    import keras_hub

    layers = keras_hub.layers
    source, target = inputs()
    table = layers.ReversibleEmbedding(VOCABULARY, WIDTH)

    def embed(ids):
        x = table(ids)
        return keras.layers.Dropout(DROPOUT)(x * WIDTH**0.5 + layers.SinePositionEncoding()(x))

    x, y = embed(source), embed(target)
    source_mask, target_mask = source != 0, target != 0
    for _ in range(LAYERS):
        x = layers.TransformerEncoder(INNER, HEADS, dropout=DROPOUT)(x, padding_mask=source_mask)
    for _ in range(LAYERS):
        masks = {"decoder_padding_mask": target_mask, "encoder_padding_mask": source_mask}
        y = layers.TransformerDecoder(INNER, HEADS, dropout=DROPOUT)(y, x, **masks)
    return keras.Model({"source": source, "target": target}, table(y, reverse=True))


def inputs():
    return (keras.Input((None,), dtype="int32", name=name) for name in ("source", "target"))


def median_steps(builders, rounds):
    """Seconds of one step of each model, the steps of all alternating."""
    ids = np.random.default_rng(0).integers(4, VOCABULARY, size=(32, LENGTH)).astype("int32")
    data = {"source": ids, "target": ids}, ids
    models = {}
    for name, build in builders.items():
        models[name] = build()
        models[name].compile(keras.optimizers.Adam(1e-4), kt.TokenCrossentropy(), jit_compile=False)
    steps = {name: lambda model=model: model.train_on_batch(*data) for name, model in models.items()}
    return median_seconds(steps, rounds)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    builders = {"keras_transformer": ours, "keras.layers parts": keras_parts, "keras-hub blocks": keras_hub_blocks}
    rows = []
    for policy in ("float32", "mixed_bfloat16"):
        keras.config.set_dtype_policy(policy)
        seconds = median_steps(builders, rounds)
        own = seconds["keras_transformer"]
        rows += [[policy, name, f"{step:.3f}", f"{own / step:.2f}"] for name, step in seconds.items()]
    text = f"{versions('keras', 'tensorflow', 'keras-hub')}. {__doc__.split(chr(10) * 2)[2]}\n\n"
    record("Training step", text + table(["policy", "model", "seconds a step", "ours / it"], rows))


if __name__ == "__main__":
    main()
