"""Functional builders: whole Transformers as plain `keras.Model`s of this package's layers.

Letters: `B` batch, `S` source tokens, `T` target tokens, `V` target vocabulary.
"""

import keras

from keras_transformer.checks import check_count, check_rate
from keras_transformer.embeddings import TokenEmbedding
from keras_transformer.positions import SegmentIds
from keras_transformer.stacks import add_positions, check_positions, decoder, encoder, rows_of

PRESETS = {
    "tiny": {"d_model": 128, "num_layers": 2, "num_heads": 4, "intermediate_dim": 512, "dropout": 0.1},
    "small": {"d_model": 256, "num_layers": 3, "num_heads": 4, "intermediate_dim": 1024, "dropout": 0.1},
    "base": {"d_model": 512, "num_layers": 6, "num_heads": 8, "intermediate_dim": 2048, "dropout": 0.1},
    "big": {"d_model": 1024, "num_layers": 6, "num_heads": 16, "intermediate_dim": 4096, "dropout": 0.3},
    "llama": {
        "d_model": 256,
        "num_layers": 4,
        "num_heads": 8,
        "intermediate_dim": 688,
        "dropout": 0.0,
        "activation": "silu",
        "norm_first": True,
        "use_bias": False,
        "epsilon": 1e-5,
        "normalization": "rms",
        "attention": {"num_kv_heads": 2, "position": "rotary"},
        "feed_forward": {"gated": True},
    },
}
"""Keyword arguments of the builders. "base" and "big" are the paper's sizes (its table 3), "tiny" and "small" are for a
CPU. "llama" is a small decoder of the form of Llama 2 (Touvron et al. 2023, https://arxiv.org/abs/2307.09288): rotary
positions, grouped heads, RMS norm before each sublayer, SwiGLU, no biases. Override what you like:
`{**PRESETS["llama"], "num_layers": 8}`."""


