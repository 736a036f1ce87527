"""Text in, text out: a model and its tokenizers as one thing that maps strings to strings.

TensorFlow is imported where it is used, so that this module works without it. Letters: `B` batch.
"""

import logging

import keras

from keras_transformer.checks import check_count
from keras_transformer.decoding import Generator
from keras_transformer.export import write_saved_model
from keras_transformer.tokenizer import Tokenizer, decode_strings

log = logging.getLogger("keras_transformer")


def _embedded(model, name):
    """For how many ids the embeddings that read a model's input `name` have vectors; infinity if none reads it."""
    embeddings = [layer for layer in model.layers if isinstance(layer, keras.layers.Embedding)]
    read = {e.input_dim for e in embeddings for node in e._inbound_nodes for t in node.input_tensors if t.name == name}
    return min(read, default=float("inf"))


@keras.saving.register_keras_serializable(package="keras_transformer")
class Translator(keras.Model):
    """Strings to strings: a source tokenizer, a model that writes with a cache, and a target tokenizer, in one graph.

    Called with a list of strings it returns a list of strings. `export` writes the same graph as a SavedModel, `save` a
    `.keras` file with model and tokenizers in it. Each row is answered by itself: one whose source is longer than
    `max_source_length` is refused, with the text `""`, the score `-inf` and the length 0, and others are unharmed.

    Args:
        model: functional `keras.Model` `{"source", "target"} -> logits`; see `Generator`.
        source_tokenizer: `Tokenizer` of the source; the model saw its ids with the end behind them
            (`pair_batches` puts it there).
        target_tokenizer: `Tokenizer` of the target.
        max_length: int, the most tokens to write, the end among them.
        max_source_length: int, the most tokens of a source, the end among them.
        batch_size: int, how many strings of a list go through the model at once.

    Call arguments:
        text: list of strings; or string tensor `[B]`.

    Returns:
        list of strings; for a tensor a dict of `text` string `[B, 1]`, `score` float32 `[B, 1]` (log-probability, in
        nats) and `length` int32 `[B, 1]` (tokens written, the end among them).

    Raises:
        ValueError: as `Generator`; if the model's vocabulary is smaller than a tokenizer's; on a bare string.

    Example:
    ```python
    import keras_transformer as kt
    tokenizer = kt.Tokenizer.train(["a b c d e"], kind="word")
    model = kt.build_transformer(tokenizer.vocab_size, **kt.PRESETS["tiny"])
    translator = kt.Translator(model, tokenizer, tokenizer, max_length=8)
    assert len(translator(["a b", "c", ""])) == 3
    ```
    """

    def __init__(
        self,
        model: keras.Model,
        source_tokenizer: Tokenizer,
        target_tokenizer: Tokenizer,
        max_length: int = 128,
        max_source_length: int = 512,
        batch_size: int = 128,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.max_length = check_count("max_length", max_length)
        self.max_source_length = check_count("max_source_length", max_source_length)
        self.batch_size = check_count("batch_size", batch_size)
        self.model = model
        self.source_tokenizer = source_tokenizer
        self.target_tokenizer = target_tokenizer
        self._generate = Generator(
            model, max_length, target_tokenizer.start_id, target_tokenizer.end_id, target_tokenizer.pad_id
        )
        logits, vectors = model.output.shape[-1], _embedded(model, "source")
        if logits < target_tokenizer.vocab_size:
            raise ValueError(
                "The model must have a logit for each token of `target_tokenizer`; "
                f"got {logits} for {target_tokenizer.vocab_size}."
            )
        if vectors < source_tokenizer.vocab_size:
            raise ValueError(
                "The model must have a vector for each token of `source_tokenizer`; "
                f"got {vectors} for {source_tokenizer.vocab_size}."
            )
        self._run = self._compile()
        self.built = True

    def _compile(self):
        """`call` as one graph for every batch and length, behind a plain function, which SavedModel leaves out."""
        import tensorflow as tf

        graph = tf.function(self.call, input_signature=[self._signature()])
        return lambda text: graph(text)

    @staticmethod
    def _signature():
        import tensorflow as tf

        return tf.TensorSpec([None], tf.string, name="text")

    def __call__(self, text):
        if isinstance(text, str):
            raise ValueError(f"Texts come as a list of strings, also a single one; got the string {text!r}.")
        return self.translate(text) if isinstance(text, (list, tuple)) else super().__call__(text)

    def translate(self, texts):
        """List of strings -> list of strings."""
        import tensorflow as tf

        outputs, refused = [], 0
        for start in range(0, len(texts), self.batch_size):
            found = self._run(tf.constant(texts[start : start + self.batch_size], tf.string))
            outputs += decode_strings(found["text"][:, 0])
            refused += int(tf.reduce_sum(tf.cast(found["length"] == 0, tf.int32)))
        if refused:
            log.warning("%d of %d texts refused: longer than %d tokens.", refused, len(texts), self.max_source_length)
        return outputs

    def call(self, text):
        import tensorflow as tf

        ids = self.source_tokenizer.tokenize(text, end=True)
        lengths = ids.row_lengths()
        fits = lengths <= self.max_source_length
        kept = tf.boolean_mask(ids.flat_values, tf.repeat(fits, lengths))
        ids = tf.RaggedTensor.from_row_lengths(kept, tf.where(fits, lengths, 0))  # a refused row is an empty one
        found = self._generate({"source": ids.to_tensor(self.source_tokenizer.pad_id)})
        return {
            "text": tf.where(fits, self.target_tokenizer.detokenize(found["ids"]), "")[:, None],
            "score": tf.where(fits, found["score"], -float("inf"))[:, None],
            "length": tf.where(fits, found["length"], 0)[:, None],
        }

    def export(self, filepath):
        """Writes a SavedModel; a failed write leaves an old one whole.

        Its signature `serving_default` takes `text` string `[B]` and returns `text`, `score` and `length` as above. To
        load it, a process imports `tensorflow` and `tensorflow_text`, nothing else.
        """
        write_saved_model(filepath, self, {"serving_default": (self.call, [self._signature()])})

    def get_config(self):
        parts = {name: getattr(self, name) for name in ("model", "source_tokenizer", "target_tokenizer")}
        sizes = {name: getattr(self, name) for name in ("max_length", "max_source_length", "batch_size")}
        parts = {name: keras.saving.serialize_keras_object(part) for name, part in parts.items()}
        return {"name": self.name, **parts, **sizes}

    @classmethod
    def from_config(cls, config):
        return cls(**{name: keras.saving.deserialize_keras_object(value) for name, value in config.items()})
