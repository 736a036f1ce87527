"""BERT's tokenizer, WordPiece, in a TensorFlow graph.

TensorFlow and tensorflow-text are imported where they are used. Letters: `B` batch, `T` tokens.
"""

import pathlib

import keras

from keras_transformer.checks import check_count
from keras_transformer.tokenizer import MASK, framed

SPECIAL = {"pad_id": "[PAD]", "unknown_id": "[UNK]", "start_id": "[CLS]", "end_id": "[SEP]"}
SIGN = (  # a word by itself: what ASCII has beside letters and digits, Unicode's punctuation, a Chinese character
    r"[!-/:-@\[-`{-~\p{P}\x{3400}-\x{4DBF}\x{4E00}-\x{9FFF}\x{F900}-\x{FAFF}"
    r"\x{20000}-\x{2A6DF}\x{2A700}-\x{2CEAF}\x{2F800}-\x{2FA1F}]"
)
LONGEST_WORD = 100  # characters; longer ones are unknown to BERT


@keras.saving.register_keras_serializable(package="keras_transformer")
class WordPiece(keras.layers.Layer):
    """Strings to ids of a BERT vocabulary, in a TensorFlow graph.

    Wu et al. 2016, https://arxiv.org/abs/1609.08144, as in BERT (Devlin et al. 2018,
    https://arxiv.org/abs/1810.04805): control characters go, white space, punctuation and each Chinese character part
    words, and a word is spelled by the longest pieces, the first at its beginning. Ids are those of Hugging Face's
    tokenizers, but for characters that one version of Unicode knows and another does not; and a text that spells a
    special token, as `"[SEP]"`, is text. What is left out (case, accents, spaces) cannot be put back: there is no way
    from ids to the text.

    Args:
        vocabulary: list of strings, the pieces in the order of their ids; or the path of a `vocab.txt`, a piece a line.
        lower_case: bool, whether letters become small (the "uncased" models); `do_lower_case` of a
            `tokenizer_config.json`.
        strip_accents: bool, whether letters lose their accents; None for as `lower_case`.
        max_length: int, the most tokens of a row, start and end among them: longer texts are cut; None for no limit.

    Call arguments:
        texts: list of strings, or string tensor `[B]`.
        start, end: bool, whether the start (`[CLS]`) stands before each text and the end (`[SEP]`) behind it.

    Returns:
        int32 tensor `[B, T]`, padded to the longest row.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the vocabulary lacks a special token, or has a piece twice.

    Example:
    ```python
    import keras_transformer as kt
    tokenizer = kt.WordPiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "to", "be", "##ing", "!"])
    assert tokenizer(["Be!", "to being"]).numpy().tolist() == [[2, 5, 7, 3, 0], [2, 4, 5, 6, 3]]
    ```
    """

    def __init__(
        self,
        vocabulary: list | str,
        lower_case: bool = True,
        strip_accents: bool | None = None,
        max_length: int | None = None,
        **kwargs,
    ):
        super().__init__(**{"trainable": False, **kwargs, "dtype": "int32"})
        self._convert_input_args = False  # Keras would look for floats among the strings
        self._allow_non_tensor_positional_args = True
        if isinstance(vocabulary, (str, pathlib.Path)):
            vocabulary = pathlib.Path(vocabulary).read_text(encoding="utf-8").removesuffix("\n").split("\n")
        self.vocabulary, self.lower_case = list(vocabulary), bool(lower_case)
        self.strip_accents = self.lower_case if strip_accents is None else bool(strip_accents)
        self.max_length = None if max_length is None else check_count("max_length", max_length, least=2)
        places = {piece: i for i, piece in enumerate(self.vocabulary)}
        lacking = [piece for piece in SPECIAL.values() if piece not in places]
        if lacking or len(places) != len(self.vocabulary):
            raise ValueError(
                f"A vocabulary must hold {list(SPECIAL.values())}, and each piece once; got {len(self.vocabulary)} "
                f"pieces, {len(places)} of them different, without {lacking}."
            )
        self.vocab_size = len(self.vocabulary)
        for name, piece in SPECIAL.items():
            setattr(self, name, places[piece])
        self.mask_id = places.get(MASK, self.unknown_id)
        self._tokenizer = self._load()
        self.built = True

    def _load(self):
        import tensorflow as tf
        import tensorflow_text

        with tf.init_scope():
            ids = tf.lookup.KeyValueTensorInitializer(self.vocabulary, tf.range(self.vocab_size, dtype=tf.int64))
            table = tf.lookup.StaticVocabularyTable(ids, num_oov_buckets=1)
            most = 4 * LONGEST_WORD  # bytes, in which TensorFlow counts
            return tensorflow_text.WordpieceTokenizer(table, max_bytes_per_word=most, token_out_type=tf.int32)

    def tokenize(self, texts, start=False, end=False):
        """List of strings or string tensor `[B]` -> ragged int32 tensor `[B, (T)]`, with a start and an end or not."""
        import tensorflow as tf
        import tensorflow_text

        texts = tf.strings.unicode_transcode(texts, "UTF-8", "UTF-8")  # bytes that are none become U+FFFD
        texts = tf.strings.regex_replace(texts, r"[\t\n\r\p{Z}]", " ")
        texts = tf.strings.regex_replace(texts, r"[\x{0}\x{FFFD}\p{C}]", "")
        if self.strip_accents:
            texts = tf.strings.regex_replace(tensorflow_text.normalize_utf8(texts, "NFD"), r"\p{Mn}", "")
        if self.lower_case:  # of each letter alone: TensorFlow has another small sigma for the end of a word
            texts = tf.strings.lower(tf.strings.regex_replace(texts, "Σ", "σ"), encoding="utf-8")
        words = tensorflow_text.regex_split(texts, rf"\s+|{SIGN}", SIGN)
        is_long = tf.strings.length(words.flat_values, unit="UTF8_CHAR") > LONGEST_WORD
        words = words.with_flat_values(tf.where(is_long, "\0", words.flat_values))  # no vocabulary can spell it
        ids = self._tokenizer.tokenize(words).merge_dims(1, 2)
        if self.max_length is not None:
            ids = ids[:, : self.max_length - bool(start) - bool(end)]
        return framed(ids, self.start_id if start else None, self.end_id if end else None)

    def call(self, texts, start=True, end=True):
        return self.tokenize(texts, start, end).to_tensor(self.pad_id)

    def pieces(self, ids):
        """int tensor of any shape -> string tensor of the same shape: how each token is written in the vocabulary."""
        import tensorflow as tf

        return tf.gather(self.vocabulary, ids)

    def compute_output_spec(self, texts, start=True, end=True):
        return keras.KerasTensor((*texts.shape, None), dtype="int32")

    def get_config(self):
        names = ("vocabulary", "lower_case", "strip_accents", "max_length")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}