def build_transformer(
    vocab_size: int,
    target_vocab_size: int | None = None,
    d_model: int = 512,
    num_layers: int = 6,
    num_heads: int = 8,
    intermediate_dim: int = 2048,
    dropout: float = 0.1,
    tie_embeddings: str | None = None,
    pad_id: int | None = 0,
    positions: str | None = None,
    max_length: int | None = None,
    packed: bool = False,
    dtype=None,
    name: str = "transformer",
    **block,
) -> keras.Model:
    """An encoder-decoder: `{"source": ids [B, S], "target": ids [B, T]} -> logits [B, T, V]`.

    Vaswani et al. 2017, https://arxiv.org/abs/1706.03762. `target` is the decoder's input, the labels shifted right
    (`keras_transformer.pair_batches` does it). `model.get_layer("encoder")` maps `[vectors, padding_mask]` to memory,
    `model.get_layer("decoder")` `[vectors, padding_mask, memory, memory_padding_mask]` to vectors; both are functional
    models too (of packed rows, each padding mask is followed by segment numbers).

    Args:
        vocab_size: int, source vocabulary.
        target_vocab_size: int, target vocabulary; None for one vocabulary of both.
        d_model: int, width.
        num_layers: int, blocks of the encoder and of the decoder.
        num_heads: int, attention heads.
        intermediate_dim: int, inner width of the feed-forward layers.
        dropout: float in [0, 1), dropout on sublayer outputs and on embeddings with positions.
        tie_embeddings: `"all"` shares one table among source, target and logits (the paper's section 3.4), `"target"`
            between target and logits, `"none"` nothing. None for `"all"` with one vocabulary, `"target"` with two.
        pad_id: int, the id of padding; None if there is none.
        positions: what is added to embeddings: `"sinusoid"` (`PositionalEncoding`), `"learned"` (`LearnedPositions` of
            `max_length`) or `"none"`; None for `"none"` where `attention` has a `position`, else `"sinusoid"`.
        max_length: int, positions of the table of `"learned"`.
        packed: bool, whether a row may hold several pairs (`pair_batches(..., packed=True)`) that do not see each
            other: each source ends with id 3, each target starts with id 2. Rows of one pair give what they give
            without it.
        dtype: str or `keras.DTypePolicy` of all layers; None for Keras's global policy.
        name: str, the model's name.
        **block: further arguments of `EncoderBlock` and `DecoderBlock`: `activation`, `norm_first`, `use_bias`,
            `epsilon`, `normalization`, `attention`, `feed_forward`.

    Returns:
        An uncompiled functional `keras.Model`.

    Raises:
        ValueError: on an unknown `tie_embeddings`, `"all"` with two vocabularies, or no layers; otherwise as the
            layers.

    Example:
    ```python
    import numpy as np
    import keras_transformer as kt
    model = kt.build_transformer(vocab_size=100, **kt.PRESETS["tiny"])
    logits = model({"source": np.array([[4, 5, 3]]), "target": np.array([[2, 6]])})
    assert logits.shape == (1, 2, 100)
    ```
    """
    if tie_embeddings is None:
        tie_embeddings = "all" if target_vocab_size in (None, vocab_size) else "target"
    if tie_embeddings not in ("all", "target", "none"):
        raise ValueError(f"`tie_embeddings` must be 'all', 'target' or 'none'; got {tie_embeddings!r}.")
    target_vocab_size = vocab_size if target_vocab_size is None else target_vocab_size
    d_model, num_layers = check_count("d_model", d_model), check_count("num_layers", num_layers)
    if tie_embeddings == "all" and target_vocab_size != vocab_size:
        raise ValueError(
            f"`tie_embeddings='all'` needs one vocabulary; got sizes {vocab_size} and {target_vocab_size}."
        )
    block.update(num_heads=num_heads, intermediate_dim=intermediate_dim, dropout=dropout, dtype=dtype)

    where = check_positions(positions, max_length, **block), max_length
    source = keras.Input((None,), dtype="int32", name="source")
    target = keras.Input((None,), dtype="int32", name="target")
    # masks are passed to the submodels explicitly: Keras drops the ones that travel with tensors at a nested model
    options = {"mask_zero": False, "dtype": dtype}
    if tie_embeddings == "all":
        source_embedding = target_embedding = TokenEmbedding(vocab_size, d_model, name="embedding", **options)
    else:
        source_embedding = TokenEmbedding(vocab_size, d_model, name="source_embedding", **options)
        options["tie_weights"] = tie_embeddings == "target"
        target_embedding = TokenEmbedding(target_vocab_size, d_model, name="target_embedding", **options)
    source_rows = rows_of(source, SegmentIds(end_id=3, name="source_segments") if packed else None, pad_id)
    target_rows = rows_of(target, SegmentIds(start_id=2, name="target_segments") if packed else None, pad_id)
    x = add_positions(source_embedding(source), source_rows, *where, "source_positions", **block)
    memory = encoder(d_model, num_layers, packed, **block)([x, *source_rows])
    y = add_positions(target_embedding(target), target_rows, *where, "target_positions", **block)
    y = decoder(d_model, num_layers, packed, **block)([y, *target_rows, memory, *source_rows])
    logits = target_embedding(y, reverse=True)
    return keras.Model({"source": source, "target": target}, logits, name=name)


