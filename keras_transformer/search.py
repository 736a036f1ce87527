"""How `greedy`, `sample` and `beam` work: a search is a state, and a step that writes a token behind every row of it.

Letters: `B` prompts, `P` tokens of the longest prompt, `L` longest output, `V` vocabulary, `K` beams, `n` outputs of a
prompt, `R` rows: `B`, and `B K` or `B n` once each prompt has several.
"""

import keras
import numpy as np
from keras import ops

from keras_transformer.checks import (
    check_count,
    check_ids,
    check_numbers,
    check_prompts,
    check_range,
    check_rows,
    concrete,
)
from keras_transformer.filters import Written, forbid, is_one_of, least_length, threshold
from keras_transformer.noise import random_bits, uniform


def right_padded(ids, pad_id):
    """Moves padding `[B, P]` behind a row's tokens; returns the ids and how many of them are tokens, int32 `[B]`."""
    columns = ops.shape(ids)[1]
    is_pad = ops.cast(ids == pad_id, "int32")
    order = ops.argsort(is_pad * columns + ops.arange(columns, dtype="int32"), axis=1)
    return ops.take_along_axis(ids, order, axis=1), columns - ops.sum(is_pad, axis=1)


def _left_padded(ids, lengths):
    """Moves the padding of right-padded ids `[B, P]` before a row's tokens."""
    columns = ops.shape(ids)[1]
    order = (ops.arange(columns, dtype="int32") + lengths[:, None]) % columns
    return ops.take_along_axis(ids, order, axis=1)


def take_columns(tensor, columns):
    """`[B, C, F]` and int `[B, T]` -> `[B, T, F]`; Keras's `take_along_axis` does not take a batch of none."""
    batch, size, features = ops.shape(tensor)
    rows = ops.arange(batch, dtype="int32")[:, None] * size + columns
    return ops.take(ops.reshape(tensor, (batch * size, features)), rows, axis=0)


class PlainStep:
    """A step that is a function: what becomes of its cache when rows are copied and reordered."""

    def __init__(self, step):
        self.step = step

    def __call__(self, tokens, index, cache):
        logits, cache = self.step(tokens, index, cache)
        return logits, () if cache is None else cache  # TensorFlow's loop carries no None

    def repeat(self, cache, times):
        return keras.tree.map_structure(lambda tensor: ops.repeat(tensor, times, axis=0), cache)

    widen = repeat

    def reorder(self, cache, rows):
        return keras.tree.map_structure(lambda tensor: ops.take(tensor, rows, axis=0), cache)


class Search:
    """What all searches share: the prompts go in at once, then each step writes a token behind every row.

    A state is a dict of tensors, which a `while_loop` carries, or which somebody looks at between two steps.
    """

    def __init__(self, max_length, min_length=0, end_id=3, pad_id=0, filters=(), forbidden_ids=()):
        self.max_length = check_numbers("max_length", max_length, least=1)
        self.min_length = check_numbers("min_length", min_length, least=0)
        known = concrete(max_length)
        self.room = ops.max(self.max_length, initial=1) if known is None else int(known.max(initial=1))  # L
        self.end_ids = [end_id] if np.isscalar(end_id) else list(end_id)
        self.pad_id = pad_id
        self.filters = [*filters, forbid([pad_id, *forbidden_ids])]
        if pad_id in self.end_ids:
            raise ValueError(f"An end must not be `pad_id`, which is no token; got {self.end_ids} and {pad_id}.")
        if isinstance(self.max_length, int) and isinstance(self.min_length, int) and self.min_length > self.max_length:
            raise ValueError(f"`min_length` must be at most `max_length`; got {min_length} and {max_length}.")

    def run(self, step, prompt):
        """The whole search."""
        step = step if all(hasattr(step, name) for name in ("repeat", "widen", "reorder")) else PlainStep(step)
        state = self.begin(step, prompt)
        return self.found(ops.while_loop(self.unfinished, lambda state: self.advance(step, state), state))

    def begin(self, step, prompt):
        """Runs the prompts, all at once, and writes the first token of each row."""
        prompt = check_ids("prompt", prompt)
        batch = ops.shape(prompt)[0]
        prompt, lengths = right_padded(prompt, self.pad_id)
        check_prompts(lengths)
        logits, cache = step(prompt, ops.zeros_like(lengths), None)
        logits = take_columns(logits, ops.maximum(lengths - 1, 0)[:, None])[:, 0]  # behind the last token
        limit = ops.broadcast_to(ops.convert_to_tensor(self.max_length, "int32"), (batch,))
        least = ops.broadcast_to(ops.convert_to_tensor(self.min_length, "int32"), (batch,))
        empty = ops.full((batch, self.room), self.pad_id, dtype="int32")
        rows = {
            # [R, P + L]; the prompts end in column P - 1
            "tokens": ops.concatenate([_left_padded(prompt, lengths), empty], axis=1),
            "index": lengths,  # [R], where the next token stands
            "limit": limit,  # [R], most tokens to write
            "least": least,  # [R], fewest
        }
        state, logits, cache = self._spread(step, rows, logits, cache)
        return self._write(step, {**state, "count": ops.convert_to_tensor(0, "int32")}, logits, cache)

    def advance(self, step, state):
        """Runs the tokens written last, and writes the next."""
        logits, cache = step(state["token"][:, None], state["index"], state["cache"])
        return self._write(step, {**state, "index": state["index"] + 1}, logits[:, -1], cache)

    def unfinished(self, state):
        """Whether there is anything left to write."""
        return ops.logical_not(ops.all(state["done"]))

    def _log_probs(self, state, logits):
        """Log-probabilities of the next tokens, `[R, V]`, -inf for those that may not be written."""
        log_probs = ops.log_softmax(ops.cast(logits, "float32"))
        start = ops.shape(state["tokens"])[1] - self.room
        written = Written(state["tokens"], start, state["count"], self.pad_id)
        has_least = not isinstance(self.min_length, int) or self.min_length > 1
        least = [least_length(self.end_ids, state["least"])] if has_least else []
        for filtered in (*self.filters, *least):
            log_probs = filtered(log_probs, written)
        return log_probs

    def _append(self, state, tokens, token):
        """`tokens` `[R, P + L]` with `token` `[R]` in the next column."""
        columns = ops.shape(tokens)[1]
        column = columns - self.room + state["count"]
        return ops.where(ops.arange(columns, dtype="int32") == column, token[:, None], tokens)

    def _output(self, tokens):
        """What was written: the last `L` columns."""
        return tokens[:, ops.shape(tokens)[1] - self.room :]


