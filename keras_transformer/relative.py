"""Positions that act inside attention: rotary, ALiBi and the relative bias of T5.

Letters: `B` batch, `T` tokens, `N` heads, `H` head size.
"""

import math

import keras
import numpy as np
from keras import ops

from keras_transformer.checks import check_count, check_range
from keras_transformer.positions import angles


@keras.saving.register_keras_serializable(package="keras_transformer")
class RotaryPositions(keras.layers.Layer):
    """Turns pairs of each query's and key's features by angles that grow with the position.

    Su et al. 2021, "RoFormer", https://arxiv.org/abs/2104.09864: the product of a query and a key then depends on how
    far apart they stand. Longer contexts than those of training: `"linear"` divides positions by `factor` (Chen et al.
    2023, https://arxiv.org/abs/2306.15595); `"yarn"` does so for slow pairs only and sharpens attention (Peng et al.
    2023, https://arxiv.org/abs/2309.00071); `"llama3"` does so for slow pairs, chosen in another way (Grattafiori et
    al. 2024, "The Llama 3 Herd of Models", https://arxiv.org/abs/2407.21783). Angles are computed in float32 whatever
    the dtype policy.

    Args:
        max_wavelength: number above 1: pair `i` turns by `max_wavelength ** (-2 i / H)` radians a position.
        layout: `"halves"`, pair `i` is features `i` and `i + H / 2` (GPT-NeoX, Llama in Hugging Face's form), or
            `"interleaved"`, features `2 i` and `2 i + 1` (the paper's).
        scaling: None, `"linear"`, `"yarn"` or `"llama3"`.
        factor: number of at least 1, how much longer contexts are than those of training.
        original_length: int, the length in training, for `"yarn"` and `"llama3"`.

    Call arguments:
        x: float tensor `[B, T, N, H]`, queries or keys; `H` is even.
        positions: int tensor `[1 or B, T]`.

    Returns:
        float tensor `[B, T, N, H]`.

    Raises:
        ValueError: on an odd `H`, an unknown layout or scaling, or numbers out of range.

    Example:
    ```python
    import keras
    import numpy as np
    import keras_transformer as kt
    rotary, x = kt.RotaryPositions(), keras.random.normal((1, 1, 2, 8))
    def turned(position):
        return rotary(x, np.array([[position]]))
    near, far = keras.ops.sum(turned(3) * turned(5)), keras.ops.sum(turned(103) * turned(105))
    np.testing.assert_allclose(near, far, rtol=1e-4)
    ```
    """

    def __init__(
        self,
        max_wavelength: float = 10000,
        layout: str = "halves",
        scaling: str | None = None,
        factor: float = 1.0,
        original_length: int | None = None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        if layout not in ("halves", "interleaved"):
            raise ValueError(f"`layout` must be 'halves' or 'interleaved'; got {layout!r}.")
        if scaling not in (None, "linear", "yarn", "llama3"):
            raise ValueError(f"`scaling` must be None, 'linear', 'yarn' or 'llama3'; got {scaling!r}.")
        if (scaling in ("yarn", "llama3")) != (original_length is not None):
            raise ValueError(
                f"`original_length` belongs to the scalings 'yarn', 'llama3'; got {original_length!r} and {scaling!r}."
            )
        if scaling is None and factor != 1:
            raise ValueError(f"`factor` belongs to a `scaling`; got {factor!r} and None.")
        self.max_wavelength = check_range("max_wavelength", max_wavelength, 1, above=True, most=1e12)
        self.layout = layout
        self.scaling = scaling
        self.factor = check_range("factor", factor, 1)
        self.original_length = None if original_length is None else check_count("original_length", original_length)
        self.supports_masking = True
        self.built = True

    def frequencies(self, size):
        """Radians a position of each pair of a head of `size` features: float64 `[H / 2]`."""
        pairs = np.arange(size // 2)
        frequencies = self.max_wavelength ** (-2 * pairs / size)
        if self.scaling is None:
            return frequencies
        if self.scaling == "linear":
            return frequencies / self.factor

        if self.scaling == "llama3":  # pairs of less than 1 turn in the original length are slow, of more than 4 fast
            turns = self.original_length * frequencies / (2 * math.pi)
            slow = 1 - np.clip((turns - 1) / (4 - 1), 0, 1)
            return frequencies * (1 - slow) + frequencies / self.factor * slow

        def pair_of(turns):  # which pair makes so many turns in the original length
            return size * math.log(self.original_length / (turns * 2 * math.pi)) / (2 * math.log(self.max_wavelength))

        first, last = max(math.floor(pair_of(32)), 0), min(math.ceil(pair_of(1)), size - 1)  # the paper's 32 and 1
        slow = np.clip((pairs - first) / max(last - first, 1e-3), 0, 1)
        return frequencies * (1 - slow) + frequencies / self.factor * slow

    def call(self, x, positions):
        size = x.shape[-1]
        if size % 2:
            raise ValueError(f"Rotary positions turn pairs of features: the head size must be even; got {size}.")
        angle = angles(positions, self.frequencies(size))[:, :, None]  # [1 or B, T, 1, H / 2]
        stretch = 0.1 * math.log(self.factor) + 1 if self.scaling == "yarn" else 1.0
        sines, cosines = ops.sin(angle) * stretch, ops.cos(angle) * stretch
        vectors = ops.cast(x, keras.backend.result_type(x.dtype, "float32"))
        if self.layout == "halves":
            a, b = vectors[..., : size // 2], vectors[..., size // 2 :]
            return ops.cast(ops.concatenate([a * cosines - b * sines, b * cosines + a * sines], axis=-1), x.dtype)
        a, b = vectors[..., ::2], vectors[..., 1::2]
        pairs = ops.stack([a * cosines - b * sines, b * cosines + a * sines], axis=-1)
        return ops.cast(ops.reshape(pairs, ops.shape(x)), x.dtype)

    def get_config(self):
        names = ("max_wavelength", "layout", "scaling", "factor", "original_length")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}


@keras.saving.register_keras_serializable(package="keras_transformer")
class AlibiBias(keras.layers.Layer):
    """Lowers scores by how far a key stands from its query, in each head by another slope.

    Press et al. 2021, "Train Short, Test Long", https://arxiv.org/abs/2108.12409, which is about keys before the query;
    keys behind it are treated alike.

    Args:
        num_heads: int, `N`. Slopes are `2 ** (-8 i / N)`, `i` from 1; where `N` is no power of 2, those of the power
            below and then every other one of the power above.

    Call arguments:
        distances: int tensor, position of the key less that of the query.

    Returns:
        float32 tensor, `[N]` before the shape of `distances`.

    Example:
    ```python
    import numpy as np
    import keras_transformer as kt
    bias = kt.AlibiBias(num_heads=8)(np.array([-2, -1, 0]))
    np.testing.assert_allclose(bias[0], [-1, -0.5, 0])
    ```
    """

    def __init__(self, num_heads: int, **kwargs):
        super().__init__(**kwargs)
        self.num_heads = check_count("num_heads", num_heads)
        self.built = True

    def call(self, distances):
        least = 2 ** int(math.log2(self.num_heads))
        slopes = [2 ** (-8 * i / least) for i in range(1, least + 1)]
        slopes += [2 ** (-4 * i / least) for i in range(1, 2 * least, 2)][: self.num_heads - least]
        far = -ops.abs(ops.cast(distances, "float32"))
        return ops.reshape(np.array(slopes, "float32"), [-1] + [1] * len(far.shape)) * far

    def get_config(self):
        return {**super().get_config(), "num_heads": self.num_heads}


@keras.saving.register_keras_serializable(package="keras_transformer")
class RelativeBias(keras.layers.Layer):
    """Adds a learned number to scores for each head and each bucket of distances, which widen with the distance.

    Raffel et al. 2019, "T5", https://arxiv.org/abs/1910.10683, section 2.1. (T5 shares the numbers among its layers;
    here each layer has its own. Scores are divided by the root of the head size.)

    Args:
        num_heads: int, `N`.
        bidirectional: bool, whether keys behind the query have buckets of their own, half of all; if not, they share
            that of distance 0, for they are hidden.
        num_buckets: int, buckets in all, at least 4.
        max_distance: int, distance from which on all are in the last bucket.

    Call arguments:
        distances: int tensor, position of the key less that of the query.

    Returns:
        float32 tensor, `[N]` before the shape of `distances`.

    Raises:
        ValueError: on numbers that leave no bucket for far distances.

    Example:
    ```python
    import numpy as np
    import keras_transformer as kt
    bias = kt.RelativeBias(num_heads=2)(np.array([-200, -150, -1, 0]))
    assert bias.shape == (2, 4) and float(bias[0, 0]) == float(bias[0, 1]) != float(bias[0, 2])
    ```
    """

    def __init__(
        self, num_heads: int, bidirectional: bool = True, num_buckets: int = 32, max_distance: int = 128, **kwargs
    ):
        super().__init__(**kwargs)
        self.num_heads = check_count("num_heads", num_heads)
        self.bidirectional = bool(bidirectional)
        self.num_buckets = check_count("num_buckets", num_buckets, least=4)
        self.max_distance = check_count("max_distance", max_distance)
        sides = 2 if self.bidirectional else 1
        if self.num_buckets % (2 * sides) or self.max_distance <= self.num_buckets // sides // 2:
            raise ValueError(
                f"`num_buckets` must be a multiple of {2 * sides}, and `max_distance` above the {1 / (2 * sides):.0%} "
                f"of them that hold one distance each; got {num_buckets} and {max_distance}."
            )
        self.build()

    def build(self, input_shape=None):
        self.table = self.add_weight(
            shape=(self.num_buckets, self.num_heads),
            initializer=keras.initializers.RandomNormal(stddev=0.02),
            name="table",
            autocast=False,
        )
        self.built = True

    def call(self, distances):
        side = self.num_buckets // 2 if self.bidirectional else self.num_buckets
        exact = side // 2
        far = np.maximum(np.arange(self.max_distance + 1), exact)  # below `exact` there is a bucket for each distance
        growth = np.log(far / exact) / math.log(self.max_distance / exact) * (side - exact)
        buckets = np.where(far > exact, exact + (growth + 1e-9).astype(int), np.arange(self.max_distance + 1))
        buckets = ops.convert_to_tensor(np.minimum(buckets, side - 1).astype("int32"))
        distances = ops.convert_to_tensor(distances, dtype="int32")
        behind = distances > 0
        back = ops.abs(distances) if self.bidirectional else ops.where(behind, 0, -distances)
        bucket = ops.take(buckets, ops.minimum(back, self.max_distance))
        if self.bidirectional:
            bucket = bucket + ops.where(behind, side, 0)
        table = ops.reshape(self.table, (self.num_buckets, self.num_heads))  # a dense gradient: see `TokenEmbedding`
        return ops.moveaxis(ops.cast(ops.take(table, bucket, axis=0), "float32"), -1, 0)

    def get_config(self):
        names = ("num_heads", "bidirectional", "num_buckets", "max_distance")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}
