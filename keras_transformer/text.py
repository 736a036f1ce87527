"""Text in, text out: a model and its tokenizers as one thing that maps strings to strings.

TensorFlow is imported where it is used, so that this module works without it. Letters: `B` batch, `n` outputs of a
text, `L` longest output.
"""

import math

import keras

from keras_transformer.calls import OPTIONS, Option
from keras_transformer.checks import check_count
from keras_transformer.tokenizer import Tokenizer, framed, rows_that
from keras_transformer.writer import TextWriter


def _embedded(model, name):
    """For how many ids the embeddings that read a model's input `name` have vectors; infinity if none reads it."""
    embeddings = [layer for layer in model.layers if isinstance(layer, keras.layers.Embedding)]
    read = {e.input_dim for e in embeddings for node in e._inbound_nodes for t in node.input_tensors if t.name == name}
    return min(read, default=math.inf)


@keras.saving.register_keras_serializable(package="keras_transformer")
class Translator(TextWriter):
    """Strings to strings: a source tokenizer, a model that writes with a cache, and a target tokenizer, in one graph.

    Called with a list of strings it returns a list of strings. `export` writes the same graph as a SavedModel, `save` a
    `.keras` file with model and tokenizers in it. Each row is answered by itself: one whose source is longer than
    `max_source_length` is refused, with the text `""`, the score `-inf` and the length 0, and others are unharmed.

    Args:
        model: functional `keras.Model` `{"source", "target"} -> logits`; see `Generator`.
        source_tokenizer: `Tokenizer` of the source; the model saw its ids with the end behind them
            (`pair_batches` puts it there).
        target_tokenizer: `Tokenizer` of the target.
        max_length: int, `L`, the most tokens to write, the end among them.
        max_source_length: int, the most tokens of a source, the end among them.
        batch_size: int, how many strings of a list go through the model at once.
        width: int, beams, at least `n`; 1 is greedy.
        n: int, outputs of each text: the best of a beam, or samples.
        options: dict, what calls do where they say nothing else: their options (below), and `no_repeat_ngram` (int),
            `forbidden_ids` (list of ints) and `alignment` (bool, whether outputs say where the model looked).

    Call arguments:
        text: list of strings; or string tensor `[B]`.
        prefix: the same, what each output must begin with; it is part of the text, not of score and length.
        max_length, min_length: int, the most and fewest tokens to write, `max_length` at most the translator's.
        max_length_ratio, min_length_ratio: float, the same as a share of the source's tokens (rounded up); the
            narrower limit holds.
        length_penalty: float, see `beam`.
        temperature: float; 0 for beam search, above 0 for sampling, see `sample`.
        top_k, top_p, min_p, seed: numbers, see `sample`.
        repetition_penalty: float above 0, see `filters.repetition_penalty`.

    Returns:
        list of strings, the first output of each; for a tensor a dict of `text` string, `score` float32
        (log-probability, in nats) and `length` int32 (tokens written, the end among them), each `[B, n]`; `ids` int32
        `[B, n, L]`; and with `alignment` its `alignment` int32 `[B, n, L]`, the source token at which the last
        cross-attention looks most (its heads averaged) as each token is written, -1 behind the end.

    Raises:
        ValueError: as `Generator`; if the model's vocabulary is smaller than a tokenizer's; on a bare string; on
            options that are unknown or out of range.

    Example:
    ```python
    import keras_transformer as kt
    tokenizer = kt.Tokenizer.train(["a b c d e"], kind="word")
    model = kt.build_transformer(tokenizer.vocab_size, **kt.PRESETS["tiny"])
    translator = kt.Translator(model, tokenizer, tokenizer, max_length=8, n=2)  # train the model first
    answers = translator(["a b", "c"])
    assert isinstance(answers[0], str) and len(answers) == 2
    best, second = translator.n_best(["a b"])[0]
    assert translator.score(["a b"], ["c d"])[0].tokens[-1] == "</s>"
    pieces = list(translator.stream(["a b"], temperature=0.7, seed=1))
    ```
    """

    TEXTS = ("text", "prefix")
    NUMBERS = {
        **OPTIONS,
        "max_length_ratio": Option("float32", math.inf, most=math.inf, above=True),
        "min_length_ratio": Option("float32", 0.0),
    }
    FIXED = (*TextWriter.FIXED, "alignment")

    def __init__(
        self,
        model: keras.Model,
        source_tokenizer: Tokenizer,
        target_tokenizer: Tokenizer,
        max_length: int = 128,
        max_source_length: int = 512,
        batch_size: int = 128,
        width: int = 4,
        n: int = 1,
        options: dict | None = None,
        **kwargs,
    ):
        super().__init__(model, target_tokenizer, ["source"], max_length, batch_size, width, n, options, **kwargs)
        self.max_source_length = check_count("max_source_length", max_source_length)
        self.source_tokenizer = source_tokenizer
        self.target_tokenizer = target_tokenizer
        vectors = _embedded(model, "source")
        if vectors < source_tokenizer.vocab_size:
            raise ValueError(
                "The model must have a vector for each token of `source_tokenizer`; "
                f"got {vectors} for {source_tokenizer.vocab_size}."
            )

    def prepare(self, text, prefix=None):
        import tensorflow as tf

        ids = self.source_tokenizer.tokenize(text, end=True)
        fits = ids.row_lengths() <= self.max_source_length
        prompt = None
        if prefix is not None:
            prefix = self.target_tokenizer.tokenize(prefix)
            fits &= prefix.row_lengths() < self.max_length
            prompt = framed(rows_that(fits, prefix), self.target_tokenizer.start_id)
            prompt = prompt.to_tensor(self.target_tokenizer.pad_id)
        source = rows_that(fits, ids).to_tensor(self.source_tokenizer.pad_id)
        missing = tf.maximum(1 - tf.shape(source)[1], 0)  # attention needs a column to look at
        source = tf.pad(source, [[0, 0], [0, missing]], constant_values=self.source_tokenizer.pad_id)
        return {"source": source}, prompt, fits

    def limits(self, sources, options):
        import tensorflow as tf

        options = {"max_length": self.max_length, "min_length": 0, **options}
        most, least = options.pop("max_length_ratio", math.inf), options.pop("min_length_ratio", 0.0)
        if isinstance(most, float) and isinstance(least, float) and (most, least) == (math.inf, 0):
            return options
        is_token = tf.cast(sources["source"] != self.source_tokenizer.pad_id, tf.float32)
        tokens = tf.maximum(tf.reduce_sum(is_token, axis=1), 1.0)  # a refused row has none
        tokens *= 1 - 1e-6  # 0.6 * 25 is above 15 in float32
        most = tf.minimum(tf.math.ceil(most * tokens), tf.cast(options["max_length"], tf.float32))
        least = tf.maximum(tf.math.ceil(least * tokens), tf.cast(options["min_length"], tf.float32))
        return {**options, "max_length": tf.cast(most, tf.int32), "min_length": tf.cast(least, tf.int32)}

    def as_text(self, ids, prompt):
        import tensorflow as tf

        return self.target_tokenizer.detokenize(ids if prompt is None else tf.concat([prompt, ids], axis=1))

    def get_config(self):
        parts = {name: getattr(self, name) for name in ("model", "source_tokenizer", "target_tokenizer")}
        parts = {name: keras.saving.serialize_keras_object(part) for name, part in parts.items()}
        return {**parts, **self._sizes(), "max_source_length": self.max_source_length}