class Sampling(Search):
    """`sample`, and at temperature 0 `greedy`, for those who look on between two steps."""

    def __init__(self, max_length, n=1, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, **task):
        super().__init__(max_length, **task)
        self.n = check_count("n", n)
        self.temperature = check_range("temperature", temperature, 0)
        self.top_k = check_numbers("top_k", top_k, least=0)
        self.top_p = check_range("top_p", top_p, 0, 1, above=True)
        self.min_p = check_range("min_p", min_p, 0, 1)
        self.seed = check_numbers("seed", seed, least=-(2**31))

    def _spread(self, step, state, logits, cache):
        """`n` rows for each prompt."""
        batch = ops.shape(logits)[0]
        seed = ops.convert_to_tensor(self.seed, "int32")
        if len(seed.shape):
            check_rows("seed", seed, batch)
        seed = seed if len(seed.shape) else random_bits(seed, ops.arange(batch, dtype="int32"))
        seed = ops.reshape(random_bits(seed[:, None], ops.arange(self.n, dtype="int32")), (-1,))
        if self.n > 1:
            state, logits = keras.tree.map_structure(lambda t: ops.repeat(t, self.n, axis=0), (state, logits))
            cache = step.repeat(cache, self.n)
        rows = ops.shape(logits)[0]
        start = {"seed": seed, "score": ops.zeros((rows,), "float32"), "done": ops.zeros((rows,), "bool")}
        return {**state, **start}, logits, cache

    def _write(self, step, state, logits, cache):
        log_probs = self._log_probs(state, logits)
        token = self._choose(log_probs, state)
        token_score = ops.take_along_axis(log_probs, token[:, None], axis=1)[:, 0]
        score = state["score"] + ops.where(state["done"], 0.0, token_score)
        token = ops.where(state["done"], self.pad_id, token)
        count = state["count"] + 1
        is_last = is_one_of(token, self.end_ids) | (count >= state["limit"]) | (token_score == -np.inf)
        return {
            **state,
            "cache": cache,
            "token": token,
            "tokens": self._append(state, state["tokens"], token),
            "score": score,
            "done": state["done"] | is_last,
            "count": count,
        }

    def _choose(self, log_probs, state):
        best = ops.cast(ops.top_k(log_probs, 1)[1][:, 0], "int32")  # Keras's argmax takes four times as long
        if isinstance(self.temperature, float) and self.temperature == 0:
            return best
        is_greedy = ops.equal(self.temperature, 0.0)
        scaled = log_probs / ops.where(is_greedy, 1.0, self.temperature)
        lowest = threshold(scaled, self.top_k, self.top_p, self.min_p)
        probs = ops.exp(scaled - ops.max(scaled, axis=-1, keepdims=True, initial=-np.inf))
        sums = ops.cumsum(ops.where(scaled >= lowest, probs, 0.0), axis=-1)  # [R, V]
        drawn = uniform(state["seed"], state["count"])[:, None] * sums[:, -1:]
        is_above = ops.logical_and(sums > drawn, probs > 0)
        first = ops.cast(ops.argmax(is_above, axis=-1), "int32")
        return ops.where(ops.logical_or(is_greedy, ops.logical_not(ops.any(is_above, axis=-1))), best, first)

    def found(self, state):
        """The outputs, as `sample` returns them."""
        could_go_on = state["score"] > -np.inf
        ids = ops.where(could_go_on[:, None], self._output(state["tokens"]), self.pad_id)
        length = ops.sum(ops.cast(ids != self.pad_id, "int32"), axis=-1)
        shape = (-1, self.n)
        return {
            "ids": ops.reshape(ids, (*shape, ops.shape(ids)[1])),
            "score": ops.reshape(state["score"], shape),
            "length": ops.reshape(length, shape),
        }


