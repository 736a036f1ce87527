"""Attention a block of queries and keys at a time: exact, in memory that grows with the lengths, not their product.

Dao et al. 2022, "FlashAttention", https://arxiv.org/abs/2205.14135. Attention to each block of keys is merged into that
to the blocks before it by the logarithms of their sums of exponentials, and the backward pass computes the weights
again from the last of these.

Letters: `B` batch, `T` queries, `S` keys, `N` heads, `K` kv heads, `G = N / K` heads of each, `H` head size; `M = B K`
groups of heads, one of which is worked on at a time; `t`, `s` queries and keys of a block.
"""

import copy

import keras
from keras import ops

from keras_transformer.loops import each
from keras_transformer.noise import draw_state, weights_dropout
from keras_transformer.scoring import MASKED_SCORE, add_at, scaled

BLOCK = 2**18  # weights of a block: 1 MB in float32, which stay near the processor


def blockwise(query, key, value, scoring, dropout=0.0, seed=None):
    """Output `[B, T, N, H]` of attention by a `Scoring`: see `blockwise_attention`."""
    if keras.backend.backend() == "jax" and not dropout and scoring.is_plain():
        try:
            return ops.dot_product_attention(query, key, value, is_causal=scoring.causal, flash_attention=True)
        except (ImportError, NotImplementedError, RuntimeError, ValueError):
            pass  # Keras says so where the device, the dtype or the sizes have no flash kernel
    blocks = _Blocks(query, key, scoring, dropout, draw_state(seed) if dropout else None)

    @ops.custom_gradient
    def attention(query, key, value, *biases):
        group = blocks.given(biases)
        index = ops.arange(ops.shape(key)[0], dtype="int32")
        output, norms = _map(group.forward, group.no_output, index, query, key, value)

        def backward(*args, upstream=None):
            upstream = args[0] if upstream is None else upstream
            share = ops.sum(ops.cast(upstream, "float32") * ops.cast(output, "float32"), axis=-1, keepdims=True)
            groups = index, query, key, value, upstream, norms, share
            gradients = _map(group.backward, group.no_gradients, *groups)
            return *gradients[:3], *map(blocks.total, gradients[3:], biases)

        return output, backward

    query, key, value = blocks.split(scaled(query), 0), blocks.split(key, 1)[:, 0], blocks.split(value, 1)[:, 0]
    return blocks.join(attention(query, key, value, *blocks.scoring.biases))


