"""Functional builders of models that read whole sequences: classifiers, masked language models, regressors.

Letters: `B` batch, `T` tokens, `D` width, `V` vocabulary.
"""

import keras
from keras import ops

from keras_transformer.blocks import NORMALIZATIONS
from keras_transformer.checks import activation_named, check_count
from keras_transformer.embeddings import TokenEmbedding
from keras_transformer.noise import Dropout
from keras_transformer.pooling import Pooling
from keras_transformer.stacks import add_positions, check_positions, encoder, rows_of


def build_classifier(
    vocab_size: int,
    num_classes: int,
    d_model: int = 512,
    num_layers: int = 6,
    num_heads: int = 8,
    intermediate_dim: int = 2048,
    dropout: float = 0.1,
    pooling: str = "mean",
    positions: str | None = None,
    max_length: int | None = None,
    dtype=None,
    name: str = "classifier",
    **block,
) -> keras.Model:
    """An encoder with a vector and logits for each sequence: `tokens` ids [B, T] -> logits [B, num_classes].

    Devlin et al. 2018, "BERT", https://arxiv.org/abs/1810.04805, with the parts of Vaswani et al. 2017. Id 0 is
    padding. `model.get_layer("encoder")` maps `[vectors, padding_mask]` to vectors. Train it with
    `keras.losses.SparseCategoricalCrossentropy(from_logits=True)`.

    Args:
        vocab_size: int, vocabulary.
        num_classes: int, classes.
        d_model, num_layers, num_heads, intermediate_dim, dropout: as `build_transformer`.
        positions, max_length, dtype, name, **block: as `build_transformer`.
        pooling: method of `Pooling`.

    Returns:
        An uncompiled functional `keras.Model`.

    Raises:
        ValueError: as `build_transformer` and `Pooling`.

    Example:
    ```python
    import numpy as np
    import keras_transformer as kt
    model = kt.build_classifier(vocab_size=100, num_classes=3, **kt.PRESETS["tiny"])
    assert model(np.array([[2, 6, 7, 3], [2, 8, 3, 0]])).shape == (2, 3)
    ```
    """
    num_classes = check_count("num_classes", num_classes)
    block.update(num_heads=num_heads, intermediate_dim=intermediate_dim, dropout=dropout, dtype=dtype)
    tokens, rows, _, x = _read_tokens(vocab_size, d_model, num_layers, positions, max_length, block)
    x = Pooling(pooling, dtype=dtype, name="pooling")(x, padding_mask=rows[0])
    x = Dropout(dropout, dtype=dtype, name="pooling_dropout")(x)
    logits = keras.layers.Dense(num_classes, dtype=dtype, name="logits")(x)
    return keras.Model(tokens, logits, name=name)


def build_masked_language_model(
    vocab_size: int,
    d_model: int = 512,
    num_layers: int = 6,
    num_heads: int = 8,
    intermediate_dim: int = 2048,
    dropout: float = 0.1,
    positions: str | None = None,
    max_length: int | None = None,
    dtype=None,
    name: str = "masked_language_model",
    **block,
) -> keras.Model:
    """An encoder that fills in tokens: `tokens` ids [B, T], some masked -> logits [B, T, V].

    Devlin et al. 2018, "BERT", https://arxiv.org/abs/1810.04805: a dense layer and a normalization stand before the
    logits, which share the table of the tokens. Id 0 is padding. `masked_batches` makes what it is trained on, with
    `TokenCrossentropy`.

    Args:
        vocab_size, d_model, num_layers, num_heads, intermediate_dim, dropout: as `build_transformer`.
        positions, max_length, dtype, name, **block: as `build_transformer`.

    Returns:
        An uncompiled functional `keras.Model`.

    Raises:
        ValueError: as `build_transformer`.

    Example:
    ```python
    import numpy as np
    import keras_transformer as kt
    model = kt.build_masked_language_model(vocab_size=100, **kt.PRESETS["tiny"])
    assert model(np.array([[2, 6, 1, 3]])).shape == (1, 4, 100)
    ```
    """
    block.update(num_heads=num_heads, intermediate_dim=intermediate_dim, dropout=dropout, dtype=dtype)
    tokens, _, embedding, x = _read_tokens(vocab_size, d_model, num_layers, positions, max_length, block)
    activation, epsilon = activation_named(block.get("activation", "relu")), block.get("epsilon", 1e-6)
    x = keras.layers.Dense(
        embedding.output_dim, activation, use_bias=block.get("use_bias", True), dtype=dtype, name="head"
    )(x)
    x = NORMALIZATIONS[block.get("normalization", "layer")](epsilon=epsilon, dtype=dtype, name="head_norm")(x)
    return keras.Model(tokens, embedding(x, reverse=True), name=name)


def build_regressor(
    num_features: int,
    num_outputs: int,
    d_model: int = 512,
    num_layers: int = 6,
    num_heads: int = 8,
    intermediate_dim: int = 2048,
    dropout: float = 0.1,
    pooling: str = "last",
    positions: str | None = None,
    max_length: int | None = None,
    dtype=None,
    name: str = "regressor",
    **block,
) -> keras.Model:
    """An encoder of a time series: `series` floats [B, T, num_features] -> floats [B, num_outputs].

    Zerveas et al. 2020, https://arxiv.org/abs/2010.02803: steps are projected to the width of the encoder of Vaswani et
    al. 2017. All steps count; scale the features before (`keras.layers.Normalization`).

    Args:
        num_features: int, numbers of a step.
        num_outputs: int, numbers to predict: of a forecast, its steps times their numbers.
        d_model, num_layers, num_heads, intermediate_dim, dropout: as `build_transformer`.
        positions, max_length, dtype, name, **block: as `build_transformer`.
        pooling: method of `Pooling`.

    Returns:
        An uncompiled functional `keras.Model`.

    Raises:
        ValueError: as `build_transformer` and `Pooling`.

    Example:
    ```python
    import numpy as np
    import keras_transformer as kt
    model = kt.build_regressor(num_features=9, num_outputs=24, **kt.PRESETS["tiny"])
    assert model(np.zeros((2, 72, 9), "float32")).shape == (2, 24)
    ```
    """
    num_outputs = check_count("num_outputs", num_outputs)
    block.update(num_heads=num_heads, intermediate_dim=intermediate_dim, dropout=dropout, dtype=dtype)
    positions = check_positions(positions, max_length, **block)
    series = keras.Input((None, check_count("num_features", num_features)), name="series")
    x = keras.layers.Dense(check_count("d_model", d_model), dtype=dtype, name="steps")(series)
    rows = [ops.ones_like(series[..., 0], dtype="bool")]
    x = add_positions(x, rows, positions, max_length, "positions", **block)
    x = encoder(x.shape[-1], check_count("num_layers", num_layers), **block)([x, *rows])
    x = Pooling(pooling, dtype=dtype, name="pooling")(x)
    outputs = keras.layers.Dense(num_outputs, dtype="float32", name="outputs")(x)
    return keras.Model(series, outputs, name=name)


def _read_tokens(vocab_size, d_model, num_layers, positions, max_length, block):
    """(input ids, what blocks must know of them, embedding, encoded vectors)."""
    positions = check_positions(positions, max_length, **block)
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    embedding = TokenEmbedding(vocab_size, d_model, mask_zero=False, dtype=block["dtype"], name="embedding")
    rows = rows_of(tokens)
    x = add_positions(embedding(tokens), rows, positions, max_length, "positions", **block)
    x = encoder(embedding.output_dim, check_count("num_layers", num_layers), **block)([x, *rows])
    return tokens, rows, embedding, x