class Beam(Search):
    """`beam`."""

    def __init__(self, max_length, width=4, n=1, length_penalty=0.6, **task):
        super().__init__(max_length, **task)
        self.width, self.n = check_count("width", width), check_count("n", n)
        self.length_penalty = check_range("length_penalty", length_penalty, 0)
        if self.n > self.width:
            raise ValueError(f"`n` must be at most `width`; got {n} and {width}.")

    def _spread(self, step, state, logits, cache):
        """`width` rows for each prompt, of which the first is alive."""
        batch = ops.shape(logits)[0]
        state, logits = keras.tree.map_structure(lambda t: ops.repeat(t, self.width, axis=0), (state, logits))
        is_first = ops.arange(self.width) == 0
        none = ops.full((batch, self.n), -np.inf, dtype="float32")
        best = {  # what has ended, best first
            "rank": none,
            "score": none,
            "length": ops.zeros((batch, self.n), "int32"),
            "ids": ops.full((batch, self.n, self.room), self.pad_id, dtype="int32"),
        }
        start = {
            "live": ops.broadcast_to(ops.where(is_first, 0.0, -np.inf), (batch, self.width)),  # scores, -inf: no row
            "best": best,
            "done": ops.zeros((batch,), "bool"),
        }
        return {**state, **start}, logits, step.widen(cache, self.width)

    def _write(self, step, state, logits, cache):
        batch, count = ops.shape(state["live"])[0], state["count"] + 1
        each = min(self.width, logits.shape[-1] or self.width)  # of each row, as many as may be kept in all
        log_probs, candidates = ops.top_k(self._log_probs(state, logits), each)  # [R, each]
        sums = ops.reshape(state["live"], (-1, 1)) + log_probs
        score, place = ops.top_k(ops.reshape(sums, (batch, self.width * each)), self.width)  # [B, K]
        place = place + ops.arange(batch, dtype=place.dtype)[:, None] * (self.width * each)
        token = ops.cast(ops.take(ops.reshape(candidates, (-1,)), ops.reshape(place, (-1,))), "int32")
        parents = ops.reshape(place // each, (-1,))
        tokens = self._append(state, ops.take(state["tokens"], parents, axis=0), token)

        limit = ops.reshape(state["limit"], (batch, self.width))[:, :1]
        leaves = ops.reshape(is_one_of(token, self.end_ids), (batch, self.width)) | (count >= limit)
        enters = leaves & ops.logical_not(state["done"])[:, None]
        best = self._ranked(state["best"], ops.where(enters, score, -np.inf), count, self._output(tokens))
        live = ops.where(leaves, -np.inf, score)
        most = ops.max(live, axis=1, initial=-np.inf) / self._penalty(limit[:, 0])  # the highest rank to come
        return {
            **state,
            "cache": step.reorder(cache, parents),
            "token": token,
            "tokens": tokens,
            "live": live,
            "best": best,
            "done": state["done"] | (best["rank"][:, -1] >= most),
            "count": count,
        }

    def _penalty(self, length):
        return ((5.0 + ops.cast(length, "float32")) / 6.0) ** self.length_penalty

    def _ranked(self, best, score, length, ids):
        """The `n` best of those so far and of `width` more, with scores `[B, K]` and ids `[B K, L]`."""
        more = {
            "rank": score / self._penalty(length),
            "score": score,
            "length": ops.broadcast_to(length, ops.shape(score)),
            "ids": ops.reshape(ids, (-1, self.width, ops.shape(ids)[1])),
        }
        both = {name: ops.concatenate([best[name], more[name]], axis=1) for name in best}
        rank, place = ops.top_k(both["rank"], self.n)
        rows = {name: ops.take_along_axis(both[name], place, axis=1) for name in ("score", "length")}
        ids = ops.take_along_axis(both["ids"], place[:, :, None], axis=1)
        return {"rank": rank, "ids": ids, **rows}

    def found(self, state):
        """The outputs, as `beam` returns them."""
        best, exists = state["best"], state["best"]["rank"] > -np.inf
        return {
            "ids": ops.where(exists[:, :, None], best["ids"], self.pad_id),
            "score": best["score"],
            "length": ops.where(exists, best["length"], 0),
        }
