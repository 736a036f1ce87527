"""Scores of what the model writes, at the end of each epoch of `fit`.

TensorFlow, sacrebleu and rapidfuzz are imported where they are used.
"""

import importlib
import itertools
import os
import textwrap

import keras
import numpy as np

from keras_transformer.checks import check_count

NEEDS = {"bleu": "sacrebleu", "chrf": "sacrebleu", "ter": "sacrebleu", "exact_match": None, "edit_rate": "rapidfuzz"}


def corpus_score(name, outputs, references):
    """The score `name`, one of `NEEDS`, of a list of outputs against a list of lists of references, as a float."""
    if name == "exact_match":
        return sum(output in right for output, right in zip(outputs, references)) / len(outputs)
    if name == "edit_rate":
        return _edit_rate(outputs, references)
    from sacrebleu.metrics import BLEU, CHRF, TER

    # `force` changes no number: it is silent about texts that look tokenized
    metric = {"bleu": lambda: BLEU(force=True), "chrf": CHRF, "ter": TER}[name]()
    streams = list(itertools.zip_longest(*references))  # None where a source has fewer: "" would count as a reference
    return float(metric.corpus_score(outputs, streams).score)


def _edit_rate(outputs, references):
    """Edits of tokens between spaces, over the tokens of the nearest references."""
    from rapidfuzz.distance import Levenshtein

    edits = length = 0
    for output, right in zip(outputs, references):
        tokens = map(str.split, right)
        found = [(Levenshtein.distance(output.split(), reference), len(reference)) for reference in tokens]
        edits, length = np.add((edits, length), min(found, key=lambda pair: pair[0]))
    return float(edits / max(length, 1))


