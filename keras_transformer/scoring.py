"""From the products of queries and keys to scores: soft cap, biases, and which keys a query may look at.

For all scores, or for a block of them: what depends on positions alone (the triangle, the window, biases by distance)
is made for the block that is asked for, the rest is cut to it. Letters: `B` batch, `T` queries, `S` keys, `N` heads,
`K` kv heads, `H` head size; `t`, `s` queries and keys of a block, which begins `at` (row, head, query, key).
"""

import copy
import math

import keras
from keras import ops
from keras.src.backend.common.symbolic_scope import in_symbolic_scope

from keras_transformer.checks import check_count, check_range
from keras_transformer.masks import check_segments, combine_masks, four_axes

MASKED_SCORE = -(2.0**32) + 1  # far below any score; softmax is in float32, where it fits and its exponent is 0
WHOLE = (0, 0, 0, 0)


class Scoring:
    """How products `[B, N, T, S]` become scores. Arguments are as those of `dot_product_attention`.

    Args:
        lengths: (`T`, `S`), ints or, where they are unknown before run time, scalar int tensors.
        heads: int, `N`.
        masks: several, each as `four_axes` allows; None among them is left out.
    """

    def __init__(
        self,
        lengths,
        heads,
        masks=(),
        bias=None,
        distance_bias=None,
        causal=False,
        window=None,
        segments=None,
        soft_cap=None,
    ):
        known = [length if isinstance(length, int) else None for length in lengths]
        self.lengths = lengths
        self.masks = [four_axes(mask, *known, heads) for mask in masks if mask is not None]
        self.bias = None if bias is None else _check_bias(bias, *known, heads)
        self.distance_bias = None if distance_bias is None else _check_distance_bias(distance_bias, *known, heads)
        self.causal = bool(causal)
        self.window = None if window is None else check_count("window", window)
        self.segments = None if segments is None else check_segments(*segments, *known)
        self.soft_cap = None if soft_cap is None else check_range("soft_cap", soft_cap, 0, above=True)
        self.padding = (0, 0)

    def padded(self, queries, keys):
        """The same for tensors with as many queries and keys of padding behind."""

        def pad(mask):  # an axis of size 1 stands for all
            ends = (0 if size == 1 else end for size, end in zip(mask.shape[2:], (queries, keys)))
            return ops.pad(mask, [[0, 0], [0, 0], *([0, end] for end in ends)])

        new = copy.copy(self)
        new.padding = queries, keys
        new.masks = [pad(mask) for mask in self.masks]
        if self.bias is not None:
            new.bias = ops.pad(self.bias, [[0, 0], [0, 0], [0, queries], [0, keys]])
        if self.distance_bias is not None:
            new.distance_bias = ops.pad(self.distance_bias, [[0, 0], [queries, keys]])
        if self.segments is not None:
            new.segments = tuple(ops.pad(ids, [[0, 0], [0, end]]) for ids, end in zip(self.segments, (queries, keys)))
        return new

    def cap(self, products):
        """Products in float32, softly capped: Gemma 2 (2024), https://arxiv.org/abs/2408.00118, section 2."""
        products = ops.cast(products, keras.backend.result_type(products.dtype, "float32"))
        return products if self.soft_cap is None else ops.tanh(products / self.soft_cap) * self.soft_cap

    def uncap(self, gradient, capped):
        """The gradient of products from that of what was capped."""
        return gradient if self.soft_cap is None else gradient * (1 - ops.square(capped / self.soft_cap))

    def add_biases(self, scores, at=WHOLE):
        """Adds the biases to capped products `[b, n, t, s]`."""
        sizes = ops.shape(scores)
        if self.bias is not None:
            scores = scores + ops.cast(_cut(self.bias, at, sizes), scores.dtype)
        # where JAX only describes a graph, unknown sizes do not let themselves be compared, as slices do
        if self.distance_bias is not None and not in_symbolic_scope():
            _, head, i, j = at
            line = _cut(self.distance_bias, (head, self._line(i, j, sizes)), (sizes[1], sizes[2] + sizes[3] - 1))
            line = ops.maximum(ops.cast(line, scores.dtype), MASKED_SCORE)  # no -inf: a block may hold no other score
            scores = scores + from_diagonals(line, *sizes[2:])
        return scores

    def _line(self, i, j, sizes):
        """Where the distances of a block begin in `distance_bias`."""
        return j - i - sizes[-2] + self.padding[0] + self.lengths[0]

    def is_plain(self):
        """Whether nothing but the triangle of as many queries as keys decides."""
        is_square = not self.causal or self.lengths[0] == self.lengths[1]
        return is_square and not (self.masks or self.biases or self.segments or self.window or self.soft_cap)

    @property
    def biases(self):
        """The biases that there are."""
        return [bias for bias in (self.bias, self.distance_bias) if bias is not None]

    def given(self, biases):
        """The same with others in the place of `biases`."""
        new, biases = copy.copy(self), list(biases)
        new.distance_bias = None if self.distance_bias is None else biases.pop()
        new.bias = None if self.bias is None else biases.pop()
        return new

    def no_gradients(self, heads):
        """Zeros, to add gradients of `biases` to: of some heads of one row."""
        return [ops.zeros((heads, *ops.shape(bias)[len(bias.shape) // 2 :])) for bias in self.biases]

    def add_gradients(self, gradients, of_scores, i, j):
        """Adds what a block's gradient of scores `[n, t, s]` is to each of `biases`."""
        gradients = list(gradients)
        if self.distance_bias is not None:
            gradients[-1] = add_at(gradients[-1], (0, self._line(i, j, ops.shape(of_scores))), to_diagonals(of_scores))
        if self.bias is not None:
            gradients[0] = add_at(gradients[0], (0, i, j), of_scores)
        return gradients

    def visible(self, sizes, at=WHOLE):
        """Which keys of a block may be looked at: bool `[b or 1, n or 1, t or 1, s]`; None for all."""
        row, head, i, j = at
        found = [_cut(mask, at, sizes) for mask in self.masks]
        if self.bias is not None:  # -inf hides, too, and so does what comes near it
            found.append(ops.cast(_cut(self.bias, at, sizes), "float32") > MASKED_SCORE / 2)
        if self.segments is not None:
            queries, keys = (
                _cut(ids, (row, start), (sizes[0], size)) for ids, start, size in zip(self.segments, (i, j), sizes[2:])
            )
            found.append(queries[:, None, :, None] == keys[:, None, None])
        keys = j + ops.arange(sizes[3], dtype="int32")
        if self.causal or self.window is not None:
            queries = i + (self.lengths[1] - self.lengths[0]) + ops.arange(sizes[2], dtype="int32")
            distance = keys - queries[:, None]  # [t, s]
            if self.causal:
                found.append((distance <= 0)[None, None])
            if self.window is not None:
                found.append((ops.abs(distance) < self.window)[None, None])
        if not (isinstance(self.padding[1], int) and self.padding[1] == 0):
            found.append((keys < self.lengths[1])[None, None, None])
        return combine_masks(*found)

    def reach(self, start, size, queries=True):
        """The keys that `size` queries from `start` on can see by position, or else the queries that see such keys.

        Returns:
            (first, end), not cut to what there is.
        """
        shift = self.lengths[1] - self.lengths[0]
        start = start + shift if queries else start - shift
        back = ahead = None if self.window is None else self.window - 1
        if self.causal:
            back, ahead = (back, 0) if queries else (0, ahead)
        most = self.lengths[1 if queries else 0]
        return (0 if back is None else start - back), (most if ahead is None else start + size + ahead)


def scaled(query):
    """Queries divided by the root of their head size."""
    return query * ops.cast(1 / math.sqrt(query.shape[-1]), query.dtype)


def from_diagonals(line, queries, keys):
    """`[n, t + s - 1]` to `[n, t, s]`: query `q` and key `k` get entry `k - q + t - 1`.

    Rows that are all alike, read in rows that are shorter by one, move on by one from row to row.
    """
    heads = ops.shape(line)[0]
    line = ops.concatenate([line[:, queries - 1 :], line[:, :1], line[:, : queries - 1]], axis=1)  # [n, t + s]
    rows = ops.broadcast_to(line[:, None], (heads, queries, queries + keys))
    rows = ops.reshape(rows, (heads, queries * (queries + keys)))[:, : queries * (queries + keys - 1)]
    return ops.reshape(rows, (heads, queries, queries + keys - 1))[:, :, :keys]


def to_diagonals(block):
    """The transpose of `from_diagonals`: sums of the diagonals of `[n, t, s]`, `[n, t + s - 1]`."""
    heads, queries, keys = ops.shape(block)
    rows = ops.reshape(ops.pad(block, [[0, 0], [0, 0], [0, queries - 1]]), (heads, queries * (queries + keys - 1)))
    rows = ops.reshape(ops.pad(rows, [[0, 0], [0, queries]]), (heads, queries, queries + keys))
    line = ops.sum(rows, axis=1)
    return ops.concatenate([line[:, keys + 1 :], line[:, :keys]], axis=1)


def add_at(x, starts, part):
    """Adds `part` to `x` from `starts` on."""
    return ops.slice_update(x, starts, ops.slice(x, starts, ops.shape(part)) + part)


def _cut(tensor, at, sizes):
    """A block of a tensor, whose axes of size 1 stand for all."""
    whole = [size == 1 for size in tensor.shape]
    starts = [0 if one else start for one, start in zip(whole, at)]
    return ops.slice(tensor, starts, [1 if one else size for one, size in zip(whole, sizes)])


def _check_bias(bias, queries, keys, heads):
    shape, wanted = tuple(bias.shape), ("B or 1", f"{heads} or 1", queries or "T", keys or "S")
    is_float = keras.backend.is_float_dtype(keras.backend.standardize_dtype(bias.dtype))
    fits = (
        len(shape) == 4
        and shape[1] in (1, heads)
        and all(None in pair or pair[0] == pair[1] for pair in zip(shape[2:], (queries, keys)))
    )
    if not fits or not is_float:
        raise ValueError(
            f"`bias` must be floats {list(wanted)}; got {bias.dtype} of shape {list(shape)}.".replace("'", "")
        )
    return bias


def _check_distance_bias(bias, queries, keys, heads):
    shape = tuple(bias.shape)
    wanted = None if None in (queries, keys) else queries + keys - 1
    is_float = keras.backend.is_float_dtype(keras.backend.standardize_dtype(bias.dtype))
    if len(shape) != 2 or shape[0] != heads or None not in (wanted, shape[1]) and wanted != shape[1] or not is_float:
        raise ValueError(
            f"`distance_bias` must be floats [N, T + S - 1], here [{heads}, {wanted}]; "
            f"got {bias.dtype} of shape {list(shape)}."
        )
    return bias
