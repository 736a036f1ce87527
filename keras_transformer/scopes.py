"""Scopes that a layer looks up while it runs: the decoding cache and the collection of attention weights.

A functional model gives its author no place to pass a cache through, so the cache stands around the call, as
`keras.StatelessScope` and `keras.RematScope` do. Layers ask for the innermost scope; outside one nothing differs.

Letters: `B` batch, `R` rows (beams or samples of a batch), `T` new tokens, `L` slots of a row in the cache, `K` kv
heads, `H` head size.
"""

import threading

import keras
from keras import ops
from keras.src.backend.common.symbolic_scope import in_symbolic_scope

from keras_transformer.checks import concrete

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


def shared_by(rows, groups):
    """How many rows share each of the groups; 1 where there are none."""
    return rows // groups if isinstance(groups, int) and groups else ops.maximum(rows // ops.maximum(groups, 1), 1)


class DecodingScope(_Scope):
    """Lets causal attention, cross-attention and positions inside any model continue from a key/value cache.

    Inside the scope, causal self-attention writes the keys and values of the tokens it gets at `index` and attends
    to everything written so far; cross-attention computes the keys and values of its context in the first call and
    keeps them; positional encodings start at `index`. Everything else runs as ever. The scope acts on direct calls
    (`model(x)`), eager, in a `tf.function`, under XLA or JAX's jit, not on `model.predict`.

    Rows are right-padded: row `b` holds its `index[b]` cached tokens in slots `0 .. index[b] - 1`. A prefill of
    prompts of different lengths writes padding behind the shorter ones, which their next tokens overwrite. A layer with
    a `window` keeps a ring of that many slots, in which a token takes the place of the one that it no longer sees.

    Args:
        cache: `scope.cache` of the call before, or None at the first.
        index: int32 tensor `[R]`, how many tokens each row has in the cache already.
        length: int or scalar int tensor, `L`, the slots of a row: the most tokens that it may come to.
        num_tokens: int32 tensor `[R]`, how many of the tokens of a first call are real, the others being padding behind
            them; None for all. Rings need it: they keep the last ones.

    Attributes:
        cache: after the call, a nest of tensors to hand to the next scope: `cache["self"]` holds what grows,
            `cache["cross"]` what does not, and, after `widen`, `cache["region"]` says where a row's tokens lie.

    Raises:
        ValueError: where it can be known (not in graphs), if tokens do not fit into `length` or a new cache does not
            start at `index` 0; if other layers are called than in the call before.

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

    def __init__(self, cache: dict | None, index, length, num_tokens=None):
        self._old = cache or {"self": {}, "cross": {}}
        self._calls = {"self": 0, "cross": 0}
        self.cache = {**self._old, "self": {}, "cross": {}}
        self.index = ops.convert_to_tensor(index, "int32")
        self.length = length
        self.num_tokens = num_tokens
        if len(self.index.shape) != 1:
            raise ValueError(f"`index` must have one entry per row, shape [R]; got shape {tuple(self.index.shape)}.")

    def __exit__(self, kind_of_error, *details):
        super().__exit__(kind_of_error, *details)
        for kind, entries in self._old.items():
            if kind_of_error is None and kind in self._calls and self._calls[kind] < len(entries):
                raise ValueError(
                    f"A cache serves one model, whose layers are called in the same order every time; got "
                    f"{self._calls[kind]} calls where the cache holds {sorted(entries)}."
                )

    @staticmethod
    def widen(cache, width, length):
        """A cache of `B` rows for `R = B * width` rows, which start as copies of them.

        Nothing is copied: the rows of a group share one stretch of `width` regions of `length` slots each, a row writes
        into a region of its own, and `cache["region"]` (int32 `[R, L]`) names the region in which each of its tokens
        lies, at first 0. So a beam search reorders rows by reordering these names: see `reorder`.
        """

        def regions(tensor):
            return ops.pad(tensor, [[0, 0], [0, 0], [0, (width - 1) * ops.shape(tensor)[2]], [0, 0]])

        if not cache["self"]:
            return cache
        grown = keras.tree.map_structure(regions, cache["self"])
        batch = ops.shape(keras.tree.flatten(grown)[0])[0]
        return {**cache, "self": grown, "region": ops.zeros((batch * width, length), dtype="int32")}

    @staticmethod
    def reorder(cache, rows):
        """A widened cache in which row `r` goes on from what row `rows[r]`, of the same group, had written."""
        return {**cache, "region": ops.take(cache["region"], rows, axis=0)} if "region" in cache else cache

    @staticmethod
    def repeat(cache, times):
        """A cache of `B` rows for `R = B * times` rows, which start as copies of them and are never reordered."""
        return {**cache, "self": keras.tree.map_structure(lambda t: ops.repeat(t, times, axis=0), cache["self"])}

    def positions(self, num_tokens):
        """int32 `[R, T]`: where the new tokens stand in their rows."""
        return self.index[:, None] + ops.arange(num_tokens, dtype="int32")[None]

    def append(self, layer, key, value, window=None):
        """Writes the keys and values of new tokens, `[R, T, K, H]`, of a layer that looks `window` positions far.

        Returns:
            None in the first call, before which there is nothing; later (keys, values, visible, distances): of all
            tokens that are kept, `[G, K, W L, H]` (`G` groups of `W` rows; `W` is 1 if not widened), which of them each
            new token may look at, bool `[R, 1, T, W L]`, and how far behind it they stand, int32 `[R, T, W L]`.
        """
        self._check_room(key)
        name = self._entry("self", layer)
        key, value = (ops.transpose(new, (0, 2, 1, 3)) for new in (key, value))  # [R, K, T, H]
        rows, _, tokens, _ = ops.shape(key)
        size = self.length if window is None else _least(window, self.length)  # slots of a row
        if name not in self._old["self"]:
            self.cache["self"][name] = tuple(self._first(new, size) for new in (key, value))
            return None

        if window is not None and tokens != 1:
            raise ValueError(f"A layer with a `window` goes on from its cache one token at a time; got {key.shape[2]}.")
        old = self._old["self"][name]
        width = shared_by(rows, ops.shape(old[0])[0])
        slots, positions = ops.arange(size, dtype="int32"), self.positions(tokens)
        held = _held(slots, positions[:, -1:], size)  # [R, L], the position that a slot holds; below 0 for none
        visible = ops.logical_and((held >= 0)[:, None], held[:, None] <= positions[:, :, None])  # [R, T, L]
        distances = held[:, None] - positions[:, :, None]
        own = ops.arange(rows, dtype="int32") % width
        if "region" in self._old:
            places = ops.arange(self.length, dtype="int32")
            is_new = ops.logical_and(places >= self.index[:, None], places < self.index[:, None] + tokens)
            region = ops.where(is_new, own[:, None], self._old["region"])  # [R, L]
            self.cache["region"] = region
            region = region if window is None else ops.take_along_axis(region, ops.maximum(held, 0), axis=1)
            is_there = region[:, None, None] == ops.arange(width, dtype="int32")[:, None]  # [R, 1, W, L]
            shape = rows, tokens, width * size
            visible = ops.reshape(ops.logical_and(visible[:, :, None], is_there), shape)
            distances = ops.reshape(ops.repeat(distances[:, :, None], width, axis=2), shape)
        self.cache["self"][name] = tuple(
            _written(to, new, positions % size + (own * size)[:, None], width) for to, new in zip(old, (key, value))
        )
        return *self.cache["self"][name], visible[:, None], distances

    def _first(self, new, size):
        """What a row keeps of its first tokens, `[R, K, T, H]`: all of them, or the last ones in a ring."""
        tokens = ops.shape(new)[2]
        if size is self.length:
            return ops.pad(new, [[0, 0], [0, 0], [0, size - tokens], [0, 0]])
        rows = ops.shape(new)[0]
        last = ops.full((rows,), tokens) if self.num_tokens is None else ops.convert_to_tensor(self.num_tokens)
        held = _held(ops.arange(size, dtype="int32"), ops.cast(last, "int32")[:, None] - 1, size)
        return ops.take_along_axis(new, ops.maximum(held, 0)[:, None, :, None], axis=2)

    def keep(self, layer, compute):
        """What `compute()` gave in `layer`'s first call: keys and values `[B, S, K, H]`; kept as `[B, K, S, H]`."""
        name = self._entry("cross", layer)
        kept = self._old["cross"].get(name)
        if kept is None:
            kept = tuple(ops.transpose(tensor, (0, 2, 1, 3)) for tensor in compute())
        self.cache["cross"][name] = kept
        return kept

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
        tokens, index, length = key.shape[1], concrete(self.index), concrete(self.length)
        if index is None or length is None:  # in a graph, where the scatter itself refuses on CPU
            return
        most = int(index.max(initial=0))
        if most and not self._old["self"]:
            raise ValueError(f"A new cache starts at `index` 0; got {most}.")
        if tokens is not None and most + tokens > length:
            raise ValueError(
                f"A cache of `length` slots must hold every token; got length {length} for "
                f"{tokens} new tokens after {most} cached ones."
            )


