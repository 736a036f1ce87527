"""Text in, text out: a tokenizer that lives inside models, and a translator around a model and two tokenizers.

TensorFlow and tensorflow-text are imported where they are used, so that this module, and with it `load_model`, works
without them. Letters: `B` batch, `T` tokens.
"""

import base64
import hashlib
import io
import logging
import re

import keras

from keras_transformer.checks import check_count
from keras_transformer.decoding import Generator
from keras_transformer.export import write_saved_model

KINDS = ("unigram", "bpe", "char", "word")
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # U+2581, how SentencePiece writes a space

log = logging.getLogger("keras_transformer")


@keras.saving.register_keras_serializable(package="keras_transformer")
class Tokenizer(keras.layers.Layer):
    """Strings to token ids and back, in a TensorFlow graph, by SentencePiece.

    Kudo and Richardson 2018, https://arxiv.org/abs/1808.06226, through tensorflow-text. Text is not normalized and
    spaces are kept: with the kinds `"unigram"`, `"bpe"` and `"char"` valid UTF-8 comes back as it went in (but for the
    character U+2581, SentencePiece's own sign for a space), since what is not in the vocabulary is spelled in bytes.
    Invalid bytes come back as U+FFFD. With the kind `"word"`, for closed sets such as phonemes, text is split at spaces
    and other words become the unknown id. Ids: padding 0, unknown 1, start 2, end 3; no text becomes one of 0, 2, 3.

    Made by `Tokenizer.train`. The SentencePiece model is part of the configuration, and so of a `.keras` file and of a
    SavedModel.

    Args:
        model: a serialized SentencePiece model, as bytes or as their base64 string.

    Call arguments:
        texts: list of strings, or string tensor `[B]`.

    Returns:
        int32 tensor `[B, T]`, padded with 0 to the longest row.

    Raises:
        ValueError: if the SentencePiece model has other special ids.

    Example:
    ```python
    import keras_transformer as kt
    tokenizer = kt.Tokenizer.train(["to be", "or not to be"], kind="word")
    ids = tokenizer(["not to be", "be"])
    assert ids.shape == (2, 3)
    assert tokenizer.decode(ids) == ["not to be", "be"]
    ```
    """

    pad_id, unknown_id, start_id, end_id = 0, 1, 2, 3

    def __init__(self, model, **kwargs):
        super().__init__(**{"trainable": False, **kwargs, "dtype": "int32"})
        self._convert_input_args = False  # Keras would look for floats among the strings
        self._allow_non_tensor_positional_args = True
        self.model = model if isinstance(model, str) else base64.b64encode(model).decode("ascii")
        self._tokenizer = self._load()
        self.vocab_size = int(self._tokenizer.vocab_size())
        self.built = True

    def _load(self):
        import sentencepiece

        model = base64.b64decode(self.model)
        pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
        ids = pieces.pad_id(), pieces.unk_id(), pieces.bos_id(), pieces.eos_id()
        if ids != (self.pad_id, self.unknown_id, self.start_id, self.end_id):
            raise ValueError(f"A tokenizer's ids of padding, unknown, start and end must be 0, 1, 2 and 3; got {ids}.")
        return _sentencepiece_in_graph(model)

    @classmethod
    def train(cls, texts, vocab_size=None, kind="unigram", name=None, **options):
        """Learns a vocabulary from text.

        Args:
            texts: iterable of strings, read once.
            vocab_size: int, the most pieces, special ones and 256 bytes among them; None for 8000, or for all there are
                where `kind` is `"char"` or `"word"`. A small corpus gives fewer.
            kind: `"unigram"` (Kudo 2018, https://arxiv.org/abs/1804.10959), `"bpe"` (Sennrich et al. 2016,
                https://arxiv.org/abs/1508.07909), `"char"` or `"word"`.
            name: str, the layer's name.
            **options: further options of `sentencepiece.SentencePieceTrainer.train`.

        Returns:
            A `Tokenizer`.

        Raises:
            ValueError: on another `kind`, no text, or a `vocab_size` that is too small for the kind and the text.
        """
        import sentencepiece

        if kind not in KINDS:
            raise ValueError(f"`kind` must be one of {KINDS}; got {kind!r}.")
        special = {"pad_id": cls.pad_id, "unk_id": cls.unknown_id, "bos_id": cls.start_id, "eos_id": cls.end_id}
        exact = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
        # SentencePiece says which size is the least only where the special ids fit
        size = {"vocab_size": max(vocab_size or 8000, len(special) + 1), "hard_vocab_limit": False}
        if kind in ("char", "word"):
            least = len(special) + (256 if kind == "char" else 0) + 1
            size["use_all_vocab"] = vocab_size is None
        else:
            least = 1
        if vocab_size is not None and check_count("vocab_size", vocab_size) < least:
            raise ValueError(f"`vocab_size` must be at least {least} for kind {kind!r}; got {vocab_size}.")
        if kind != "word":
            exact.update(byte_fallback=True, add_dummy_prefix=False)
        file = io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(texts),
                model_writer=file,
                model_type=kind,
                max_sentence_length=2**30,  # bytes; the default skips longer texts
                minloglevel=2,
                **{**special, **exact, **size, **options},
            )
        except RuntimeError as error:
            raise ValueError(_explain(str(error), kind, vocab_size)) from error
        return cls(file.getvalue(), name=name)

    def tokenize(self, texts, end=False):
        """List of strings or string tensor `[B]` -> ragged int32 tensor `[B, (T)]`, with the end behind it or not."""
        import tensorflow as tf

        ids = self._tokenizer.tokenize(tf.convert_to_tensor(texts, tf.string))
        return tf.concat([ids, tf.fill([ids.nrows(), 1], self.end_id)], axis=1) if end else ids

    def detokenize(self, ids):
        """int tensor `[B, T]` (or ragged) -> string tensor `[B]`: each row up to its end, without special tokens."""
        import tensorflow as tf

        ids = ids.to_tensor(self.pad_id) if isinstance(ids, tf.RaggedTensor) else tf.convert_to_tensor(ids)
        ids = tf.cast(ids, tf.int32)
        is_behind_end = tf.cumsum(tf.cast(ids == self.end_id, tf.int32), axis=1) > 0
        is_text = ~is_behind_end & (ids != self.pad_id) & (ids != self.start_id)
        text = self._tokenizer.detokenize(tf.ragged.boolean_mask(ids, is_text))
        return tf.strings.regex_replace(text, SPACE, " ")  # where no text had a space, it is spelled in bytes

    def decode(self, ids):
        """int tensor `[B, T]` -> list of Python strings; half a character at a row's end becomes U+FFFD."""
        return decode_strings(self.detokenize(ids))

    def pieces(self, ids):
        """int tensor of any shape -> string tensor of the same shape: how each token is written in the vocabulary."""
        return self._tokenizer.id_to_string(ids)

    def call(self, texts):
        return self.tokenize(texts).to_tensor(self.pad_id)

    def compute_output_spec(self, texts):
        return keras.KerasTensor((*texts.shape, None), dtype="int32")

    def get_config(self):
        return {**super().get_config(), "model": self.model}