@keras.saving.register_keras_serializable(package="keras_transformer")
class TextGenerator(TextWriter):
    """Continues strings: a tokenizer and a decoder-only model that writes with a cache, in one graph.

    Called with a list of strings it returns what follows each, as a list of strings. `export` and `save` are those of
    `Translator`. A text longer than `max_prompt_length` is refused alone, with `""`, the score `-inf` and the length 0.

    Args:
        model: functional `keras.Model` from ids to logits, `build_language_model`'s or composed by hand; see
            `Generator`. It saw texts with the start before them, and the end behind those that end.
        tokenizer: `Tokenizer` of the text.
        max_length: int, `L`, the most tokens to write, the end among them.
        max_prompt_length: int, the most tokens of a text, the start among them.
        batch_size, width, n: as `Translator`; without a `width`, it is `n`.
        options: dict as `Translator`'s, but for `alignment`.

    Call arguments:
        text: list of strings; or string tensor `[B]`.
        max_length, min_length, length_penalty, temperature, top_k, top_p, min_p, seed, repetition_penalty: as
            `Translator`.

    Returns:
        as `Translator`, without `alignment`.

    Raises:
        ValueError: as `Translator`.

    Example:
    ```python
    import keras_transformer as kt
    tokenizer = kt.Tokenizer.train(["to be or not to be"], kind="char")
    model = kt.build_language_model(tokenizer.vocab_size, **kt.PRESETS["tiny"])  # train it first
    write = kt.TextGenerator(model, tokenizer, max_length=8)
    assert len(write(["to be", "or"], temperature=0.8, top_p=0.9, seed=1)) == 2
    for pieces in write.stream(["to be"]):
        print(pieces[0], end="")
    ```
    """

    def __init__(
        self,
        model: keras.Model,
        tokenizer: Tokenizer,
        max_length: int = 128,
        max_prompt_length: int = 512,
        batch_size: int = 128,
        width: int | None = None,
        n: int = 1,
        options: dict | None = None,
        **kwargs,
    ):
        super().__init__(model, tokenizer, [], max_length, batch_size, width, n, options, **kwargs)
        self.max_prompt_length = check_count("max_prompt_length", max_prompt_length)
        self.tokenizer = tokenizer

    def prepare(self, text):
        ids = self.tokenizer.tokenize(text)
        fits = ids.row_lengths() < self.max_prompt_length
        prompt = framed(rows_that(fits, ids), self.tokenizer.start_id)
        return None, prompt.to_tensor(self.tokenizer.pad_id), fits

    def get_config(self):
        parts = {name: keras.saving.serialize_keras_object(getattr(self, name)) for name in ("model", "tokenizer")}
        return {**parts, **self._sizes(), "max_prompt_length": self.max_prompt_length}
