"""Searches on steps made by hand: against brute force, plain Python and the probabilities asked for."""

import functools

import keras
import numpy as np
import pytest
from keras import ops

import keras_transformer as kt
from keras_transformer import filters, noise

BACKEND = keras.backend.backend()
VOCAB, LENGTH, PAD, END = 6, 7, 0, 3
STATES = 4099
FACTORS = np.random.default_rng(1).integers(1, STATES, size=64).astype("int32")
PROMPTS = np.array([[1, 0], [4, 5]], "int32")
SEARCHES = {
    "greedy": kt.greedy,
    "sample": functools.partial(kt.sample, n=3, temperature=0.8, top_k=4, top_p=0.95, seed=5),
    "beam": functools.partial(kt.beam, width=3, n=2),
}
QUICK = {"compiler_options": {"xla_backend_optimization_level": 0}} if BACKEND == "jax" else {}  # to compile
tensorflow_only = pytest.mark.skipif(BACKEND != "tensorflow", reason="on JAX every graph is XLA's, for one shape")


def compiled(function, **options):
    """`function` as one graph: `tf.function` or `jax.jit`."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.function(function, **options)
    jax = pytest.importorskip("jax")
    return jax.jit(function, **options)


def run(search, step, prompt, *args, **options):
    """A search outside of any graph; on JAX, which compiles operations one by one there, in a graph of its own."""
    if BACKEND == "jax":
        return compiled(lambda prompt: search(step, prompt, *args, **options), **QUICK)(prompt)
    return search(step, prompt, *args, **options)


def tensor(array):
    return ops.convert_to_tensor(array, dtype=array.dtype)


def plain(found):
    return {name: np.asarray(value) for name, value in found.items()}


def assert_same(found, expected, rtol=1e-5):
    found, expected = plain(found), plain(expected)
    np.testing.assert_array_equal(found["ids"], expected["ids"])
    np.testing.assert_array_equal(found["length"], expected["length"])
    np.testing.assert_allclose(found["score"], expected["score"], rtol=rtol, atol=1e-5)


def log_softmax(logits):
    logits = np.asarray(logits, "float64")
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


# steps


def markov(table):
    """A step whose logits are the rows of its last tokens."""

    def step(tokens, index, cache):
        return ops.take(table, tokens, axis=0), cache

    return step


def hashed(table):
    """A step whose logits depend on all tokens so far and on where they stand: on a sum that its cache carries."""

    def step(tokens, index, cache):
        places = index[:, None] + ops.arange(ops.shape(tokens)[1], dtype="int32")
        sums = ops.cumsum(ops.cast(tokens, "int32") * ops.take(FACTORS, places, axis=0), axis=1)
        sums = (sums if cache is None else sums + cache["sum"][:, None]) % STATES
        return ops.take(table, sums, axis=0), {"sum": sums[:, -1]}

    return step


def table_of(rng, vocabulary=VOCAB, decimals=None, rows=STATES):
    table = rng.normal(size=(rows, vocabulary), scale=1.5).astype("float32")
    return table if decimals is None else table.round(decimals)


def chain(*tokens, vocabulary=12):
    """A table in which each token is followed by the next, for certain."""
    table = np.zeros((vocabulary, vocabulary), "float32")
    table[list(tokens[:-1]), list(tokens[1:])] = 20
    return table


def bigrams(probs, vocabulary=12):
    """A Markov table of probabilities `{token: {next token: p}}`; what they leave is shared by the other tokens."""
    table = np.full((vocabulary, vocabulary), 1 / vocabulary)
    for token, following in probs.items():
        rest = (1 - sum(following.values())) / (vocabulary - len(following))
        table[token] = [following.get(i, rest) for i in range(vocabulary)]
    return np.log(np.maximum(table, 1e-9)).astype("float32")


def counting(step):
    """`step`, and what it was called with, in order: lists of `(tokens, index)`."""
    calls = []

    def note(tokens, index):
        calls.append((np.asarray(tokens).tolist(), np.asarray(index).tolist()))

    def counted(tokens, index, cache):
        if BACKEND == "jax":
            import jax

            jax.debug.callback(note, tokens, index)
        else:
            note(tokens, index)
        return step(tokens, index, cache)

    def ran():
        if BACKEND == "jax":
            import jax

            jax.effects_barrier()
        return sorted(calls, key=lambda call: call[1])

    return counted, ran


# the same in Python


def following(table, prompt, edits=()):
    """A function of written ids: the log-probabilities behind them, as `hashed` has them."""
    prompt, log_probs = [int(token) for token in prompt if token != PAD], log_softmax(table)

    def follow(ids):
        state = sum(int(factor) * token for factor, token in zip(FACTORS, [*prompt, *ids])) % STATES
        behind = log_probs[state].copy()
        for edit in edits:
            behind = edit(behind, prompt, ids)
        behind[PAD] = -np.inf
        return behind

    return follow


def every_output(follow, max_length, ids=()):
    """All that may be written behind `ids`: pairs of ids and score."""
    for token, log_prob in enumerate(follow(ids)):
        if log_prob == -np.inf:
            continue
        if token == END or len(ids) + 1 == max_length:
            yield [*ids, token], log_prob
        else:
            for output, score in every_output(follow, max_length, (*ids, token)):
                yield output, log_prob + score


def ranked(outputs, n, length_penalty):
    def rank(output):
        return output[1] / ((5 + len(output[0])) / 6) ** length_penalty

    return sorted(outputs, key=rank, reverse=True)[:n]


def plain_beam(follow, max_length, width, n=1, length_penalty=0.6, end_ids=(END,)):
    """`beam` in Python, run to the very end: the `n` best pairs of ids and score."""
    live, ended = [([], 0.0)], []
    for length in range(1, max_length + 1):
        more = [([*ids, i], score + p) for ids, score in live for i, p in enumerate(follow(ids)) if p > -np.inf]
        best = sorted(more, key=lambda output: output[1], reverse=True)[:width]
        live = [output for output in best if output[0][-1] not in end_ids and length < max_length]
        ended += [output for output in best if output not in live]
    return ranked(ended, n, length_penalty)


def stacked(outputs, n, max_length):
    """Lists of pairs of ids and score, one for each prompt, as a search returns them."""
    found = {
        "ids": np.full((len(outputs), n, max_length), PAD),
        "score": np.full((len(outputs), n), -np.inf),
        "length": np.zeros((len(outputs), n), int),
    }
    for row, best in enumerate(outputs):
        for i, (ids, score) in enumerate(best):
            found["ids"][row, i, : len(ids)] = ids
            found["score"][row, i], found["length"][row, i] = score, len(ids)
    return found


def plain_beams(table, prompts, max_length, width, n=1, length_penalty=0.6, edits=(), end_ids=(END,)):
    rows = [
        plain_beam(following(table, prompt, edits), max_length, width, n, length_penalty, end_ids) for prompt in prompts
    ]
    return stacked(rows, n, max_length)


# greedy


@pytest.mark.parametrize("decimals", [None, 0], ids=["any", "ties"])
def test_greedy_is_a_plain_loop_over_a_table_of_prefixes(rng, decimals):
    search, lengths = compiled(lambda table: kt.greedy(hashed(table), PROMPTS, LENGTH)), set()
    for _ in range(100):
        table = table_of(rng, decimals=decimals)
        found = search(table)
        assert_same(found, plain_beams(table, PROMPTS, LENGTH, width=1))
        lengths |= set(np.asarray(found["length"]).ravel().tolist())
    assert lengths == set(range(1, LENGTH + 1))


@pytest.mark.parametrize("search", SEARCHES)
def test_behind_the_end_is_only_padding_and_the_length_counts_the_end(rng, search, end_id=0, pad_id=5):
    table = table_of(rng, 12, rows=12)
    table[:, end_id] += 1
    table[:, pad_id] = 9
    prompt = np.array([[i] for i in range(12) if i != pad_id], "int32")
    found = plain(run(SEARCHES[search], markov(table), prompt, LENGTH, end_id=end_id, pad_id=pad_id))
    assert len(set(found["length"].ravel())) > 2
    for ids, length in zip(found["ids"].reshape(-1, LENGTH), found["length"].ravel()):
        assert np.all(ids[length:] == pad_id) and pad_id not in ids[:length] and end_id not in ids[: length - 1]
        assert length == LENGTH or ids[length - 1] == end_id


def test_it_stops_when_the_last_row_has_ended():
    step, ran = counting(markov(chain(4, 5, 6, 7, 3)))
    found = plain(run(kt.greedy, step, np.array([[6], [4]]), max_length=50))
    assert found["length"].tolist() == [[2], [4]]
    assert [index for _, index in ran()] == [[0, 0], [1, 1], [2, 2], [3, 3]]


def test_without_an_end_it_writes_max_length_tokens():
    step, ran = counting(markov(chain(4, 5, 6, 4)))
    found = plain(run(kt.greedy, step, np.array([[4]]), max_length=5))
    assert found["ids"].tolist() == [[[5, 6, 4, 5, 6]]] and found["length"].tolist() == [[5]]
    assert [index for _, index in ran()] == [[i] for i in range(5)]
    assert plain(run(kt.greedy, markov(chain(4, 5)), np.array([[4]]), max_length=1))["ids"].tolist() == [[[5]]]


@pytest.mark.parametrize("search", SEARCHES)
def test_a_batch_is_its_rows_each_alone(rng, search):
    table, prompts = table_of(rng), rng.integers(1, VOCAB, size=(5, 3)).astype("int32")

    def rows(start, stop):
        options = {"seed": np.arange(start, stop, dtype="int32")} if search == "sample" else {}
        return plain(run(SEARCHES[search], hashed(table), prompts[start:stop], LENGTH, **options))

    together, alone = rows(0, 5), [rows(i, i + 1) for i in range(3)]
    for i, row in enumerate(alone):
        assert_same({name: together[name][i : i + 1] for name in together}, row)
    assert len({str(ids) for ids in together["ids"]}) == 5


# beam


def test_a_beam_that_holds_every_prefix_finds_the_best_of_all_outputs(rng):
    """The continuations of all prefixes of 3 tokens, none of them padding or the end, are 5 * 4**3 = 320."""

    @compiled
    def search(table, length_penalty):
        return kt.beam(hashed(table), PROMPTS, max_length=5, width=320, n=3, length_penalty=length_penalty)

    lengths, greedy = [], 0
    for _ in range(200):
        table = table_of(rng)
        outputs = [list(every_output(following(table, prompt), 5)) for prompt in PROMPTS]
        assert len(outputs[0]) == 1 + 4 + 16 + 64 + 4**4 * 5
        for length_penalty in (0, 0.6, 1):
            expected = stacked([ranked(row, 3, length_penalty) for row in outputs], 3, max_length=5)
            assert_same(search(table, np.float32(length_penalty)), expected)
            lengths += expected["length"].ravel().tolist()
        greedy += np.array_equal(expected["ids"][:, :1], plain_beams(table, PROMPTS, 5, width=1)["ids"])
    assert set(lengths) == {1, 2, 3, 4, 5} and greedy < 100


@pytest.mark.parametrize("width, n", [(2, 1), (3, 3)])
def test_a_narrow_beam_is_its_definition_in_python_run_to_the_very_end(rng, width, n):
    @compiled
    def search(table, length_penalty):
        return kt.beam(hashed(table), PROMPTS, LENGTH, width=width, n=n, length_penalty=length_penalty)

    for i in range(100):
        table, length_penalty = table_of(rng), (0, 0.6, 1, 2)[i % 4]
        expected = plain_beams(table, PROMPTS, LENGTH, width, n, length_penalty)
        assert_same(search(table, np.float32(length_penalty)), expected)


@pytest.mark.parametrize("length_penalty", [0, 1.5])
def test_a_length_penalty_that_is_a_number_is_the_tensor_of_it(rng, length_penalty):
    table = table_of(rng)
    found = run(kt.beam, hashed(table), PROMPTS, LENGTH, width=3, n=2, length_penalty=length_penalty)
    assert_same(found, plain_beams(table, PROMPTS, LENGTH, 3, 2, length_penalty))


@pytest.mark.parametrize("decimals", [None, 0], ids=["any", "ties"])
def test_a_beam_of_one_is_greedy_whatever_the_length_penalty(rng, decimals):
    @compiled
    def both(table, length_penalty):
        step = hashed(table)
        return kt.beam(step, PROMPTS, LENGTH, 1, 1, length_penalty), kt.greedy(step, PROMPTS, LENGTH)

    for i in range(100):
        found, expected = both(table_of(rng, decimals=decimals), np.float32(i % 3))
        assert_same(found, expected, rtol=1e-6)


def steps_run(table, prompt, **options):
    step, ran = counting(markov(table))
    found = plain(run(kt.beam, step, np.array(prompt), **options))
    return found["ids"][:, 0].tolist(), len(ran())


@pytest.mark.parametrize("length_penalty", [0, 0.6])
def test_the_search_stops_when_nothing_in_the_beam_can_rank_higher(length_penalty):
    options = {"max_length": 20, "width": 3, "length_penalty": length_penalty}
    ids, steps = steps_run(chain(4, 5, 6, 3), [[4]], **options)
    assert ids[0][:4] == [5, 6, 3, 0] and steps == 3
    ids, steps = steps_run(chain(4, 5, 6, 3), [[6], [4]], **options)
    assert [row[:4] for row in ids] == [[3, 0, 0, 0], [5, 6, 3, 0]] and steps == 3


def test_the_search_goes_on_as_long_as_a_longer_output_may_rank_higher():
    table = bigrams({2: {3: 0.6, 4: 0.39}, 4: {4: 1.0}})
    ids, steps = steps_run(table, [[2]], max_length=20, width=2, length_penalty=0)
    assert ids == [[3] + [0] * 19] and steps == 1
    ids, steps = steps_run(table, [[2]], max_length=20, width=2, length_penalty=1)
    assert ids == [[4] * 20] and steps == 20
    _, steps = steps_run(table, [[2]], max_length=20, width=2, n=2, length_penalty=0)
    assert steps == 20  # the second best is not known before


def test_what_has_ended_does_not_go_on_scoring():
    table = bigrams({1: {2: 0.6}, 2: {3: 0.9}}, vocabulary=8)
    for length_penalty in (0, 1):
        found = plain(run(kt.beam, markov(table), np.array([[1]]), 8, width=3, n=3, length_penalty=length_penalty))
        assert found["ids"][0, 0].tolist() == [2, 3, 0, 0, 0, 0, 0, 0] and found["length"][0, 0] == 2
        np.testing.assert_allclose(found["score"][0, 0], np.log(0.6 * 0.9), rtol=1e-5)


def test_what_has_ended_survives_being_overtaken_for_a_while():
    table = bigrams({1: {4: 0.7, 3: 0.2}, 4: {5: 0.45, 6: 0.45}})  # then 5 and 6, at 0.315, scatter
    found = plain(run(kt.beam, markov(table), np.array([[1]]), 6, width=2, length_penalty=0))
    assert found["ids"].tolist() == [[[3, 0, 0, 0, 0, 0]]]
    np.testing.assert_allclose(found["score"], np.log([[0.2]]), rtol=1e-5)


def test_outputs_of_a_beam_are_distinct_and_best_first_with_padding_behind_the_end(rng):
    prompts = rng.integers(1, VOCAB, size=(40, 2)).astype("int32")
    found = plain(run(kt.beam, hashed(table_of(rng)), prompts, LENGTH, width=5, n=5, length_penalty=1))
    rank = found["score"] / ((5 + found["length"]) / 6)
    assert np.all(np.diff(rank, axis=1) <= 0) and np.all(np.isfinite(rank))
    for row, lengths in zip(found["ids"], found["length"]):
        assert len({tuple(ids) for ids in row.tolist()}) == 5
        for ids, length in zip(row, lengths):
            assert np.all(ids[length:] == PAD) and PAD not in ids[:length] and END not in ids[: length - 1]
            assert length == LENGTH or ids[length - 1] == END


def test_a_larger_length_penalty_never_shortens_the_best_output(rng):
    prompts = rng.integers(1, VOCAB, size=(100, 2)).astype("int32")

    @compiled
    def lengths(table, length_penalty):
        return kt.beam(hashed(table), prompts, LENGTH, width=3, length_penalty=length_penalty)["length"]

    table = table_of(rng)
    found = np.array([lengths(table, np.float32(length_penalty)) for length_penalty in (0, 0.3, 0.6, 1, 2, 4)])
    assert np.all(np.diff(found, axis=0) >= 0) and np.all(found[0] <= found[-1]) and np.any(found[0] < found[-1])


def test_fewer_outputs_than_asked_for_leave_empty_ones():
    table = np.full((6, 6), -np.inf, "float32")
    table[1, [4, 5]], table[[4, 5], 3] = [1.0, 0.0], 0.0
    found = run(kt.beam, markov(table), np.array([[1], [4]]), 4, width=3, n=3)
    two = [([4, 3], log_softmax([1, 0])[0]), ([5, 3], log_softmax([1, 0])[1])]
    assert_same(found, stacked([two, [([3], 0.0)]], 3, 4))


def test_methods_of_a_step_are_used_for_its_cache(rng):
    calls = set()

    class Step:
        """`hashed`, with rows along the second axis of its cache."""

        def __init__(self, table):
            self.step = hashed(table)

        def __call__(self, tokens, index, cache):
            logits, cache = self.step(tokens, index, None if cache is None else {"sum": cache["columns"][0]})
            return logits, {"columns": cache["sum"][None]}

        def repeat(self, cache, times):
            calls.add("repeat")
            return {"columns": ops.repeat(cache["columns"], times, axis=1)}

        def widen(self, cache, width):
            calls.add("widen")
            return {"columns": ops.repeat(cache["columns"], width, axis=1)}

        def reorder(self, cache, rows):
            calls.add("reorder")
            return {"columns": ops.take(cache["columns"], rows, axis=1)}

    table = table_of(rng)
    found = run(kt.beam, Step(table), PROMPTS, LENGTH, width=3, n=3)
    assert_same(found, plain_beams(table, PROMPTS, LENGTH, 3, 3))
    assert calls == {"widen", "reorder"}
    drawn = run(kt.sample, Step(table), PROMPTS, LENGTH, n=3, seed=1)
    assert_same(drawn, plain(run(kt.sample, hashed(table), PROMPTS, LENGTH, n=3, seed=1)))
    assert calls == {"widen", "reorder", "repeat"}


# sampling

KEPT = {
    "all": {},
    "hot": {"temperature": 1.7},
    "cold": {"temperature": 0.5},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.3},
    "cold top_k": {"temperature": 0.5, "top_k": 3},
    "top_k and top_p": {"top_k": 5, "top_p": 0.6},
    "hot, all three": {"temperature": 1.3, "top_k": 6, "top_p": 0.9, "min_p": 0.2},
}
LOGITS = np.array([3.0, 0.1, -0.4, 1.1, 0.6, -0.9, 0.9, 0.2, -0.1, 1.4, 0.7, -0.7], "float32")  # the first is padding
NO_END = len(LOGITS)


def fixed(logits):
    """A step of the same logits always."""

    def step(tokens, index, cache):
        return ops.take(logits, 0 * tokens[..., None] + np.arange(len(logits), dtype="int32")), cache

    return step


def kept_probs(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """What `LOGITS` are to be drawn with."""
    probs = np.exp(LOGITS.astype("float64") / temperature)
    probs[PAD] = 0
    order = np.argsort(-probs)[: top_k or None]
    shares = probs[order] / probs[order].sum()
    order = order[np.cumsum(shares) - shares < top_p]
    kept = np.isin(np.arange(len(probs)), order) & (probs >= min_p * probs.max())
    return np.where(kept, probs, 0) / probs[kept].sum()


def assert_drawn_with(probs, draws):
    """A chi-square test, which one of 30,000 true samples fails."""
    counts = np.bincount(draws.ravel(), minlength=len(probs))
    assert len(counts) == len(probs) and np.all(counts[probs == 0] == 0)
    expected, freedom = counts.sum() * probs[probs > 0], (probs > 0).sum() - 1
    assert np.all(expected > 5)
    statistic = ((counts[probs > 0] - expected) ** 2 / expected).sum()
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 4 * np.sqrt(2 / (9 * freedom))) ** 3  # Wilson and Hilferty


@pytest.mark.parametrize("kept", KEPT)
def test_tokens_are_drawn_with_the_probabilities_of_those_kept(kept):
    prompt = np.ones((2000, 1), "int32")
    found = plain(run(kt.sample, fixed(LOGITS), prompt, 5, n=6, seed=11, end_id=NO_END, **KEPT[kept]))
    probs = kept_probs(**KEPT[kept])
    assert_drawn_with(probs, found["ids"])
    assert_drawn_with(probs, found["ids"][:, 0, 0])
    np.testing.assert_allclose(found["score"], log_softmax(LOGITS)[found["ids"]].sum(-1), rtol=1e-5)


def test_draws_of_neighbours_are_independent():
    found = run(kt.sample, fixed(LOGITS), np.ones((1000, 1), "int32"), 6, n=6, seed=12, end_id=NO_END, top_k=5)
    ids, probs = np.asarray(found["ids"]), kept_probs(top_k=5)
    pairs = np.outer(probs, probs).ravel()
    for axis in range(3):  # rows, outputs of a row, steps
        pair = np.moveaxis(ids, axis, 0)
        assert_drawn_with(pairs, pair[0::2] * len(probs) + pair[1::2])


def test_draws_of_one_row_with_many_seeds_have_the_same_probabilities():
    seed, prompt = np.arange(6000, dtype="int32"), np.ones((6000, 1), "int32")
    ids = run(kt.sample, fixed(LOGITS), prompt, 2, seed=seed, end_id=NO_END)["ids"]
    assert_drawn_with(kept_probs(), np.asarray(ids)[..., 0])
    assert_drawn_with(kept_probs(), np.asarray(ids)[..., 1])


def test_the_first_draws_of_small_seeds_are_not_the_first_token():
    logits = np.array([0.0, -14.0, 1.0, 0.0, 2.0], "float32")
    for seed in (0, np.zeros(3, "int32")):
        ids = run(kt.sample, fixed(logits), np.ones((3, 1), "int32"), 3, n=2, seed=seed, end_id=NO_END)["ids"]
        assert 1 not in np.asarray(ids)


@pytest.mark.parametrize("kept", [{"top_k": 2}, {"top_p": 0.1}, {"min_p": 1}], ids=str)
def test_tokens_as_likely_as_the_last_one_kept_are_kept(kept):
    logits = np.array([0, 1, 2, 2, 2, 1], "float32")
    ids = run(kt.sample, fixed(logits), np.ones((50, 1), "int32"), 3, end_id=NO_END, **kept)["ids"]
    assert set(np.unique(ids)) == {2, 3, 4}


def test_top_k_above_the_vocabulary_keeps_all():
    def ids(top_k):
        prompt = np.ones((30, 1), "int32")
        return np.asarray(run(kt.sample, fixed(LOGITS), prompt, 4, top_k=top_k, seed=2, end_id=NO_END)["ids"])

    for top_k in (1000, tensor(np.int32(1000))):
        np.testing.assert_array_equal(ids(top_k), ids(0))


def test_options_that_are_tensors_are_the_numbers(rng):
    step, prompt = hashed(table_of(rng, 12)), rng.integers(1, 12, size=(20, 3)).astype("int32")

    @compiled
    def graph(temperature, top_k, top_p, min_p, seed):
        return kt.sample(step, prompt, LENGTH, 2, temperature, top_k, top_p, min_p, seed)

    for kept in ("all", "cold top_k", "top_k and top_p", "hot, all three"):
        options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **KEPT[kept]}
        tensors = {name: np.array(value, "int32" if name == "top_k" else "float32") for name, value in options.items()}
        numbers = run(kt.sample, step, prompt, LENGTH, n=2, seed=4, **options)
        assert_same(graph(**tensors, seed=np.int32(4)), numbers)
    tensors = {name: tensor(value) for name, value in tensors.items()}
    assert_same(run(kt.sample, step, prompt, LENGTH, n=2, seed=4, **tensors), numbers)


def test_temperature_0_is_greedy_also_as_a_tensor(rng):
    step, prompt = hashed(table_of(rng, decimals=0)), rng.integers(1, VOCAB, size=(30, 3)).astype("int32")
    expected = plain(run(kt.greedy, step, prompt, LENGTH))
    twice = {name: np.repeat(value, 2, axis=1) for name, value in expected.items()}
    graph = compiled(lambda temperature: kt.sample(step, prompt, LENGTH, 2, temperature, 3, 0.9, 0.1))
    for temperature in (0, tensor(np.float32(0))):
        assert_same(run(kt.sample, step, prompt, LENGTH, n=2, temperature=temperature), twice)
    assert_same(graph(np.float32(0)), twice)
    assert np.any(plain(graph(np.float32(1)))["ids"] != twice["ids"])


@pytest.mark.parametrize("search", SEARCHES)
def test_a_graph_writes_what_eager_mode_writes(rng, search):
    table, prompt = table_of(rng), rng.integers(1, VOCAB, size=(8, 3)).astype("int32")
    found = SEARCHES[search](hashed(table), prompt, LENGTH)
    assert_same(compiled(lambda table, prompt: SEARCHES[search](hashed(table), prompt, LENGTH))(table, prompt), found)
    n = {"greedy": 1, "sample": 3, "beam": 2}[search]
    assert {name: (value.shape, value.dtype.name) for name, value in plain(found).items()} == {
        "ids": ((8, n, LENGTH), "int32"),
        "score": ((8, n), "float32"),
        "length": ((8, n), "int32"),
    }


@pytest.mark.slow
@tensorflow_only
@pytest.mark.parametrize("search", SEARCHES)
def test_xla_writes_what_eager_mode_writes(rng, search):
    table, prompt = table_of(rng), rng.integers(1, VOCAB, size=(8, 3)).astype("int32")
    graph = compiled(lambda table, prompt: SEARCHES[search](hashed(table), prompt, LENGTH), jit_compile=True)
    assert_same(graph(table, prompt), SEARCHES[search](hashed(table), prompt, LENGTH))


def test_the_seed_decides_what_is_drawn():
    @compiled
    def graph(seed):
        return kt.sample(fixed(LOGITS), np.ones((4, 1), "int32"), 5, n=2, seed=seed, end_id=NO_END)["ids"]

    def ids(seed):
        return np.asarray(graph(np.int32(seed))).tolist()

    assert ids(5) == ids(5)
    for seed in (5, tensor(np.int32(5))):
        found = run(kt.sample, fixed(LOGITS), np.ones((4, 1), "int32"), 5, n=2, seed=seed, end_id=NO_END)
        assert np.asarray(found["ids"]).tolist() == ids(5)
    assert len({str(ids(seed)) for seed in (0, 1, 2, 3, -1, 2**31 - 1)}) == 6


def test_outputs_of_a_row_differ_and_so_do_those_of_equal_rows():
    prompt = np.ones((3, 1), "int32")
    ids = np.asarray(run(kt.sample, fixed(LOGITS), prompt, 8, n=5, seed=1, end_id=NO_END)["ids"])
    assert len({tuple(row) for row in ids.reshape(15, 8).tolist()}) == 15


def test_draws_of_an_output_depend_on_no_other_row_and_on_no_other_output(rng):
    step, prompt = hashed(table_of(rng)), rng.integers(1, VOCAB, size=(6, 3)).astype("int32")
    others = np.where(np.arange(6)[:, None] < 4, prompt, 1 + prompt % (VOCAB - 1)).astype("int32")
    found = plain(run(kt.sample, step, prompt, LENGTH, n=3, seed=3))
    changed = plain(run(kt.sample, step, others, LENGTH, n=3, seed=3))
    fewer = run(kt.sample, step, prompt[:4], LENGTH, n=1, seed=3)
    assert_same({name: changed[name][:4] for name in found}, {name: found[name][:4] for name in found})
    assert_same(fewer, {name: found[name][:4, :1] for name in found})


# controls

MIXED = np.array([[1, 2, 1, 2, 0], [0, 0, 0, 0, 8], [7, 0, 4, 4, 0], [5, 6, 5, 1, 5]], "int32")  # padded at each place


def no_end_before(length, end_ids=(END,)):
    def edit(log_probs, prompt, ids):
        return np.where(np.isin(np.arange(9), end_ids) & (len(ids) + 1 < length), -np.inf, log_probs)

    return edit


def without(*tokens):
    return lambda log_probs, prompt, ids: np.where(np.isin(np.arange(9), tokens), -np.inf, log_probs)


def no_ngram_twice(size):
    def edit(log_probs, prompt, ids):
        row = [*prompt, *ids]
        ngrams = {tuple(row[i : i + size]) for i in range(len(row) - size + 1)}
        return np.where([tuple([*row, token][-size:]) in ngrams for token in range(9)], -np.inf, log_probs)

    return edit


def repeated_times(penalty):
    return lambda log_probs, prompt, ids: log_probs * np.where(np.isin(np.arange(9), [*prompt, *ids]), penalty, 1)


def no_checksum(log_probs, written):
    """A filter: no token that is the sum of those in the row and of how many were written."""
    sums = (ops.sum(written.tokens, axis=1, keepdims=True) + written.count) % 9
    return ops.where(ops.arange(9, dtype="int32") == sums, -np.inf, log_probs)


def no_plain_checksum(log_probs, prompt, ids):
    return np.where(np.arange(9) == (sum(prompt) + sum(ids) + len(ids)) % 9, -np.inf, log_probs)


def no_last(log_probs, written):
    """A filter: not the token before."""
    last = ops.take(written.tokens, written.start + written.count - 1, axis=1)
    return ops.where(ops.arange(9, dtype="int32") == last[:, None], -np.inf, log_probs)


def no_plain_last(log_probs, prompt, ids):
    return np.where(np.arange(9) == [*prompt, *ids][-1], -np.inf, log_probs)


CONTROLS = {  # options, the same in Python, ends
    "min_length": ({"min_length": 4}, [no_end_before(4)], (END,)),
    "two ends": ({"end_id": [3, 6], "min_length": 2}, [no_end_before(2, (3, 6))], (3, 6)),
    "no end": ({"end_id": ()}, [], ()),
    "forbid": ({"filters": [filters.forbid([1, 5])]}, [without(1, 5)], (END,)),
    "1-grams": ({"filters": [filters.no_repeat_ngram(1)]}, [no_ngram_twice(1)], (END,)),
    "2-grams": ({"filters": [filters.no_repeat_ngram(2)]}, [no_ngram_twice(2)], (END,)),
    "3-grams": ({"filters": [filters.no_repeat_ngram(3)]}, [no_ngram_twice(3)], (END,)),
    "repetition": ({"filters": [filters.repetition_penalty(2.5)]}, [repeated_times(2.5)], (END,)),
    "custom": ({"filters": [no_checksum, no_last]}, [no_plain_checksum, no_plain_last], (END,)),
    "all": (
        {"min_length": 3, "filters": [filters.repetition_penalty(0.7), no_last, filters.no_repeat_ngram(2)]},
        [repeated_times(0.7), no_plain_last, no_ngram_twice(2), no_end_before(3)],
        (END,),
    ),
}


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("width", [1, 3], ids=["greedy", "beam"])
def test_a_control_is_its_definition_in_python_for_each_row_and_hypothesis(rng, control, width):
    options, edits, end_ids = CONTROLS[control]
    search = kt.greedy if width == 1 else functools.partial(kt.beam, width=width, n=width)
    search = compiled(lambda table, search=search: search(hashed(table), MIXED, 12, **options), **QUICK)
    changed = 0
    for _ in range(10):
        table = table_of(rng, 9)
        table[:, [1, 4]] += 1  # repeats itself
        found = search(table)
        assert_same(found, plain_beams(table, MIXED, 12, width, width, edits=edits, end_ids=end_ids))
        changed += np.any(found["ids"] != plain_beams(table, MIXED, 12, width, width)["ids"])
    assert changed >= 5


def test_filters_hold_for_each_draw(rng):
    prompt, edits = rng.integers(1, 9, size=(40, 6)).astype("int32"), [filters.no_repeat_ngram(2), filters.forbid([4])]
    found = plain(run(kt.sample, hashed(table_of(rng, 9)), prompt, 9, n=3, min_length=9, filters=edits))
    assert np.mean(found["length"] == 9) > 0.9
    for row, outputs in zip(prompt.tolist(), found["ids"].tolist()):
        for ids in outputs:
            pairs = set(zip([*row[-1:], *ids], ids)) if any(ids) else set()  # nothing may follow some rows
            assert len(pairs) in (0, 9) and not pairs & set(zip(row, row[1:])) and not {4, END} & set(ids[:-1])


@pytest.mark.parametrize("search", ["greedy", "beam"])
def test_lengths_may_differ_from_row_to_row(rng, search):
    table, most, least = table_of(rng, 9), [2, 7, 1, 5], [2, 6, 0, 9]
    table[:, END] += 1
    width = 1 if search == "greedy" else 3
    options = {} if search == "greedy" else {"width": width, "n": width}
    limits = [np.array(lengths, "int32") for lengths in (most, least)]
    for max_length, min_length in (limits, map(tensor, limits)):
        found = SEARCHES[search](hashed(table), MIXED, max_length, min_length=min_length, **options)
        rows = [
            plain_beam(following(table, prompt, [no_end_before(fewest)]), longest, width, width)
            for prompt, longest, fewest in zip(MIXED, most, least)
        ]
        assert_same(found, stacked(rows, width, max(most)))


def test_a_fewest_length_of_each_row_may_be_a_tensor_of_a_graph(rng):
    table, least = table_of(rng, 9), np.array([3, 1, 0, 5], "int32")
    graph = compiled(lambda least: kt.beam(hashed(table), MIXED, LENGTH, 2, 2, min_length=least))
    rows = [plain_beam(following(table, row, [no_end_before(n)]), LENGTH, 2, 2) for row, n in zip(MIXED, least)]
    assert_same(graph(least), stacked(rows, 2, LENGTH))


def nothing_behind(token):
    """A filter: nothing follows rows that begin with `token`."""

    def filtered(log_probs, written):
        return ops.where(ops.any(written.tokens == token, axis=1, keepdims=True), -np.inf, log_probs)

    return filtered


@pytest.mark.parametrize("search", SEARCHES)
def test_a_row_that_nothing_may_follow_is_empty_and_the_others_are_as_without_it(rng, search):
    table, prompts = table_of(rng), np.array([[1, 4], [5, 1], [4, 4]], "int32")
    table[:, 5] = -np.inf
    found = plain(run(SEARCHES[search], hashed(table), prompts, LENGTH, filters=[nothing_behind(5)]))
    expected = plain(run(SEARCHES[search], hashed(table), prompts, LENGTH))
    assert_empty(found, 1)
    assert_same({name: found[name][::2] for name in found}, {name: expected[name][::2] for name in found})
    assert np.all(found["length"][::2] > 0)


def assert_empty(found, row):
    assert np.all(found["ids"][row] == PAD) and np.all(found["length"][row] == 0)
    assert np.all(found["score"][row] == -np.inf)


@pytest.mark.parametrize("search", SEARCHES)
def test_a_row_that_cannot_go_on_to_an_end_is_empty(search):
    table = np.full((6, 6), -np.inf, "float32")
    table[1, 4], table[4, 5], table[2, 3], table[[0, 3, 5], 1] = 0, 0, 0, 0
    found = plain(run(SEARCHES[search], markov(table), np.array([[1], [2]]), LENGTH, filters=[nothing_behind(5)]))
    assert_empty(found, 0)
    assert found["ids"][1, 0].tolist() == [3, 0, 0, 0, 0, 0, 0] and found["score"][1, 0] == 0


def test_a_hypothesis_that_cannot_go_on_leaves_the_beam_to_the_others():
    table = np.full((6, 6), -np.inf, "float32")
    table[1, [4, 5]], table[5, 3], table[[0, 2, 3, 4], 1] = [2, 0], 0, 0
    found = run(kt.beam, markov(table), np.array([[1]]), 4, width=2, n=2, filters=[nothing_behind(4)])
    assert_same(found, stacked([[([5, 3], log_softmax([2, 0])[1])]], 2, 4))


# prompts


@pytest.mark.parametrize("search", SEARCHES)
def test_a_prompt_padded_anywhere_is_the_prompt_alone(rng, search):
    prompts = np.array([[4, 5, 1, 0, 0], [0, 0, 2, 4, 5], [1, 0, 5, 0, 4], [5, 4, 1, 2, 2], [0, 2, 1, 5, 0]], "int32")
    table, seeds = table_of(rng), np.arange(20, 25, dtype="int32")

    @functools.partial(compiled, **QUICK)
    def graph(prompts, seeds):
        return SEARCHES[search](hashed(table), prompts, LENGTH, **({"seed": seeds} if search == "sample" else {}))

    together = plain(graph(prompts, seeds))
    for i, row in enumerate(prompts):
        alone = graph(row[row != PAD][None], seeds[i : i + 1])
        assert_same({name: together[name][i : i + 1] for name in together}, alone)


@pytest.mark.parametrize("search, times", [("greedy", 1), ("sample", 3), ("beam", 3)])
def test_prompts_go_in_at_once_and_then_one_token_a_row_behind_its_own(search, times):
    step, ran = counting(markov(chain(4, 5, 6, 7, 8, 9, 10, 11, 4)))
    prompts = np.array([[9, 0, 4, 5], [0, 0, 0, 6], [1, 2, 0, 0]])
    run(SEARCHES[search], step, prompts, max_length=4)
    (tokens, index), *steps = ran()
    assert tokens == [[9, 4, 5, 0], [6, 0, 0, 0], [1, 2, 0, 0]] and index == [0, 0, 0]
    assert [index for _, index in steps] == [np.repeat([3 + i, 1 + i, 2 + i], times).tolist() for i in range(3)]
    assert all(np.shape(tokens) == (3 * times, 1) for tokens, _ in steps)
    if search == "greedy":
        assert [[row[0] for row in tokens[:2]] for tokens, _ in steps] == [[6, 7], [7, 8], [8, 9]]


def test_without_a_cache_a_step_gets_none_at_first():
    caches = []

    def step(tokens, index, cache):
        caches.append(cache)
        return markov(chain(4, 5, 3))(tokens, index, cache)

    run(kt.greedy, step, np.array([[4]]), max_length=3)
    assert caches[0] is None


# errors


def refused(match, search=kt.greedy, prompt=((4,),), max_length=5, **options):
    with pytest.raises(ValueError, match=match):
        search(markov(chain(4, 5, 3)), np.array(prompt, "int32"), max_length, **options)


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
def test_what_no_search_can_do_is_refused(search):
    for max_length in (0, -1, 2.5):
        refused(f"`max_length` must be a whole number of at least 1; got {max_length}", search, max_length=max_length)
    refused("`min_length` must be a whole number of at least 0; got -1", search, min_length=-1)
    refused(r"An end must not be `pad_id`.*\[4\] and 4", search, end_id=4, pad_id=4)
    refused(r"An end must not be `pad_id`.*\[3, 0\] and 0", search, end_id=[3, 0])
    refused("Each prompt must hold a token", search, prompt=[[4, 0], [0, 0]])


def test_widths_and_numbers_of_outputs_that_cannot_be_are_refused():
    for width in (0, 1.5):
        refused(f"`width` must be a whole number of at least 1; got {width}", kt.beam, width=width)
    refused("`n` must be at most `width`; got 4 and 3", kt.beam, width=3, n=4)
    for search in (kt.beam, kt.sample):
        refused("`n` must be a whole number of at least 1; got 0", search, n=0)


@pytest.mark.parametrize(
    "option, value, rule",
    [
        ("temperature", -0.1, "at least 0"),
        ("temperature", float("nan"), "at least 0"),
        ("top_k", -1, "a whole number of at least 0"),
        ("top_k", 2.5, "a whole number of at least 0"),
        ("top_p", 0, "above 0 and at most 1"),
        ("top_p", 1.5, "above 0 and at most 1"),
        ("min_p", -0.1, "at least 0 and at most 1"),
        ("min_p", 1.1, "at least 0 and at most 1"),
        ("length_penalty", -0.5, "at least 0"),
    ],
)
def test_an_option_out_of_its_range_is_refused(option, value, rule):
    search = kt.beam if option == "length_penalty" else kt.sample
    refused(f"`{option}` must be {rule}; got {value}", search, **{option: value})
    if option != "top_k":  # a tensor whose value is known
        refused(f"`{option}` must be {rule}; got ", search, **{option: tensor(np.float32(value))})


def test_filters_refuse_what_is_no_token_and_no_size():
    with pytest.raises(ValueError, match="`forbidden id` must be a whole number of at least 0; got -1"):
        filters.forbid([3, -1])
    with pytest.raises(ValueError, match="`no_repeat_ngram` must be a whole number of at least 1; got 0"):
        filters.no_repeat_ngram(0)


# one graph


@tensorflow_only
@pytest.mark.parametrize("search", SEARCHES)
def test_one_trace_serves_any_batch_prompt_and_length(rng, search):
    import tensorflow as tf

    traces, table = [], table_of(rng)

    @tf.function(input_signature=[tf.TensorSpec([None, None], "int32"), tf.TensorSpec([], "int32")])
    def graph(prompt, max_length):
        traces.append(search)
        return SEARCHES[search](hashed(table), prompt, max_length)

    for rows, columns, max_length in [(1, 1, 1), (3, 4, 7), (2, 6, 20)]:
        prompt = rng.integers(1, VOCAB, size=(rows, columns)).astype("int32")
        prompt[0, 1:] = PAD
        found = graph(prompt, max_length)
        assert found["ids"].shape[2] == max_length
        assert_same(found, SEARCHES[search](hashed(table), prompt, max_length))
    assert len(traces) == 1


# noise


def test_uniform_numbers_have_the_moments_of_uniform_numbers():
    many = np.arange(100_000, dtype="int32")
    rows, columns = many[:1000, None] // 2, many[:100] + 1
    for drawn in (
        noise.uniform(3, many),
        noise.uniform(many, 1),
        noise.uniform(many, 7, 9),
        noise.uniform(3, rows, columns),
        noise.uniform(-1, many, 2),
    ):
        drawn = np.asarray(drawn)
        assert drawn.dtype == "float32" and np.all((drawn >= 0) & (drawn < 1))
        drawn = drawn[::2].ravel() if drawn.ndim > 1 else drawn
        n, centred = len(drawn), drawn - 0.5
        assert abs(drawn.mean() - 0.5) < 4 * (1 / 12 / n) ** 0.5
        assert abs((centred**2).mean() - 1 / 12) < 4 * (1 / 180 / n) ** 0.5
        for lag in (1, 2, 3, 64, 100):
            assert abs((centred[lag:] * centred[:-lag]).mean() * 12) < 4.5 * n**-0.5
        assert_drawn_with(np.full(256, 1 / 256), (drawn * 256).astype(int))


def test_uniform_numbers_of_neighbouring_seeds_are_uncorrelated():
    many = np.arange(100_000, dtype="int32")
    for seed in (0, 1, 41):
        one, two = (np.asarray(noise.uniform(s, many)) - 0.5 for s in (seed, seed + 1))
        assert abs((one * two).mean() * 12) < 4.5 * len(many) ** -0.5


def test_random_bits_of_different_counters_differ():
    many = np.arange(100_000, dtype="int32")
    for bits in (noise.random_bits(many), noise.random_bits(0, many), noise.random_bits(many, 5)):
        assert keras.backend.standardize_dtype(bits.dtype) == "uint32"
        assert len(np.unique(np.asarray(bits))) == len(many)


def test_random_bits_of_a_graph_are_those_of_eager_mode():
    many = np.arange(-500, 500, dtype="int32")
    graph = compiled(lambda seed, many: (noise.random_bits(seed, many), noise.uniform(seed, many)))
    for found, expected in zip(graph(np.int32(9), many), (noise.random_bits(9, many), noise.uniform(9, many))):
        np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


def test_random_bits_are_the_same_on_every_backend_and_for_ever():
    recorded = [4046108017, 4124193240]
    assert np.asarray(noise.random_bits(7, np.array([0, 1], "int32"))).tolist() == recorded


@pytest.mark.parametrize("name", ["max_length", "min_length", "top_k", "seed"])
def test_whole_numbers_in_arrays_are_checked_as_those_in_python(name):
    step, prompt = markov(np.zeros((VOCAB, VOCAB), "float32")), np.array([[2], [4]])
    options = {"max_length": 3}
    least = {"max_length": 0, "min_length": -1, "top_k": -1, "seed": 2.5}[name]
    for wrong in (least, np.array([least, 3]), np.array([[3, 3]])):
        with pytest.raises(ValueError, match=f"`{name}` must be"):
            kt.sample(step, prompt, **{**options, name: wrong})
    if name != "top_k":
        right = kt.sample(step, prompt, **{**options, name: np.array([2, 3], "int64")})
        assert right["ids"].shape == (2, 1, 3)


def test_a_repetition_penalty_that_would_raise_scores_above_0_is_refused():
    for penalty in (0, -1.5):
        with pytest.raises(ValueError, match="`repetition_penalty` must be above 0"):
            filters.repetition_penalty(penalty)