def build_language_model(
    vocab_size: int,
    d_model: int = 512,
    num_layers: int = 6,
    num_heads: int = 8,
    intermediate_dim: int = 2048,
    dropout: float = 0.1,
    tie_embeddings: bool = True,
    pad_id: int | None = 0,
    positions: str | None = None,
    max_length: int | None = None,
    packed: bool = False,
    dtype=None,
    name: str = "language_model",
    **block,
) -> keras.Model:
    """A decoder-only Transformer: `tokens` ids [B, T] -> logits [B, T, V] of each next token.

    Radford et al. 2018, "Improving Language Understanding by Generative Pre-Training" (GPT), with the sinusoids of
    Vaswani et al. 2017. `model.get_layer("decoder")` maps `[vectors, padding_mask]` to vectors (of packed rows,
    `[vectors, padding_mask, segments]`).

    Args:
        vocab_size: int, vocabulary.
        d_model, num_layers, num_heads, intermediate_dim, dropout: as `build_transformer`.
        positions, max_length, dtype, name, **block: as `build_transformer`.
        tie_embeddings: bool, whether one table serves tokens and logits.
        pad_id: int, the id of padding; None if there is none (padding behind a text changes nothing before it).
        packed: bool, whether a row may hold several texts, each starting with id 2, which then do not see each other.

    Returns:
        An uncompiled functional `keras.Model`.

    Raises:
        ValueError: on no layers; otherwise as the layers.

    Example:
    ```python
    import numpy as np
    import keras_transformer as kt
    model = kt.build_language_model(vocab_size=100, **kt.PRESETS["tiny"], norm_first=True)
    assert model(np.array([[2, 6, 7]])).shape == (1, 3, 100)
    found = kt.Generator(model, max_length=4)(prompt=np.array([[2, 6, 7], [2, 8, 0]]))
    assert found["ids"].shape == (2, 1, 4)
    ```
    """
    num_layers = check_count("num_layers", num_layers)
    block.update(num_heads=num_heads, intermediate_dim=intermediate_dim, dropout=dropout, dtype=dtype)
    where = check_positions(positions, max_length, **block), max_length
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    options = {"mask_zero": False, "tie_weights": bool(tie_embeddings), "dtype": dtype}
    embedding = TokenEmbedding(vocab_size, d_model, name="embedding", **options)
    rows = rows_of(tokens, SegmentIds(start_id=2, name="segments") if packed else None, pad_id)
    x = add_positions(embedding(tokens), rows, *where, "positions", **block)
    x = decoder(embedding.output_dim, num_layers, packed, with_memory=False, **block)([x, *rows])
    return keras.Model(tokens, embedding(x, reverse=True), name=name)


def loss_model(model: keras.Model, label_smoothing: float = 0.0, pad_id: int | None = 0) -> keras.Model:
    """A model to train with a large vocabulary, or few labels: never the logits of all tokens, none of padding.

    It has the layers and weights of `model`, an input more, `labels`, and the cross-entropy of each of them as output:
    `{inputs..., "labels": ids [B, T]} -> float32 [B, T]`, NaN at padding. See `TokenEmbedding`'s `labels`. A masked
    language model, whose labels are padding but for the hidden tokens, trains faster by it. Train it with
    `TokenCrossentropy` (its own smoothing left at 0), then save and use `model`. In training, metrics such as
    `TokenLoss` see the smoothed cross-entropies too; what is evaluated is not smoothed.

    Args:
        model: functional `keras.Model` whose output is `TokenEmbedding(...)(vectors, reverse=True)`, as the builders'.
        label_smoothing: float in [0, 1), in training.
        pad_id: int, the label of padding, as of the loss, which is NaN if they differ; None if there is none.

    Returns:
        An uncompiled functional `keras.Model`.

    Raises:
        ValueError: if the logits of `model` are no `TokenEmbedding`'s.

    Example:
    ```python
    import keras
    import numpy as np
    import keras_transformer as kt
    model = kt.build_language_model(vocab_size=100, **kt.PRESETS["tiny"])
    trained = kt.loss_model(model, label_smoothing=0.1)
    trained.compile(keras.optimizers.Adam(1e-3), kt.TokenCrossentropy(), metrics=[kt.TokenLoss()], jit_compile=False)
    tokens, labels = np.array([[2, 7, 8]]), np.array([[7, 8, 3]])
    trained.fit({"tokens": tokens, "labels": labels}, labels, verbose=0)
    ```
    """
    layer, node_index, _ = model.outputs[0]._keras_history
    vectors = layer._inbound_nodes[node_index].input_tensors[0]
    is_reverse = isinstance(layer, TokenEmbedding) and keras.backend.is_float_dtype(vectors.dtype)
    if not is_reverse or len(model.outputs) != 1:
        raise ValueError(f"The one output must be the logits of a `TokenEmbedding`; got that of {layer.name!r}.")
    if any(tensor.name == "labels" for tensor in model.inputs):
        raise ValueError("An input must not be called 'labels', as the one that is added is; got one.")
    label_smoothing = check_rate("label_smoothing", label_smoothing)
    labels = keras.Input((None,), dtype="int32", name="labels")
    losses = layer(vectors, labels=labels, label_smoothing=label_smoothing, pad_id=pad_id)
    inputs = {**{tensor.name: tensor for tensor in model.inputs}, "labels": labels}
    return keras.Model(inputs, losses, name=f"{model.name}_loss")
