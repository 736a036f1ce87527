"""A tokenizer that lives inside models: SentencePiece in a TensorFlow graph.

TensorFlow and tensorflow-text are imported where they are used, so that this module, and with it `load_model`, works
without them. Letters: `B` batch, `T` tokens.
"""

import base64
import hashlib
import io
import re
from collections.abc import Iterable

import keras
import numpy as np

from keras_transformer.checks import check_count

KINDS = ("unigram", "bpe", "char", "word")
MASK = "[MASK]"  # stands for a hidden token, in vocabularies that have it
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # U+2581, how SentencePiece writes a space


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
        start, end: bool, whether the start stands before each text and the end behind it.

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

    def __init__(self, model: bytes | str, **kwargs):
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
        self.mask_id = pieces.piece_to_id(MASK)  # of one without it, that of unknown tokens
        return _sentencepiece_in_graph(model)

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        vocab_size: int | None = None,
        kind: str = "unigram",
        name: str | None = None,
        **options,
    ) -> "Tokenizer":
        """Learns a vocabulary from text.

        Args:
            texts: iterable of strings, read once.
            vocab_size: int, the most pieces, special ones and 256 bytes among them; None for 8000, or for all there are
                where `kind` is `"char"` or `"word"`. A small corpus gives fewer.
            kind: `"unigram"` (Kudo 2018, https://arxiv.org/abs/1804.10959), `"bpe"` (Sennrich et al. 2016,
                https://arxiv.org/abs/1508.07909), `"char"` or `"word"`.
            name: str, the layer's name.
            **options: further options of `sentencepiece.SentencePieceTrainer.train`; with
                `user_defined_symbols=["[MASK]"]` there is a token for `masked_batches`, the attribute `mask_id`.

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

    def tokenize(self, texts, start=False, end=False):
        """List of strings or string tensor `[B]` -> ragged int32 tensor `[B, (T)]`, with a start and an end or not."""
        import tensorflow as tf

        ids = self._tokenizer.tokenize(tf.convert_to_tensor(texts, tf.string))
        return framed(ids, self.start_id if start else None, self.end_id if end else None)

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

    def call(self, texts, start=False, end=False):
        return self.tokenize(texts, start, end).to_tensor(self.pad_id)

    def compute_output_spec(self, texts, start=False, end=False):
        return keras.KerasTensor((*texts.shape, None), dtype="int32")

    def get_config(self):
        return {**super().get_config(), "model": self.model}


def _sentencepiece_in_graph(model):
    """tensorflow-text's tokenizer, with a model that has a name and so outlives the kernel that made it.

    Without a name it is its kernel's, and lost when TensorFlow drops kernels, as `keras.utils.set_random_seed` makes
    it do.
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
    """String tensor or array `[B]` -> list of Python strings."""
    return [text.decode("utf-8", "replace") for text in np.asarray(strings).tolist()]


def framed(ids, start_id=None, end_id=None):
    """Ragged ids `[B, (T)]` with a start before each row and an end behind it, where they are given."""
    import tensorflow as tf

    edges = [[] if edge is None else [tf.fill([ids.nrows(), 1], edge)] for edge in (start_id, end_id)]
    return tf.concat([*edges[0], ids, *edges[1]], axis=1)


def rows_that(fits, ids):
    """Ragged ids `[B, (T)]`, without the tokens of rows that do not fit."""
    import tensorflow as tf

    lengths = ids.row_lengths()
    return tf.RaggedTensor.from_row_lengths(
        tf.boolean_mask(ids.flat_values, tf.repeat(fits, lengths)), tf.where(fits, lengths, 0)
    )
