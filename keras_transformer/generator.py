"""Writing with a Keras model, token by token, with a key/value cache that the model's author need not know about.

Letters: `B` batch, `P` tokens of a prompt, `S` source tokens, `T` target tokens, `L` longest output, `n` outputs of a
row, `R` rows of a search, `V` vocabulary.
"""

import keras
from keras import ops

from keras_transformer import filters as restrict
from keras_transformer.checks import check_count, check_ids, check_prompts, check_range, check_rows
from keras_transformer.parts import parts_of
from keras_transformer.scopes import AttentionMaps, DecodingScope
from keras_transformer.search import Beam, Sampling, right_padded, take_columns


class Generator:
    """Writes token ids with a model of this package's blocks, by beam search or sampling, and scores given ones.

    A functional model is cut where the ids that it writes first matter: what depends on its other inputs alone (an
    encoder) runs once a batch, the rest runs a token at a time in a `DecodingScope`. Its layers must treat positions
    one by one or look back through this package's causal attention; when a `Generator` is made, it runs the model on a
    few tokens both ways and compares. A subclassed model runs whole in the scope.

    Args:
        model: `keras.Model` to logits `[B, T, V]`: `build_transformer`'s or composed by hand. A functional one has an
            input of int ids `[B, T]` named `"target"` or `"tokens"`, or just one input; and any others. A subclassed
            one is called with ids; or, given an `example`, with a dict of such inputs and `"target"`.
        max_length: int, `L`, the most tokens to write, the end among them.
        width: int, beams, at least `n`; 1 is greedy; None for `n`.
        n: int, outputs of each row: the best of a beam, or samples.
        start_id: int, the token that a target starts with.
        end_id: int or sequence of ints, the tokens that end it.
        pad_id: int, padding.
        example: dict of small arrays, the other inputs of a subclassed model that has some.

    Raises:
        ValueError: if a functional model has no such input or several outputs; if the model's logits with and without
            cache differ, naming the layer where they first do (one that mixes positions without knowing the scope).

    Example:
    ```python
    import numpy as np
    import keras_transformer as kt
    model = kt.build_transformer(vocab_size=20, **kt.PRESETS["tiny"])
    generate = kt.Generator(model, max_length=5, width=4, n=2)
    sources = {"source": np.array([[4, 5, 3], [6, 3, 0]])}
    found = generate(sources, length_penalty=1.0, no_repeat_ngram=2)
    assert found["ids"].shape == (2, 2, 5)
    drawn = generate(sources, temperature=0.8, top_p=0.9, seed=1)
    assert drawn["ids"].shape == (2, 2, 5)
    scored = generate.score(sources, found["ids"][:, 0])
    np.testing.assert_allclose(scored["score"], found["score"][:, 0], rtol=1e-4)
    ```
    """

    def __init__(self, model, max_length, width=None, n=1, start_id=2, end_id=3, pad_id=0, example=None):
        self.max_length = check_count("max_length", max_length)
        self.n = check_count("n", n)
        self.width = check_count("width", n if width is None else width, least=self.n)
        self.start_id, self.end_id, self.pad_id = start_id, end_id, pad_id
        self.parts = parts_of(model, example, start_id, pad_id)

    def __call__(self, sources=None, prompt=None, **options):
        """Writes ids: by beam search at temperature 0, by sampling above.

        Args:
            sources: dict of the model's other inputs, by name; None if it has none.
            prompt: int `[B, P]`, what the outputs continue, the start among it; padding is left out wherever it
                stands. None for the start alone.
            **options: what `searches` takes.

        Returns:
            A dict of `ids` int32 `[B, n, L]`, `score` float32 `[B, n]` and `length` int32 `[B, n]`, as `beam` and
            `sample` return them.
        """
        context, prompt = self.begin(sources, prompt)
        beam, sampling = self.searches(**options)

        def run(search):
            return search.run(self.step(context, length=ops.shape(prompt)[1] + search.room), prompt)

        temperature = sampling.temperature
        if isinstance(temperature, float):
            return run(sampling if temperature else beam)
        return ops.cond(ops.equal(temperature, 0), lambda: run(beam), lambda: run(sampling))

    def searches(
        self,
        max_length=None,
        n=None,
        min_length=0,
        length_penalty=0.6,
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=0,
        repetition_penalty=1.0,
        no_repeat_ngram=0,
        forbidden_ids=(),
        filters=(),
    ):
        """The beam search (or greedy one, or None if it is not asked for) and the sampling of these options.

        Args:
            max_length: int or int tensor, scalar or `[B]`: the most tokens to write; None for the generator's.
            n: int, outputs of each row; None for the generator's.
            min_length: as `max_length`, the fewest.
            length_penalty: see `beam`.
            temperature, top_k, top_p, min_p, seed: see `sample`.
            repetition_penalty: float or scalar tensor above 0; see `filters.repetition_penalty`.
            no_repeat_ngram: int, 0 for none; see `filters.no_repeat_ngram`.
            forbidden_ids: sequence of ints that are not written.
            filters: further filters; see `keras_transformer.filters`.
        """
        chain = list(filters)
        if not (isinstance(repetition_penalty, (int, float)) and repetition_penalty == 1):
            chain.append(restrict.repetition_penalty(repetition_penalty))
        if no_repeat_ngram:
            chain.append(restrict.no_repeat_ngram(no_repeat_ngram))
        check_range("length_penalty", length_penalty, 0)  # also where no beam is asked for
        task = {"min_length": min_length, "end_id": self.end_id, "pad_id": self.pad_id}
        task = {**task, "filters": chain, "forbidden_ids": forbidden_ids}
        max_length = self.max_length if max_length is None else max_length
        n = self.n if n is None else n
        sampling = Sampling(max_length, n, temperature, top_k, top_p, min_p, seed, **task)
        if self.width == n == 1:
            return Sampling(max_length, temperature=0.0, **task), sampling
        if isinstance(sampling.temperature, float) and sampling.temperature > 0:
            return None, sampling
        return Beam(max_length, self.width, n, length_penalty, **task), sampling

    def begin(self, sources, prompt=None):
        """(what depends on the sources alone, the prompts int32 `[B, P]`)."""
        context = self.parts.encode(sources)
        tensors = keras.tree.flatten(context)
        if prompt is None and not tensors:
            raise ValueError("A model without other inputs needs a `prompt`; got none.")
        if prompt is None:
            prompt = ops.full((ops.shape(tensors[0])[0], 1), self.start_id, dtype="int32")
        prompt = check_ids("prompt", prompt)
        if tensors:
            check_rows("prompt", prompt, tensors[0].shape[0])
        return context, prompt

    def step(self, context, length):
        """A step for the searches, with a cache of `length` slots; its cache keeps the context after the first call."""
        return CachedStep(self.parts.decode, context, length, self.pad_id)

    def score(self, sources, target, prompt=None):
        """Log-probabilities of given targets, for rescoring or to compare texts.

        Args:
            sources, prompt: as in a call.
            target: int `[B, T]`, without the start, padded.

        Returns:
            A dict of `token_scores` float32 `[B, T]` (0 at padding), their sum `score` float32 `[B]`, in nats, and
            `length` int32 `[B]`.
        """
        target = check_ids("target", target)
        logits, at_target = self._read(sources, target, prompt)
        log_probs = ops.log_softmax(ops.cast(at_target(logits), "float32"))
        is_token = target != self.pad_id
        scores = ops.where(is_token, ops.take_along_axis(log_probs, target[:, :, None], axis=2)[:, :, 0], 0.0)
        length = ops.sum(ops.cast(is_token, "int32"), axis=1)
        return {"token_scores": scores, "score": ops.sum(scores, axis=1), "length": length}

    def attention(self, sources, target, prompt=None, layer=None):
        """Where the model looks in its context as it writes each token of a target.

        Args:
            sources, target, prompt: as for `score`.
            layer: str, path of a cross-attention layer, a key of `AttentionMaps`; None for the last.

        Returns:
            float `[B, T, S]`: the layer's weights, averaged over heads, 0 for padding. Their argmax over `S` is a hard
            alignment.

        Raises:
            ValueError: if there is no such cross-attention.
        """
        target = check_ids("target", target)
        with AttentionMaps() as maps:
            _, at_target = self._read(sources, target, prompt)
        if not maps.cross or layer not in (None, *maps.cross):
            raise ValueError(f"`layer` must be one of the model's cross-attention layers, {maps.cross}; got {layer!r}.")
        weights = at_target(ops.mean(maps[layer or maps.cross[-1]], axis=1))
        return weights * ops.cast(target != self.pad_id, weights.dtype)[:, :, None]

    def _read(self, sources, target, prompt):
        """Runs prompts and targets at once.

        Returns:
            (logits `[B, P + T - 1, V]`, function that takes from such a tensor what stands before each target token).
        """
        context, prompt = self.begin(sources, prompt)
        check_rows("target", target, prompt.shape[0])
        _, lengths = right_padded(prompt, self.pad_id)
        check_prompts(lengths)
        ids, _ = right_padded(ops.concatenate([prompt, target], axis=1), self.pad_id)
        earlier = ops.cumsum(ops.cast(target != self.pad_id, "int32"), axis=1) - 1
        places = ops.maximum(lengths[:, None] - 1 + earlier, 0)  # [B, T]

        def at_target(tensor):
            return take_columns(tensor, places)

        return self.parts.decode(ids[:, :-1], context), at_target


class CachedStep:
    """A step for the searches out of `decode(tokens, context) -> logits`, with a cache of `length` slots a row."""

    def __init__(self, decode, context, length, pad_id):
        self.decode, self.context, self.length, self.pad_id = decode, context, length, pad_id

    def __call__(self, tokens, index, cache):
        context = self.context if cache is None else cache["context"]
        real = ops.sum(ops.cast(tokens != self.pad_id, "int32"), axis=1)
        with DecodingScope(None if cache is None else cache["layers"], index, self.length, real) as scope:
            logits = self.decode(tokens, context)
        return logits, {"context": context, "layers": scope.cache}

    def repeat(self, cache, times):
        return self._many(cache, times, DecodingScope.repeat(cache["layers"], times))

    def widen(self, cache, width):
        return self._many(cache, width, DecodingScope.widen(cache["layers"], width, self.length))

    def _many(self, cache, times, layers):
        context = keras.tree.map_structure(lambda tensor: ops.repeat(tensor, times, axis=0), cache["context"])
        return {"context": context, "layers": layers}

    def reorder(self, cache, rows):  # the rows of a group have the same context
        return {**cache, "layers": DecodingScope.reorder(cache["layers"], rows)}
