"""What both kinds of multi-head attention share: projections to heads and back ("Attention Is All You Need", 3.2.2).

Letters: `B` batch, `T` queries, `S` keys, `D` width, `N` heads, `K` kv heads, `H` head size.
"""

import keras
from keras import ops

from keras_transformer.attention import KERNELS, attend, cached_attention
from keras_transformer.checks import check_count, check_range, check_rate, check_shape
from keras_transformer.masks import four_axes
from keras_transformer.policies import saved_policy
from keras_transformer.scopes import AttentionMaps
from keras_transformer.scoring import Scoring


def project(dense, x):
    """Applies a Dense layer to `[B, T, D]`, as one product of `B * T` rows.

    On three axes TensorFlow multiplies batch row by batch row, and its gradient holds a kernel for each of them.
    """
    flat = dense(ops.reshape(x, (-1, x.shape[-1])))
    return ops.reshape(flat, (*ops.shape(x)[:-1], flat.shape[-1]))


class HeadsLayer(keras.layers.Layer):
    """What self- and cross-attention share: the projections and the way from vectors to heads and back."""

    is_cross = False

    def __init__(
        self,
        num_heads: int,
        key_dim: int | None = None,
        dropout: float = 0.0,
        use_bias: bool = True,
        num_kv_heads: int | None = None,
        soft_cap: float | None = None,
        qk_norm: bool = False,
        kernel: str = "auto",
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.num_heads = check_count("num_heads", num_heads)
        self.key_dim = None if key_dim is None else check_count("key_dim", key_dim)
        self.dropout = check_rate("dropout", dropout)
        self.use_bias = bool(use_bias)
        self.num_kv_heads = None if num_kv_heads is None else check_count("num_kv_heads", num_kv_heads)
        if self.num_heads % (self.num_kv_heads or 1):
            raise ValueError(f"`num_kv_heads` must divide `num_heads`; got {num_kv_heads} and {num_heads}.")
        self.soft_cap = None if soft_cap is None else check_range("soft_cap", soft_cap, 0, above=True)
        self.qk_norm = bool(qk_norm)
        if kernel not in KERNELS:
            raise ValueError(f"`kernel` must be one of {list(KERNELS)}; got {kernel!r}.")
        self.kernel = kernel
        self.supports_masking = True
        self._seed = keras.random.SeedGenerator() if self.dropout else None

    def _build(self, x_shape, context_shape):
        for name, shape in (("x", x_shape), ("context", context_shape)):
            check_shape(name, shape)
        width = x_shape[-1]
        if self.key_dim is None and width % self.num_heads:
            raise ValueError(
                f"`d_model` must be divisible by `num_heads` where `key_dim` is None; got {width} and {self.num_heads}."
            )
        self.head_size = self.key_dim or width // self.num_heads
        inner = self.num_heads * self.head_size
        kv_inner = (self.num_kv_heads or self.num_heads) * self.head_size
        for name, shape, features in (
            ("query", x_shape, inner),
            ("key", context_shape, kv_inner),
            ("value", context_shape, kv_inner),
            ("output", (*x_shape[:-1], inner), width),
        ):
            # Glorot's variance of a product that makes queries, keys and values at once: models learn faster by it
            scale = 1.0 if name == "output" else 0.5
            dense = keras.layers.Dense(
                features,
                use_bias=self.use_bias,
                kernel_initializer=keras.initializers.VarianceScaling(scale, "fan_avg", "uniform"),
                dtype=self.dtype_policy,
                name=name,
            )
            dense.build(shape)
            setattr(self, f"{name}_projection", dense)
        for name in ("query", "key") if self.qk_norm else ():
            norm = keras.layers.RMSNormalization(dtype=self.dtype_policy, name=f"{name}_norm")
            norm.build((None, None, None, self.head_size))
            setattr(self, f"{name}_norm", norm)

    def _explicit(self, attention_mask, x, context):
        if attention_mask is None:
            return None
        return four_axes(attention_mask, x.shape[1], context.shape[1], self.num_heads, "attention_mask")

    def _heads(self, name, x):
        """Queries, keys or values: `[B, T, D]` -> `[B, T, N or K, H]`."""
        heads = project(getattr(self, f"{name}_projection"), x)
        heads = ops.reshape(heads, (*ops.shape(x)[:2], heads.shape[-1] // self.head_size, self.head_size))
        return getattr(self, f"{name}_norm")(heads) if self.qk_norm and name != "value" else heads

    def _attend(self, query, key, value, return_attention_scores, training, cached=False, **rules):
        """Heads to the layer's output `[B, T, D]`, with the weights `[B, N, T, S]` if asked."""
        maps = AttentionMaps.current()
        lengths = ops.shape(query)[1], ops.shape(key)[2 if cached else 1]
        scoring = Scoring(lengths, self.num_heads, soft_cap=self.soft_cap, **rules)
        if cached:
            heads, weights = cached_attention(query, key, value, scoring)
        else:
            kernel = "exact" if return_attention_scores or maps is not None else self.kernel
            dropout = self.dropout if training else 0.0
            heads, weights = attend(query, key, value, scoring, dropout, self._seed, kernel)
        if maps is not None:
            maps.collect(self, weights, is_cross=self.is_cross)
        joined = ops.reshape(heads, (*ops.shape(heads)[:2], self.num_heads * self.head_size))
        output = project(self.output_projection, joined)
        return (output, weights) if return_attention_scores else output

    def get_config(self):
        names = ("num_heads", "key_dim", "dropout", "use_bias", "num_kv_heads", "soft_cap", "qk_norm", "kernel")
        own = {name: getattr(self, name) for name in names}
        return {**super().get_config(), **own, "dtype": saved_policy(self)}
