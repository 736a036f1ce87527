"""Scopes that a layer looks up while it runs: the decoding cache and the collection of attention weights.

A functional model gives its author no place to pass a cache through, so the cache stands around the call, as
`keras.StatelessScope` and `keras.RematScope` do. Layers ask for the innermost scope; outside one nothing differs.

Letters: `B` batch, `T` new tokens, `L` slots of the cache.
"""

import threading

import numpy as np
from keras import ops
from keras.src.backend.common.symbolic_scope import in_symbolic_scope

_active = threading.local()


class _Scope:
    """A context manager that layers find by its class while it is open, in the thread that opened it."""

    def __enter__(self):
        stacks = _active.__dict__
        stacks.setdefault(type(self).__name__, []).append(self)
        return self

    def __exit__(self, *exception):
        _active.__dict__[type(self).__name__].pop()

    @classmethod
    def current(cls):
        """The innermost open scope of this class, or None; in a symbolic call, which only describes a graph, None."""
        stack = _active.__dict__.get(cls.__name__)
        return stack[-1] if stack and not in_symbolic_scope() else None


class DecodingScope(_Scope):
    """Lets causal attention, cross-attention and positions inside any model continue from a key/value cache.

    Inside the scope, causal self-attention writes the keys and values of the tokens it gets at `index` and attends
    to everything written so far; cross-attention computes the keys and values of its context in the first call and
    keeps them; positional encodings start at `index`. Everything else runs as ever. The scope acts on direct calls
    (`model(x)`), eager, in a `tf.function`, under XLA or JAX's jit, not on `model.predict`.

    Rows are right-padded: row `b` holds its `index[b]` cached tokens in slots `0 .. index[b] - 1`. A prefill of
    prompts of different lengths writes padding behind the shorter ones, which their next tokens overwrite.

    Args:
        cache: `scope.cache` of the call before, or None at the first.
        index: int32 tensor `[B]`, how many tokens each row has in the cache already.
        length: int, the slots of a new cache: the most tokens that a row may come to.

    Attributes:
        cache: after the call, a nest of tensors to hand to the next scope: `cache["self"]` holds what grows (and
            must follow its row when a beam search reorders rows), `cache["cross"]` what does not.

    Raises:
        ValueError: if tokens do not fit into `length`, or if other layers are called than in the call before.

    Example:
    ```python
    import keras
    import numpy as np
    import keras_transformer as kt
    layer = kt.MultiHeadSelfAttention(num_heads=2, causal=True)
    x = keras.random.normal((1, 5, 8))
    full = layer(x)
    cache, steps = None, []
    for t in range(5):
        with kt.DecodingScope(cache, index=keras.ops.array([t]), length=5) as scope:
            steps.append(layer(x[:, t : t + 1]))
        cache = scope.cache
    np.testing.assert_allclose(keras.ops.concatenate(steps, axis=1), full, atol=1e-5)
    ```
    """

    def __init__(self, cache: dict | None, index, length: int):
        self._old = cache or {"self": {}, "cross": {}}
        self._calls = {"self": 0, "cross": 0}
        self.cache = {"self": {}, "cross": {}}
        self.index = ops.convert_to_tensor(index, "int32")
        self.length = length
        if len(self.index.shape) != 1:
            raise ValueError(f"`index` must have one entry per row, shape [B]; got shape {tuple(self.index.shape)}.")

    def positions(self, num_tokens):
        """int32 `[B, T]`: where the new tokens stand in their rows."""
        return self.index[:, None] + ops.arange(num_tokens, dtype="int32")[None]

    def causal_mask(self, num_tokens):
        """bool `[B, 1, T, L]`: each new token may look at the slots up to its own."""
        slots = ops.arange(self.length, dtype="int32")
        return (slots <= self.positions(num_tokens)[:, :, None])[:, None]

    def append(self, layer, key, value):
        """Writes `[B, T, N, H]` keys and values of new tokens; returns all of `layer`'s, `[B, L, N, H]`."""
        self._check_room(key)
        name = self._entry("self", layer)
        batch, tokens, *rest = ops.shape(key)
        rows = ops.broadcast_to(ops.arange(batch, dtype="int32")[:, None], (batch, tokens))
        slots = ops.reshape(ops.stack([rows, self.positions(tokens)], axis=-1), (-1, 2))

        def write(old, new):
            if old is None:
                old = ops.zeros((batch, self.length, *rest), dtype=new.dtype)
            return ops.scatter_update(old, slots, ops.reshape(new, (-1, *rest)))

        old_key, old_value = self._old["self"].get(name, (None, None))
        self.cache["self"][name] = write(old_key, key), write(old_value, value)
        return self.cache["self"][name]

    def keep(self, layer, compute):
        """What `compute()` gave in `layer`'s first call: keys and values of a context that does not change."""
        name = self._entry("cross", layer)
        kept = self._old["cross"].get(name)
        self.cache["cross"][name] = compute() if kept is None else kept
        return self.cache["cross"][name]

    def _entry(self, kind, layer):
        """Names an entry by the order of calls, for layer names repeat and one layer may be called twice."""
        name = f"{self._calls[kind]:04d} {layer.path or layer.name}"
        self._calls[kind] += 1
        if self._old[kind] and name not in self._old[kind]:
            raise ValueError(
                f"A cache serves one model, whose layers are called in the same order every time; "
                f"got a call of {name!r} where the cache holds {sorted(self._old[kind])}."
            )
        return name

    def _check_room(self, key):
        tokens = key.shape[1]
        try:
            most = int(np.max(np.asarray(self.index), initial=0))
        except (NotImplementedError, TypeError):  # symbolic, in a graph: the scatter itself refuses on CPU
            most = 0
        if tokens is not None and most + tokens > self.length:
            raise ValueError(
                f"A cache of `length` slots must hold every token; got length {self.length} for "
                f"{tokens} new tokens after {most} cached ones."
            )


class AttentionMaps(_Scope, dict):
    """Collects the attention weights of every attention layer called inside it, also in nested models.

    A dict from the layer's path (`"decoder_block_1/cross_attention"`) to its weights `[B, N, T, S]`, in the order of
    the calls; a layer called again adds `" (2)"` to its path. Acts on direct calls, `model(x)`, not on `predict`.

    Example:
    ```python
    import numpy as np
    import keras_transformer as kt
    model = kt.build_transformer(vocab_size=20, **kt.PRESETS["tiny"])
    with kt.AttentionMaps() as maps:
        model({"source": np.array([[4, 5, 3]]), "target": np.array([[2, 6]])})
    assert maps["decoder_block_1/cross_attention"].shape == (1, 4, 2, 3)
    ```
    """

    def collect(self, layer, weights):
        """Adds `weights` under `layer`'s path."""
        path = layer.path or layer.name
        times = 1 + sum(name == path or name.startswith(path + " (") for name in self)
        self[path if times == 1 else f"{path} ({times})"] = weights