def _least(a, b):
    return min(a, b) if isinstance(b, int) else ops.minimum(a, b)


def _held(slots, last, size):
    """The last position, up to `last`, that a ring of `size` slots puts into each of them; below 0 for none."""
    return last - (last - slots) % size


def _written(to, new, slots, width):
    """Keys or values `[G, K, W L, H]`, with those of new tokens, `[R, K, T, H]`, in slots `[R, T]` of their groups."""
    rows, heads, tokens, size = ops.shape(new)
    group, head = ops.arange(rows, dtype="int32") // width, ops.arange(heads, dtype="int32")
    where = [ops.broadcast_to(i, (rows, heads, tokens)) for i in (group[:, None, None], head[:, None], slots[:, None])]
    return ops.scatter_update(to, ops.reshape(ops.stack(where, axis=-1), (-1, 3)), ops.reshape(new, (-1, size)))


class AttentionMaps(_Scope, dict):
    """Collects the attention weights of every attention layer called inside it, also in nested models.

    A dict from the layer's path (`"decoder_block_1/cross_attention"`) to its weights `[B, N, T, S]`, in the order of
    the calls; a layer called again adds `" (2)"` to its path. Acts on direct calls, `model(x)`, not on `predict`.

    Attributes:
        cross: list of the paths of cross-attention layers.

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

    def __init__(self):
        super().__init__()
        self.cross = []

    def collect(self, layer, weights, is_cross):
        """Adds `weights` under `layer`'s path."""
        path = layer.path or layer.name
        times = 1 + sum(name == path or name.startswith(path + " (") for name in self)
        path = path if times == 1 else f"{path} ({times})"
        self[path] = weights
        if is_cross:
            self.cross.append(path)