class _Blocks:
    """Queries `[M, G, T, H]`, keys and values `[M, S, H]`, padded to whole blocks."""

    def __init__(self, query, key, scoring, dropout, state):
        self.batch, self.heads = ops.shape(query)[0], query.shape[2]
        self.kv_heads = key.shape[2]
        self.members = self.heads // self.kv_heads
        self.dropout, self.state, self.dtype = dropout, state, query.dtype
        side = int((BLOCK // self.members) ** 0.5)
        side = side if scoring.window is None else min(side, max(128, scoring.window))
        divisions = [_division(length, side) for length in scoring.lengths]
        self.numbers, self.sizes = zip(*divisions)  # of blocks of queries and of keys; t and s
        self.scoring = scoring.padded(*(n * size - length for (n, size), length in zip(divisions, scoring.lengths)))

    def split(self, x, side):
        """`[B, L, heads, H]` -> `[M, heads / K, L and padding, H]`; `side` is 0 for queries, 1 for keys."""
        x = ops.transpose(ops.pad(x, [[0, 0], [0, self.scoring.padding[side]], [0, 0], [0, 0]]), (0, 2, 1, 3))
        members = x.shape[1] // self.kv_heads
        return ops.reshape(x, (self.batch * self.kv_heads, members, *ops.shape(x)[2:]))

    def join(self, x):
        """`[M, G, T and padding, H]` -> `[B, T, N, H]`."""
        x = ops.reshape(x, (self.batch, self.heads, *ops.shape(x)[2:]))
        return ops.transpose(x, (0, 2, 1, 3))[:, : self.scoring.lengths[0]]

    def given(self, biases):
        """The same with other tensors for its biases, those whose gradients are asked for."""
        new = copy.copy(self)
        new.scoring = self.scoring.given(biases)
        return new

    def total(self, gradient, bias):
        """The sum of the groups' gradients `[M, G, ...]` of a bias."""
        gradient = ops.reshape(gradient, (self.batch, self.heads, *ops.shape(gradient)[2:]))
        if len(bias.shape) == 2:
            return ops.cast(ops.sum(gradient, axis=0), bias.dtype)
        shared = [axis for axis in (0, 1) if bias.shape[axis] == 1]
        return ops.cast(ops.sum(gradient, axis=shared, keepdims=True) if shared else gradient, bias.dtype)

    # the work on one group: queries [G, T, H], keys and values [S, H]

    def forward(self, index, query, key, value):
        """Output `[G, T, H]`, and `[G, T, 1]`, the logarithm of each query's sum of exponentials."""
        t, s = self.sizes

        def of_queries(i, outputs, norms):
            queries = _part(query, i, t)

            def merge(j, output, norm):
                _, scores = self._scores(index, i, j, queries, _part(key, j, s))
                weights = ops.softmax(scores, axis=-1)  # [G, t, s]
                new_norm = ops.max(scores, axis=-1, keepdims=True) - ops.log(ops.max(weights, axis=-1, keepdims=True))
                new = self._product(weights * self._kept(index, i, j), _part(value, j, s))
                merged = ops.logaddexp(norm, new_norm)
                return output * ops.exp(norm - merged) + new * ops.exp(new_norm - merged), merged

            nothing = ops.zeros((self.members, t, value.shape[-1])), ops.full((self.members, t, 1), MASKED_SCORE)
            output, norm = each(self._range(i, 0), merge, *nothing)
            somewhere = norm > MASKED_SCORE / 2
            output = ops.cast(ops.where(somewhere, output, 0.0), self.dtype)
            norm = ops.where(somewhere, norm, 0.0)  # 0: hidden scores have weights of 0 then
            return _add(outputs, i, output), _add(norms, i, norm)

        return each((0, self.numbers[0]), of_queries, *self.no_output(index, query, key, value))

    def no_output(self, index, query, key, value):
        """Zeros for what `forward` gives, of one group or of several."""
        lead = ops.shape(query)[:-1]
        return ops.zeros((*lead, value.shape[-1]), self.dtype), ops.zeros((*lead, 1))

    def backward(self, index, query, key, value, upstream, norms, share):
        """Gradients of queries, keys, values and of the biases that there are."""
        t, s = self.sizes

        def of_keys(j, of_query, of_key, of_value, *of_biases):
            keys, values = _part(key, j, s), _part(value, j, s)

            def of_block(i, of_query, of_keys, of_values, *of_biases):
                queries, errors = _part(query, i, t), _part(upstream, i, t)
                capped, scores = self._scores(index, i, j, queries, keys)
                weights = ops.exp(scores - _part(norms, i, t))  # [G, t, s]
                kept = self._kept(index, i, j)
                of_values += self._product_by_keys(weights * kept, errors)
                of_weights = self._product(errors, ops.transpose(values)) * kept
                of_scores = weights * (of_weights - _part(share, i, t))
                of_biases = self.scoring.add_gradients(of_biases, of_scores, i * t, j * s)
                of_scores = self.scoring.uncap(of_scores, capped)
                of_keys += self._product_by_keys(of_scores, queries)
                return _add(of_query, i, self._product(of_scores, keys)), of_keys, of_values, *of_biases

            zeros = ops.zeros((s, key.shape[-1])), ops.zeros((s, value.shape[-1]))
            results = each(self._range(j, 1), of_block, of_query, *zeros, *of_biases)
            return results[0], _add(of_key, j, results[1]), _add(of_value, j, results[2]), *results[3:]

        start = (ops.zeros(ops.shape(x)) for x in (query, key, value)), self.scoring.no_gradients(self.members)
        gradients = each((0, self.numbers[1]), of_keys, *start[0], *start[1])
        return *(ops.cast(x, self.dtype) for x in gradients[:3]), *gradients[3:]

    def no_gradients(self, index, query, key, value, *_):
        """What `backward` gives of no groups."""
        biases = (ops.zeros((0, *ops.shape(x))) for x in self.scoring.no_gradients(self.members))
        return *(ops.zeros_like(x) for x in (query, key, value)), *biases

    def _at(self, index, i, j):
        return index // self.kv_heads, index % self.kv_heads * self.members, i * self.sizes[0], j * self.sizes[1]

    def _scores(self, index, i, j, queries, keys):
        """Capped products, and what softmax takes: `[G, t, s]` both."""
        sizes, at = (1, self.members, *self.sizes), self._at(index, i, j)
        capped = self.scoring.cap(self._product(queries, ops.transpose(keys)))
        scores = self.scoring.add_biases(capped[None], at)
        visible = self.scoring.visible(sizes, at)
        if visible is not None:
            hide = lambda: ops.where(visible, scores, MASKED_SCORE)  # noqa: E731
            scores = ops.cond(ops.all(visible), lambda: scores, hide)
        return capped, scores[0]

    def _kept(self, index, i, j):
        sizes, at = (1, self.members, *self.sizes), self._at(index, i, j)
        return weights_dropout(self.state, self.dropout, sizes, at)[0] if self.dropout else 1.0

    def _product(self, rows, matrix):
        """`[G, t, a]` and `[a, b]` -> float32 `[G, t, b]`."""
        flat = ops.reshape(ops.cast(rows, self.dtype), (-1, ops.shape(rows)[-1]))
        flat = ops.cast(ops.matmul(flat, matrix), "float32")
        return ops.reshape(flat, (*ops.shape(rows)[:-1], ops.shape(matrix)[-1]))

    def _product_by_keys(self, weights, rows):
        """`[G, t, s]` and `[G, t, H]` -> float32 `[s, H]`, summed over queries."""
        weights = ops.reshape(ops.cast(weights, self.dtype), (-1, self.sizes[1]))
        product = ops.matmul(ops.transpose(weights), ops.reshape(rows, (-1, rows.shape[-1])))
        return ops.cast(product, "float32")

    def _range(self, block, side):
        """The blocks of keys that a block of queries can see by position (`side` 0); of queries that see keys (1)."""
        first, end = self.scoring.reach(block * self.sizes[side], self.sizes[side], side == 0)
        size, number = self.sizes[1 - side], self.numbers[1 - side]
        ends = (ops.convert_to_tensor(end, "int32") for end in (first // size, (end + size - 1) // size))
        return [ops.clip(end, 0, number) for end in ends]


def _division(length, most):
    """How many blocks of at most `most` (about) a length makes, and how many positions each holds, a multiple of 8."""
    number = (length + most - 1) // most
    number = max(1, number) if isinstance(number, int) else ops.maximum(1, number)
    size = (length + number - 1) // number
    size = (size + 7) // 8 * 8
    return number, max(8, size) if isinstance(size, int) else ops.maximum(8, size)


def _map(step, nothing, *groups):
    """`step` of each group; of none `nothing`, for TensorFlow cannot tell the shape of what it has never seen."""
    number = ops.shape(groups[0])[0]
    if isinstance(number, int):
        return ops.map(lambda one: step(*one), groups) if number else nothing(*groups)
    return ops.cond(number > 0, lambda: ops.map(lambda one: step(*one), groups), lambda: nothing(*groups))


def _part(x, i, size):
    """Block `i` of the positions of `[G, T, ...]` or `[S, H]`, which stand on the last axis but one."""
    starts, sizes = [0] * len(x.shape), list(ops.shape(x))
    starts[-2], sizes[-2] = i * size, size
    return ops.slice(x, starts, sizes)


def _add(x, i, part):
    """Adds `part` to block `i` of `x`."""
    starts = [0] * len(x.shape)
    starts[-2] = i * ops.shape(part)[-2]
    return add_at(x, starts, part)