def _sentencepiece_in_graph(model):
    """tensorflow-text's tokenizer, with a model that has a name and so outlives the kernel that made it.

    Without a name it is its kernel's, and lost when TensorFlow drops kernels, as `keras.utils.set_random_seed` makes it.
    """
    import tensorflow as tf
    from tensorflow_text.python.ops import sentencepiece_tokenizer as ops

    class NamedModel(tf.saved_model.experimental.TrackableResource):
        def _create_resource(self):
            name = f"sentencepiece_{hashlib.sha256(model).hexdigest()}"
            return ops.gen_sentencepiece_tokenizer.sentencepiece_op(model=model, shared_name=name)

    with tf.init_scope():
        tokenizer = ops.SentencepieceTokenizer(model, out_type=tf.int32)
        tokenizer._model_resource = NamedModel()
    return tokenizer


def _explain(error, kind, vocab_size):
    """SentencePiece's words for a corpus or size that does not do, as a rule and what came."""
    least = re.search(r"smaller than required_chars. \d+ vs (\d+)", error)
    if least:
        return f"`vocab_size` must be at least {least[1]} for kind {kind!r} and this text; got {vocab_size}."
    if "sentences_.empty()" in error:
        return "`texts` must hold at least one string that is not empty; got none."
    return f"SentencePiece could not train kind {kind!r} with vocab_size {vocab_size}: {error}"


def decode_strings(strings):
    """String tensor `[B]` -> list of Python strings."""
    return [text.decode("utf-8", "replace") for text in strings.numpy().tolist()]


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
        ValueError: as `Generator`; if the model's vocabulary is smaller than a tokenizer's.

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
        model,
        source_tokenizer,
        target_tokenizer,
        max_length=128,
        max_source_length=512,
        batch_size=128,
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
