"""Searches: what to write, token by token, knowing a model only as `step(tokens, index, cache) -> (logits, cache)`.

`greedy`, `sample` and `beam` have fixed shapes and run in one `while_loop`, in eager mode, graphs, XLA and JAX. What
`step` is for a Keras model is in `generator.py`; how they work, in `search.py`.

Letters: `B` prompts, `P` tokens of the longest prompt, `L` longest output, `V` vocabulary, `K` beams, `n` outputs of a
prompt, `R` rows: `B`, and `B K` or `B n` once each prompt has several.
"""

from keras_transformer.search import Beam, Sampling


def greedy(step, prompt, max_length, min_length=0, end_id=3, pad_id=0, filters=()):
    """The most likely next token, over and over.

    Args:
        step: function `(tokens int32 [R, P or 1], index int32 [R], cache) -> (logits [R, P or 1, V], cache)`: the
            logits behind new tokens that stand in their rows at `index` and after; in each row one at least is finite.
            The first call gets the prompts, right-padded, and no cache (None).
        prompt: int32 tensor `[B, P]`, what each output continues; not part of the output. Prompts of different lengths
            are padded with `pad_id`, which is left out wherever it stands.
        max_length: int, the most tokens to write, the end among them; or int tensor, scalar or `[B]` (then `L` is the
            most of them).
        min_length: int or int tensor, scalar or `[B]`, the fewest tokens to write, the end among them.
        end_id: int or sequence of ints, the tokens that end a row.
        pad_id: int, what stands behind the end. It is never written, being no token.
        filters: sequence of functions `(log_probs [R, V], written) -> log_probs` that say what may be written; see
            `keras_transformer.filters`.

    Returns:
        A dict of `ids` int32 `[B, 1, L]`, `score` float32 `[B, 1]` (the sum of the log-probabilities of the tokens
        written, as filters left them, in nats) and `length` int32 `[B, 1]` (how many, the end among them). A row that
        no token may follow has length 0 and the score -inf.

    Raises:
        ValueError: on a length below 1, an end that is the padding, or a prompt that is padding alone.

    Example:
    ```python
    import keras
    import numpy as np
    import keras_transformer as kt
    def count_up(tokens, index, cache):  # after id i comes i + 1
        return 20.0 * keras.ops.one_hot(tokens + 1, 8), cache
    found = kt.greedy(count_up, prompt=np.array([[4], [5]]), max_length=4, end_id=7)
    assert np.array(found["ids"]).tolist() == [[[5, 6, 7, 0]], [[6, 7, 0, 0]]]
    ```
    """
    task = {"min_length": min_length, "end_id": end_id, "pad_id": pad_id, "filters": filters}
    return Sampling(max_length, temperature=0.0, **task).run(step, prompt)


def sample(
    step,
    prompt,
    max_length,
    n=1,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    seed=0,
    min_length=0,
    end_id=3,
    pad_id=0,
    filters=(),
):
    """Draws each next token from its probabilities.

    The same seed draws the same tokens, in eager mode, graphs, XLA and SavedModels; a row's draws do not depend on the
    other rows.

    Args:
        step, prompt, max_length, min_length, end_id, pad_id, filters: as `greedy`.
        n: int, how many outputs to draw for each prompt.
        temperature: float or scalar tensor, what log-probabilities are divided by; 0 for the most likely token.
        top_k, top_p, min_p: which tokens may be drawn; see `keras_transformer.filters.threshold`. They look at the
            probabilities at this temperature.
        seed: int or int tensor, scalar or `[B]`: one for each row, or one from which each row's is made.

    Returns:
        A dict as `greedy`'s, with `n` outputs a row in place of 1. The score is at temperature 1, of all tokens.

    Raises:
        ValueError: as `greedy`; on a temperature below 0, `top_k` below 0, `top_p` outside (0, 1] or `min_p` outside
            [0, 1].

    Example:
    ```python
    import keras
    import numpy as np
    import keras_transformer as kt
    logits = np.array([0, 0, 0, 0, 1, 2, 3], "float32")
    def step(tokens, index, cache):  # the same wherever it stands
        return keras.ops.take(logits, 0 * tokens[..., None] + np.arange(7)), cache
    found = kt.sample(step, prompt=np.array([[2]]), max_length=5, n=3, top_k=2, seed=1)
    assert found["ids"].shape == (1, 3, 5) and set(np.unique(found["ids"])) == {5, 6}
    ```
    """
    task = {"min_length": min_length, "end_id": end_id, "pad_id": pad_id, "filters": filters}
    return Sampling(max_length, n, temperature, top_k, top_p, min_p, seed, **task).run(step, prompt)


def beam(
    step,
    prompt,
    max_length,
    width=4,
    n=1,
    length_penalty=0.6,
    min_length=0,
    end_id=3,
    pad_id=0,
    filters=(),
):
    """Beam search: at each step the `width` most likely continuations of a row are kept; those that end leave the beam.

    Outputs are ranked by `score / ((5 + length) / 6) ** length_penalty`, each with its own length (Wu et al. 2016,
    https://arxiv.org/abs/1609.08144, equation 14); what has not ended at `max_length` is ranked as it is. The search of
    a row stops when nothing in its beam can rank higher any more, which changes no output. A width of 1 is `greedy`.

    Args:
        step: as `greedy`. If it has methods `repeat(cache, times)` and `widen(cache, width)` (cache of `B` rows -> of
            `B width` rows, for `sample` and for `beam`) and `reorder(cache, rows)` (int32 `[R]`, which row of the same
            group each row goes on from), they are used; otherwise each tensor of the cache is gathered along its first
            axis.
        prompt, max_length, min_length, end_id, pad_id, filters: as `greedy`.
        width: int, `K`.
        n: int, how many outputs to return, at most `width`.
        length_penalty: float or scalar tensor of at least 0; 0 ranks by score.

    Returns:
        A dict as `greedy`'s, with the `n` best outputs of a row, best first, in place of 1. Where there are fewer, the
        others have length 0 and the score -inf.

    Raises:
        ValueError: as `greedy`; if `n` is above `width`; on a `length_penalty` below 0.

    Example:
    ```python
    import keras
    import numpy as np
    import keras_transformer as kt
    table = np.full((6, 6), -9.0, "float32")  # 4 or 5 may come first; 4 has many continuations, 5 ends
    table[2, 4], table[2, 5], table[5, 3] = 0.1, 0.0, 5.0
    def step(tokens, index, cache):
        return keras.ops.take(table, tokens, axis=0), cache
    start = np.array([[2]])
    assert np.array(kt.greedy(step, start, 2)["ids"][0, 0]).tolist() != [5, 3]
    assert np.array(kt.beam(step, start, 2, width=2)["ids"][0, 0]).tolist() == [5, 3]
    ```
    """
    task = {"min_length": min_length, "end_id": end_id, "pad_id": pad_id, "filters": filters}
    return Beam(max_length, width, n, length_penalty, **task).run(step, prompt)
