"""What builders put models together from: vectors with positions, and stacks of blocks as functional models.

Letters: `B` batch, `T` tokens, `D` width.
"""

import keras
from keras import ops

from keras_transformer.blocks import NORMALIZATIONS, DecoderBlock, EncoderBlock
from keras_transformer.noise import Dropout
from keras_transformer.positions import LearnedPositions, PositionalEncoding


def rows_of(ids, segments=None, pad_id=0):
    """What blocks must know of rows of ids: their padding mask and, if a `SegmentIds` is given, the segment numbers."""
    mask = ops.ones_like(ids, dtype="bool") if pad_id is None else ops.not_equal(ids, pad_id)
    return [mask, *([] if segments is None else [segments(ids)])]


def check_positions(positions, max_length, attention=None, **_):
    """Which positions are added to vectors, by a builder's `positions`, `max_length` and options of its blocks."""
    if positions is None:
        positions = "sinusoid" if (attention or {}).get("position") is None else "none"
    if positions not in ("sinusoid", "learned", "none"):
        raise ValueError(f"`positions` must be 'sinusoid', 'learned', 'none' or None; got {positions!r}.")
    if (positions == "learned") != (max_length is not None):
        raise ValueError(f"`max_length` belongs to `positions='learned'`; got {max_length!r} and {positions!r}.")
    return positions


def add_positions(x, rows, positions, max_length, name, dropout, dtype=None, **_):
    """Vectors with what `check_positions` gave added to them."""
    options = {"name": name, "dtype": dtype}
    if positions == "none":
        return Dropout(dropout, **options)(x)
    if positions == "learned":
        return LearnedPositions(max_length, dropout, **options)(x, *rows[1:])
    return PositionalEncoding(dropout=dropout, **options)(x, *rows[1:])


def encoder(width, num_layers, packed=False, final_norm=None, **block):
    """`[vectors, padding mask (, segments)]` -> vectors: encoder blocks as a model.

    `final_norm`: whether a normalization follows; None for behind pre-norm blocks alone.
    """
    x, padding_mask, segments = inputs = _inputs(width, packed, block)
    for i in range(num_layers):
        x = EncoderBlock(**block, name=f"encoder_block_{i + 1}")(x, padding_mask=padding_mask, segment_ids=segments)
    x = _final_norm(x, final_norm, "encoder_norm", **block)
    # a copy, without the mask that travels with x: Keras warns where one is given to a nested model
    return keras.Model([tensor for tensor in inputs if tensor is not None], ops.copy(x), name="encoder")


def decoder(width, num_layers, packed=False, with_memory=True, final_norm=None, **block):
    """`[vectors, padding mask (, segments) (, memory, its padding mask (, its segments))]` -> vectors."""
    x, padding_mask, segments = inputs = _inputs(width, packed, block)
    memory = memory_mask = memory_segments = None
    if with_memory:
        memory, memory_mask, memory_segments = _inputs(width, packed, block, "memory", "memory_")
        inputs = [*inputs, memory, memory_mask, memory_segments]
    for i in range(num_layers):
        x = DecoderBlock(**block, name=f"decoder_block_{i + 1}")(
            x,
            memory,
            padding_mask=padding_mask,
            context_padding_mask=memory_mask,
            segment_ids=segments,
            context_segment_ids=memory_segments,
        )
    x = _final_norm(x, final_norm, "decoder_norm", **block)
    return keras.Model([tensor for tensor in inputs if tensor is not None], ops.copy(x), name="decoder")


def _inputs(width, packed, block, vectors="vectors", prefix=""):
    """Inputs of a nested model: vectors, their padding mask, their segments or None."""
    dtype = keras.dtype_policies.get(block.get("dtype") or keras.config.dtype_policy()).compute_dtype
    return (
        keras.Input((None, width), dtype=dtype, name=vectors),
        keras.Input((None,), dtype="bool", name=f"{prefix}padding_mask"),
        keras.Input((None,), dtype="int32", name=f"{prefix}segments") if packed else None,
    )


def _final_norm(x, is_wanted, name, norm_first=False, epsilon=1e-6, normalization="layer", dtype=None, **_):
    """Pre-norm blocks leave their last sum unnormalized."""
    if not (norm_first if is_wanted is None else is_wanted):
        return x
    return NORMALIZATIONS[normalization](epsilon=epsilon, name=name, dtype=dtype)(x)