class GenerationScores(keras.callbacks.Callback):
    """Scores what the model writes at the end of each epoch, and puts the scores into the logs of `fit`.

    Callbacks behind it in the list see them (`ModelCheckpoint(monitor="val_bleu", mode="max")`, `EarlyStopping`,
    `CSVLogger`), and so do the progress bar and `History`; list it before them. Monitors need their `mode`. With
    `every` above 1 the first epoch of a `fit` (also of one that `Resume` goes on with) is scored, and each whose number
    is a multiple of `every`; the epochs between repeat the last scores, which is no improvement to a monitor: it saves
    nothing, and `patience` goes on counting epochs.

    The weights are those of the moment. For scores, and checkpoints, of an exponential moving average, list
    `SwapEMAWeights(swap_on_epoch=True)` before this one; listed behind it, or without `swap_on_epoch`, the scores are
    those of the plain weights, whatever weights the validation ran on. (Where `EarlyStopping` ends such a `fit`, Keras
    leaves the plain weights in the model, unless it is told `restore_best_weights=True`.)

    Scores, of the whole sample: `"bleu"`, `"chrf"` and `"ter"` are sacrebleu's, with its defaults, 0 to 100 (`"ter"`
    can be above). `"bleu"` is 0 unless an output has four words: for short outputs, or scripts without spaces, take
    `"chrf"`. `"exact_match"` is the share of outputs that equal a reference;
    `"edit_rate"` is the insertions, deletions and substitutions of tokens between spaces, over the tokens of the
    references, each output against the reference that is nearest by edits, the first of equals.

    Args:
        generate: function from a list of strings to a list of as many strings, such as a `Translator` of the model:
            made once, since a new one is slow at its first call.
        sources: list of strings.
        references: list of as many strings; or of lists of strings, where a source has several right answers.
        metrics: list of names of scores.
        samples: int, how many of the first sources to keep what was written for, in `examples`.
        log_dir: str or path, a directory where TensorBoard finds the scores and the examples; None for none.
        every: int, epochs from one scoring to the next.
        prefix: str, put before the names of the scores in the logs.

    Attributes:
        scores: dict from names, as in the logs, to the last scores, floats.
        examples: list of the last (source, output, list of references).

    Raises:
        ValueError: if sources and references do not fit each other, on an unknown metric, or if `generate` returns
            anything else than a string for each source.
        ImportError: if a metric or `log_dir` needs a package that is missing.

    Example:
    ```python
    import keras
    import numpy as np
    import keras_transformer as kt

    def generate(texts):  # in its place, a `kt.Translator` of the model
        return [text[::-1] for text in texts]

    scores = kt.GenerationScores(generate, ["abc", "de"], [["cba", "cab"], "dd"], metrics=["exact_match", "chrf"])
    stop = keras.callbacks.EarlyStopping(monitor="val_exact_match", mode="max", patience=2)
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    history = model.fit(np.ones((4, 1)), np.ones((4, 1)), callbacks=[scores, stop], verbose=0)
    assert history.history["val_exact_match"] == [0.5]
    assert scores.examples[0] == ("abc", "cba", ["cba", "cab"])
    ```
    """

    def __init__(
        self, generate, sources, references, metrics=("bleu", "chrf"), samples=3, log_dir=None, every=1, prefix="val_"
    ):
        super().__init__()
        if not callable(generate):
            raise ValueError(f"`generate` must be a function from a list of strings to another; got {generate!r}.")
        self.generate = generate
        self.sources = _strings("sources", sources)
        self.references = _references(references, len(self.sources))
        self.metrics = [] if isinstance(metrics, str) else list(metrics)
        if not self.metrics or set(self.metrics) - set(NEEDS):
            raise ValueError(f"`metrics` must be a list of some of {list(NEEDS)}; got {metrics!r}.")
        self.samples = check_count("samples", samples, least=0)
        self.every = check_count("every", every)
        self.log_dir, self.prefix = log_dir, prefix
        self.scores, self.examples, self._writer = {}, [], None
        packages = {NEEDS[name] for name in self.metrics} | {None if log_dir is None else "tensorflow"}
        for package in sorted(packages - {None}):
            try:
                importlib.import_module(package)
            except ImportError as error:
                raise ImportError(f"These metrics or `log_dir` need {package}: pip install {package}") from error

    def on_train_begin(self, logs=None):
        self.scores = {}

    def on_epoch_end(self, epoch, logs=None):
        if not self.scores or (epoch + 1) % self.every == 0:
            outputs = self._outputs()
            scores = {name: corpus_score(name, outputs, self.references) for name in self.metrics}
            self.scores = {f"{self.prefix}{name}": score for name, score in scores.items()}
            self.examples = list(zip(self.sources, outputs, self.references))[: self.samples]
            if self.log_dir is not None:
                self._write(epoch)
        if logs is not None:
            logs.update(self.scores)  # one dict that Keras hands from callback to callback

    def on_train_end(self, logs=None):
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _outputs(self):
        outputs = self.generate(list(self.sources))
        found, count = _listed(outputs), len(self.sources)
        if len(found) != count:
            raise ValueError(f"`generate` must return {count} strings for {count}; got {len(found)}: {outputs!r:.80}.")
        return found

    def _write(self, epoch):
        """Scores and examples as TensorBoard reads them; `tf.summary.scalar` and `text` would need it installed."""
        import tensorflow as tf

        def write(name, value, plugin, data_class):
            kind = tf.compat.v1.SummaryMetadata(data_class=data_class, plugin_data={"plugin_name": plugin})
            tf.summary.write(name, value, metadata=kind)

        if self._writer is None:
            self._writer = tf.summary.create_file_writer(os.fspath(self.log_dir))
        with self._writer.as_default(step=epoch):  # flushes at its end
            for name, score in self.scores.items():
                write(name, tf.constant(score, tf.float32), "scalars", data_class=1)
            if self.examples:
                rows = [(source, output, "\n".join(right)) for source, output, right in self.examples]
                # cells are shown as Markdown: indented, a text stands as it is
                cells = [[textwrap.indent(text, "    ") for text in row] for row in rows]
                write(f"{self.prefix}examples", [["source", "output", "references"], *cells], "text", data_class=2)


def _listed(texts):
    """The strings of a list, an empty list if it is none."""
    found = [] if isinstance(texts, (str, bytes)) or not np.iterable(texts) else list(texts)
    return found if all(isinstance(text, str) for text in found) else []


def _strings(name, texts):
    """A list of at least one string."""
    if not (found := _listed(texts)):
        raise ValueError(f"`{name}` must be a list of at least one string; got {texts!r:.80}.")
    return found


def _references(references, count):
    """A list of strings for each of `count` sources."""
    if isinstance(references, str) or len(references) != count:
        raise ValueError(
            f"`references` must be a list of {count}, a string or a list of strings for each source; "
            f"got {references!r:.80} of length {len(references)}."
        )
    return [_strings("references", [right] if isinstance(right, str) else right) for right in references]
