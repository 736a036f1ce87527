"""Where a token stands: sinusoids ("Attention Is All You Need", section 3.5), a learned table, segments of packed rows.

Letters: `B` batch, `T` tokens, `D` width.
"""

import math

import keras
import numpy as np
from keras import ops

from keras_transformer.checks import check_count, check_integers, check_rate, check_shape, check_vectors, concrete
from keras_transformer.noise import Dropout
from keras_transformer.scopes import DecodingScope


def sinusoid(positions, width: int, max_wavelength: float = 10000, layout: str = "concatenated"):
    """Sines and cosines of positions, at wavelengths that grow geometrically from 2 pi to `max_wavelength` * 2 pi.

    Pair `i` of a width `D` turns by `max_wavelength ** (-2 i / D)` radians a position.

    Args:
        positions: int tensor of any shape.
        width: int, `D`, odd or even.
        max_wavelength: the slowest pair's wavelength is near `2 pi max_wavelength` positions.
        layout: `"concatenated"`, all sines then all cosines (Tensor2Tensor), or `"interleaved"`, the paper's formula:
            sine in the even and cosine in the odd columns.

    Returns:
        float32 tensor, the shape of `positions` with `[D]` behind, within 1e-5 of the exact value to position 10,000.
    """
    pairs = (width + 1) // 2
    angle = angles(positions, float(max_wavelength) ** (-2 * np.arange(pairs) / width))  # [..., pairs]
    sines, cosines = ops.sin(angle), ops.cos(angle)
    if layout == "concatenated":
        return ops.concatenate([sines, cosines[..., : width // 2]], axis=-1)
    columns = ops.stack([sines, cosines], axis=-1)  # [..., pairs, 2]
    return ops.reshape(columns, (*ops.shape(angle)[:-1], 2 * pairs))[..., :width]


def angles(positions, frequencies):
    """Products of positions and frequencies, up to whole turns.

    The angle is made as a 32-bit fraction of a turn: integers wrap around, so whole turns drop out and far positions
    keep their precision. position * frequency in float32 is off by 4e-4 at 5,000. What the fraction rounds off a
    frequency comes to 7e-4 at a million, and is added.

    Args:
        positions: int tensor of any shape.
        frequencies: NumPy array `[P]` of radians a position, at most pi.

    Returns:
        float32 tensor, the shape of `positions` with `[P]` behind.
    """
    step = 2 * math.pi / 2.0**32
    steps = np.round(frequencies / step)
    rest = (frequencies - steps * step).astype("float32")
    positions = ops.cast(positions, "int32")[..., None]
    phase = positions * steps.astype("int64").astype("int32")
    return ops.cast(phase, "float32") * step + ops.cast(positions, "float32") * rest


def positions_within(segment_ids):
    """Positions that start anew at each segment of a packed row.

    Args:
        segment_ids: integer tensor `[B, T]`, the number of each token's segment; a segment's tokens stand together.

    Returns:
        int32 tensor `[B, T]`, from 0 in each segment.
    """
    rows, length = ops.shape(segment_ids)
    is_first = ops.pad(segment_ids[:, 1:] != segment_ids[:, :-1], [[0, 0], [1, 0]], constant_values=True)
    is_first = is_first[:, :length]  # of no tokens too
    run = ops.cumsum(ops.cast(is_first, "int32"), axis=1) - 1  # [B, T], which run of equal numbers, from 0
    run = ops.reshape(run + ops.arange(rows, dtype="int32")[:, None] * length, (-1,))
    lengths = ops.segment_sum(ops.ones_like(run), run, num_segments=rows * length)
    lengths = ops.reshape(lengths, (rows, length))  # of each run
    starts = ops.reshape(ops.cumsum(lengths, axis=1) - lengths, (-1,))
    return ops.arange(length, dtype="int32") - ops.reshape(ops.take(starts, run), (rows, length))


def positions_of(x, segment_ids=None):
    """Where the tokens of `[B, T, D]` stand: int32 `[1 or B, T]`, in a `DecodingScope` from its index on."""
    if segment_ids is not None:
        check_integers("segment_ids", segment_ids, x.shape[1])
    scope, num_tokens = DecodingScope.current(), ops.shape(x)[1]
    if scope is not None:  # what is written is one segment
        return scope.positions(num_tokens)
    return ops.arange(num_tokens, dtype="int32")[None] if segment_ids is None else positions_within(segment_ids)


@keras.saving.register_keras_serializable(package="keras_transformer")
class SegmentIds(keras.layers.Layer):
    """Numbers the sequences that are packed into one row: 1, 2, ... for their tokens, 0 for padding.

    They are told apart by the token that each begins with (`start_id`, as a decoder's inputs do) or ends with
    (`end_id`, as sources do); so an ordinary row is one segment. In a `DecodingScope` what is written is one segment.
    The numbers are what `PositionalEncoding` and the blocks take as `segment_ids`. Packing with separate segments:
    Krell et al. 2021, https://arxiv.org/abs/2107.02027.

    Args:
        start_id: int, the first token of each sequence; or None.
        end_id: int, the last token of each sequence; or None.
        pad_id: int, padding.

    Call arguments:
        ids: integer tensor `[B, T]`.

    Returns:
        int32 tensor `[B, T]`.

    Raises:
        ValueError: unless one of `start_id` and `end_id` is given; on ids that are not integers `[B, T]`.

    Example:
    ```python
    import numpy as np
    import keras_transformer as kt
    segments = kt.SegmentIds(start_id=2)(np.array([[2, 7, 8, 2, 9, 0]]))
    assert np.array(segments).tolist() == [[1, 1, 1, 2, 2, 0]]
    segments = kt.SegmentIds(end_id=3)(np.array([[7, 8, 3, 9, 3, 0]]))
    assert np.array(segments).tolist() == [[1, 1, 1, 2, 2, 0]]
    ```
    """

    def __init__(self, start_id: int | None = None, end_id: int | None = None, pad_id: int = 0, **kwargs):
        super().__init__(**kwargs)
        if (start_id is None) == (end_id is None):
            raise ValueError(f"One of `start_id` and `end_id` must be given; got {start_id!r} and {end_id!r}.")
        self.start_id = None if start_id is None else int(start_id)
        self.end_id = None if end_id is None else int(end_id)
        self.pad_id = int(pad_id)
        self.built = True

    def call(self, ids):
        check_integers("ids", ids, None)
        real = ops.cast(ids != self.pad_id, "int32")
        if DecodingScope.current() is not None:
            return real
        edge = ops.cast(ids == (self.end_id if self.start_id is None else self.start_id), "int32")
        number = ops.cumsum(edge, axis=1)
        # what is not ended, or stands before the first start, is a segment too
        if self.start_id is None:
            return (number + 1 - edge) * real
        is_before = ops.any(ops.logical_and(number == 0, real == 1), axis=1, keepdims=True)
        return (number + ops.cast(is_before, "int32")) * real

    def get_config(self):
        return {**super().get_config(), "start_id": self.start_id, "end_id": self.end_id, "pad_id": self.pad_id}


@keras.saving.register_keras_serializable(package="keras_transformer")
class PositionalEncoding(keras.layers.Layer):
    """Adds the sinusoidal position of each token to its vector: `x + encoding`.

    Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, section 3.5. Nothing is learned and no table is kept, so any
    length and width work, also lengths beyond those seen in training. The sinusoids are computed in float32 whatever
    the dtype policy and cast last. The Keras mask of `x` is passed on.

    Args:
        max_wavelength: number above 0; see `sinusoid`.
        layout: `"concatenated"` (sines in the first half, cosines in the second) or `"interleaved"` (the paper's).
        dropout: float in [0, 1), dropout on the sum (the paper's section 5.4).

    Call arguments:
        x: float tensor `[B, T, D]`, token embeddings, already scaled (`TokenEmbedding` does it).
        segment_ids: integer tensor `[B, T]` where a row is packed of several sequences, as of `SegmentIds`: positions
            start anew in each.
        training: bool, whether dropout acts.

    Returns:
        float tensor `[B, T, D]`.

    Raises:
        ValueError: on an unknown layout, a rate outside [0, 1) or input that is not `[B, T, D]` floats.

    Example:
    ```python
    import keras
    import numpy as np
    import keras_transformer as kt
    x = keras.ops.zeros((1, 3, 4))
    encoded = kt.PositionalEncoding()(x)
    np.testing.assert_allclose(encoded[0, 1], [np.sin(1), np.sin(0.01), np.cos(1), np.cos(0.01)], atol=1e-6)
    ```
    """

    def __init__(self, max_wavelength: float = 10000, layout: str = "concatenated", dropout: float = 0.0, **kwargs):
        super().__init__(**kwargs)
        if layout not in ("concatenated", "interleaved"):
            raise ValueError(f"`layout` must be 'concatenated' or 'interleaved'; got {layout!r}.")
        if not max_wavelength > 0:
            raise ValueError(f"`max_wavelength` must be above 0; got {max_wavelength!r}.")
        self.max_wavelength = float(max_wavelength)
        self.layout = layout
        self.dropout = check_rate("dropout", dropout)
        self.supports_masking = True

    def build(self, input_shape):
        self.dropout_layer = Dropout(self.dropout, dtype=self.dtype_policy)

    def call(self, x, segment_ids=None, training=None):
        check_vectors("x", x)
        positions = positions_of(x, segment_ids)
        encoding = sinusoid(positions, x.shape[-1], self.max_wavelength, self.layout)  # [1 or B, T, D]
        return self.dropout_layer(x + ops.cast(encoding, x.dtype), training=training)

    def get_config(self):
        own = {"max_wavelength": self.max_wavelength, "layout": self.layout, "dropout": self.dropout}
        return {**super().get_config(), **own}


@keras.saving.register_keras_serializable(package="keras_transformer")
class LearnedPositions(keras.layers.Layer):
    """Adds a learned vector for each position to the tokens' vectors: `x + table[position]`.

    Gehring et al. 2017, https://arxiv.org/abs/1705.03122, and as in GPT and BERT. There are as many positions as the
    table has rows: others are refused, and where that cannot be (under XLA) the vectors are NaN. The table's gradient
    is dense: see `TokenEmbedding`. The Keras mask of `x` is passed on.

    Args:
        max_length: int, how many positions there are.
        dropout: float in [0, 1), dropout on the sum.

    Call arguments: as `PositionalEncoding`.

    Returns:
        float tensor `[B, T, D]`.

    Raises:
        ValueError: on more tokens than `max_length`, counted from what a `DecodingScope` holds; otherwise as
            `PositionalEncoding`.

    Example:
    ```python
    import keras
    import numpy as np
    import keras_transformer as kt
    layer = kt.LearnedPositions(max_length=8)
    encoded = layer(keras.ops.zeros((2, 3, 4)))
    np.testing.assert_array_equal(encoded[1], layer.table[:3])
    ```
    """

    def __init__(self, max_length: int, dropout: float = 0.0, **kwargs):
        super().__init__(**kwargs)
        self.max_length = check_count("max_length", max_length)
        self.dropout = check_rate("dropout", dropout)
        self.supports_masking = True

    def build(self, input_shape):
        check_shape("x", input_shape)
        self.table = self.add_weight(
            shape=(self.max_length, input_shape[-1]),
            initializer=keras.initializers.RandomNormal(stddev=0.02),
            name="table",
            autocast=False,
        )
        self.dropout_layer = Dropout(self.dropout, dtype=self.dtype_policy)

    def call(self, x, segment_ids=None, training=None):
        check_vectors("x", x)
        positions = positions_of(x, segment_ids)
        known, last = concrete(positions), None
        if known is not None:
            last = known.max(initial=-1) + 1
        elif segment_ids is None and isinstance(x.shape[1], int):
            last = x.shape[1]
        if last is not None and last > self.max_length:
            raise ValueError(f"`LearnedPositions` has {self.max_length} positions; got tokens up to the {last}th.")
        table = ops.reshape(self.table, (self.max_length, x.shape[-1]))
        vectors = ops.take(table, positions, axis=0)
        vectors = ops.where((positions < self.max_length)[..., None], vectors, float("nan"))
        return self.dropout_layer(x + ops.cast(vectors, x.dtype), training=training)

    def get_config(self):
        return {**super().get_config(), "max_length": self.max_length, "dropout": self.dropout}
