"""What `Translator` and `TextGenerator` share: strings to strings in one graph, in Python and in a SavedModel.

TensorFlow is imported where it is used, so that this module works without it. Letters: `B` batch, `P` tokens of a
prompt, `L` longest output, `n` outputs of a text.
"""

import logging
import math

import keras

from keras_transformer.calls import OPTIONS, Output, Scored, assert_options, check_call, check_fixed, check_model
from keras_transformer.checks import check_count
from keras_transformer.export import write_saved_model
from keras_transformer.generator import Generator
from keras_transformer.noise import random_bits
from keras_transformer.tokenizer import decode_strings, rows_that

log = logging.getLogger("keras_transformer")


class TextWriter(keras.Model):
    """A model and its tokenizer as one thing that maps strings to strings; see `Translator` and `TextGenerator`."""

    TEXTS = ("text",)  # the strings that a call takes for each row
    NUMBERS = OPTIONS  # and the numbers, for all rows
    FIXED = ("no_repeat_ngram", "forbidden_ids")  # further options, of the constructor alone

    def __init__(self, model, tokenizer, reads, max_length, batch_size, width, n, options, **kwargs):
        super().__init__(**kwargs)
        self.max_length, self.batch_size = check_count("max_length", max_length), check_count("batch_size", batch_size)
        check_model(type(self).__name__, model, tokenizer, reads)
        self.model, self._writes = model, tokenizer
        ids = tokenizer.start_id, tokenizer.end_id, tokenizer.pad_id
        self._generate = Generator(model, max_length, width, n, *ids)
        self.width, self.n = self._generate.width, self._generate.n
        longest = OPTIONS["max_length"]._replace(default=self.max_length, most=self.max_length)
        self._numbers = {**self.NUMBERS, "max_length": longest}
        fixed = check_fixed({name: value for name, value in (options or {}).items() if name in self.FIXED}, model)
        numbers = {name: value for name, value in (options or {}).items() if name not in fixed}
        self.options = {**check_call(numbers, self._numbers), **fixed}
        # what no text becomes: the start, and logits that have no token
        self._never = [tokenizer.start_id, *range(tokenizer.vocab_size, model.output.shape[-1])]
        self._graph = self._compile()
        self.built = True

    # for subclasses

    def prepare(self, text, **others):
        """String tensors `[B]` -> (the model's sources, prompts int32 `[B, P]` or None, which rows fit bool `[B]`)."""
        raise NotImplementedError

    def limits(self, sources, options):
        """The options of a `Generator`, out of this object's."""
        return options

    def as_text(self, ids, prompt):
        """What was written, `[R, L]`, and the prompts before it or None -> string tensor `[R]`."""
        return self._writes.detokenize(ids)

    # in graphs

    def call(self, text, **options):
        import tensorflow as tf

        others = {name: options.pop(name) for name in self.TEXTS[1:] if name in options}
        options = {**self.options, **check_call(options, self._numbers), **self._fixed()}
        is_aligned = options.pop("alignment", False)
        sources, prompt, fits = self.prepare(text, **others)
        found = self._generate(sources, prompt, **self.limits(sources, options))
        ids = tf.where(fits[:, None, None], found["ids"], self._writes.pad_id)
        batch, n, length = tf.unstack(tf.shape(ids))
        rows, prompts = tf.reshape(ids, [batch * n, length]), None if prompt is None else tf.repeat(prompt, n, axis=0)
        result = {
            "text": tf.where(fits[:, None], tf.reshape(self.as_text(rows, prompts), [batch, n]), ""),
            "score": tf.where(fits[:, None], found["score"], -math.inf),
            "length": tf.where(fits[:, None], found["length"], 0),
            "ids": ids,
        }
        if is_aligned:
            many = {name: tf.repeat(source, n, axis=0) for name, source in sources.items()}
            place = tf.argmax(self._generate.attention(many, rows, prompts), axis=-1, output_type=tf.int32)
            result["alignment"] = tf.where(ids == self._writes.pad_id, -1, tf.reshape(place, [batch, n, length]))
        return result

    def _call_with(self, row, *arguments):
        """`call` with all strings and numbers; `row` is the place of the first text among all that share a seed."""
        texts, options = self._named(row, arguments)
        return self.call(**texts, **options)

    def _named(self, row, arguments):
        """(dict of string tensors, dict of scalars), in the order of `TEXTS` and `NUMBERS`; asserts their ranges."""
        import tensorflow as tf

        texts = dict(zip(self.TEXTS, arguments))
        options = dict(zip(self.NUMBERS, arguments[len(self.TEXTS) :]))
        assert_options(options, self._numbers)
        options["seed"] = random_bits(options["seed"], row + tf.range(tf.shape(texts["text"])[0]))
        return texts, options

    def _score(self, text, target):
        import tensorflow as tf

        sources, prompt, fits = self.prepare(text)
        ids = self._writes.tokenize(target, end=True)
        fits &= ids.row_lengths() <= self.max_length
        ids = rows_that(fits, ids).to_tensor(self._writes.pad_id)
        found = self._generate.score(sources, ids, prompt)
        return {
            "score": tf.where(fits, found["score"], -math.inf),
            "length": found["length"],
            "token_scores": found["token_scores"],
            "ids": ids,
        }

    def _begin(self, row, *arguments):
        """The state of a search that is looked at between two steps."""
        import tensorflow as tf

        texts, options = self._named(row, arguments)
        sources, prompt, fits = self.prepare(**texts)
        context, prompt = self._generate.begin(sources, prompt)
        _, search = self._generate.searches(n=1, **self.limits(sources, {**self._fixed(), **options}))
        state = search.begin(self._generate.step(context, tf.shape(prompt)[1] + search.room), prompt)
        return {**state, "prompt": prompt, "fits": fits}, self._so_far(search, state, prompt, fits)

    def _advance(self, state, *arguments):
        import tensorflow as tf

        numbers = {name: value for name, value in zip(self.NUMBERS, arguments) if name in OPTIONS}
        options = {**self._fixed(), **numbers, "max_length": state["limit"], "min_length": state["least"]}
        _, search = self._generate.searches(n=1, **options)
        state = search.advance(self._generate.step(None, tf.shape(state["tokens"])[1]), state)
        return state, self._so_far(search, state, state["prompt"], state["fits"])

    def _so_far(self, search, state, prompt, fits):
        import tensorflow as tf

        text = self.as_text(search.found(state)["ids"][:, 0], prompt)
        return {"text": tf.where(fits, text, ""), "done": state["done"] | ~fits}

    def _fixed(self):
        fixed = {name: value for name, value in self.options.items() if name in TextWriter.FIXED}
        return {**fixed, "forbidden_ids": [*fixed.get("forbidden_ids", ()), *self._never]}

    def _compile(self):
        """The graphs by name, each traced once, behind a plain function, which a SavedModel leaves out."""
        import tensorflow as tf

        text, strings, numbers = self._signature()
        row = tf.TensorSpec([], tf.int32)
        graphs = {
            "call": tf.function(self.call, input_signature=[text]),
            "call_with": tf.function(self._call_with, input_signature=[row, *strings, *numbers]),
            "score": tf.function(self._score, input_signature=[text, text]),
            "begin": tf.function(self._begin, input_signature=[row, *strings, *numbers]),
            "advance": tf.function(self._advance, reduce_retracing=True),
        }
        return lambda name, *arguments: graphs[name](*arguments)

    def _signature(self):
        import tensorflow as tf

        strings = [tf.TensorSpec([None], tf.string, name=name) for name in self.TEXTS]
        return strings[0], strings, [tf.TensorSpec([], o.dtype, name=name) for name, o in self.NUMBERS.items()]

    # in Python

    def __call__(self, text, **options):
        import tensorflow as tf

        if isinstance(text, str):
            raise ValueError(f"Texts come as a list of strings, also a single one; got the string {text!r}.")
        if isinstance(text, keras.KerasTensor) or not tf.executing_eagerly():
            return super().__call__(text, **options)
        if not isinstance(text, (list, tuple)):
            columns, numbers = self._arguments(text, options)
            return self._graph("call_with", 0, *columns, *numbers) if options else self._graph("call", *columns[:1])
        return [text for found in self._run(text, options) for text in decode_strings(found["text"][:, 0])]

    def n_best(self, texts, **options):
        """List of strings -> for each a list of `n` `Output`s: the best of a beam, best first, or samples."""
        outputs = []
        for found in self._run(texts, options):
            pieces = self._writes.pieces(found["ids"]).numpy()
            for row, length in enumerate(found["length"].numpy()):
                alignment = found["alignment"][row].numpy().tolist() if "alignment" in found else [None] * self.n
                outputs.append(
                    [
                        Output(text, float(score), decode_strings(names[:end]), places and places[:end])
                        for text, score, names, end, places in zip(
                            decode_strings(found["text"][row]), found["score"][row], pieces[row], length, alignment
                        )
                    ]
                )
        return outputs

    def score(self, texts, targets):
        """How likely each target is for its text, the end among it: lists of strings -> list of `Scored`.

        A target of more than `max_length` tokens is refused, as a text that is too long is.
        """
        texts, targets = self._columns(texts, {"target": targets}, ("text", "target"))
        scored = []
        for batch in self._batches(texts, targets):
            found = self._graph("score", *batch)
            pieces = self._writes.pieces(found["ids"]).numpy()
            for score, names, each, end in zip(found["score"], pieces, found["token_scores"].numpy(), found["length"]):
                scored.append(Scored(float(score), decode_strings(names[:end]), each[:end].tolist()))
        return scored

    def stream(self, texts, **options):
        """Writes while one looks on: an iterator of lists, what each text's output grows by in one step.

        Each text gets one output, by sampling or, at temperature 0, the most likely next token. Pieces are whole
        characters: the bytes of one that is not complete are held back. All texts go through the model at once; the
        iterator ends when all outputs have.
        """
        return self._pieces(*self._arguments(texts, options))

    def _pieces(self, columns, numbers):
        shown = [""] * len(columns[0])
        state, found = self._graph("begin", 0, *columns, *numbers) if shown else (None, None)
        while shown:
            pieces = []
            for row, (text, done) in enumerate(zip(decode_strings(found["text"]), found["done"].numpy())):
                text = text if done else text.rstrip("\N{REPLACEMENT CHARACTER}")
                pieces.append(text[len(shown[row]) :])
                shown[row] = text
            yield pieces
            if found["done"].numpy().all():
                return
            state, found = self._graph("advance", state, *numbers)

    def _run(self, texts, options):
        """What the graph gives for lists of strings, a batch at a time."""
        columns, numbers = self._arguments(texts, options)
        is_plain = not options and not self.options.get("temperature")  # samples need to know their row
        refused = 0
        for i, batch in enumerate(self._batches(*columns)):
            row = i * self.batch_size
            found = self._graph("call", batch[0]) if is_plain else self._graph("call_with", row, *batch, *numbers)
            refused += int((found["length"].numpy()[:, 0] == 0).sum())
            yield found
        if refused:
            log.warning("%d of %d texts got no answer: too long, or nothing may be written.", refused, len(texts))

    def _arguments(self, texts, options):
        """(lists of strings in the order of `TEXTS`, numbers in that of `NUMBERS`)."""
        import tensorflow as tf

        columns = self._columns(texts, options, self.TEXTS)
        numbers = {name: value for name, value in options.items() if name not in self.TEXTS}
        numbers = {**self.options, **check_call(numbers, self._numbers)}
        most, least = numbers.get("max_length", self.max_length), numbers.get("min_length", 0)
        if least > most:
            raise ValueError(f"`min_length` must be at most `max_length`; got {least} and {most}.")
        return columns, [tf.constant(numbers.get(k, o.default), o.dtype) for k, o in self._numbers.items()]

    def _columns(self, texts, others, names):
        import tensorflow as tf

        if isinstance(texts, str):
            raise ValueError(f"Texts come as a list of strings, also a single one; got the string {texts!r}.")
        others = {name: [""] * len(texts) if others.get(name) is None else others[name] for name in names[1:]}
        columns = [texts, *others.values()]
        for name, column in zip(names, columns):
            if isinstance(column, str) or len(column) != len(texts):
                raise ValueError(f"`{name}` must be a list of strings, one for each text; got {column!r}.")
        return [tf.convert_to_tensor(column, tf.string) for column in columns]

    def _batches(self, *columns):
        for start in range(0, len(columns[0]), self.batch_size):
            yield [column[start : start + self.batch_size] for column in columns]

    def export(self, filepath):
        """Writes a SavedModel of the same graph; a failed write leaves an old one whole.

        Its signature `serving_default` takes `text` string `[B]` and returns `text` string, `score` float32 and
        `length` int32, each `[B, n]` (and `alignment`); `with_options` takes further strings and all numbers of a call,
        as scalars. To load it, a process imports `tensorflow` and `tensorflow_text`, nothing else.
        """
        text, strings, numbers = self._signature()

        def without_ids(found):
            return {name: value for name, value in found.items() if name != "ids"}

        endpoints = {
            "serving_default": (lambda text: without_ids(self.call(text)), [text]),
            "with_options": (lambda *arguments: without_ids(self._call_with(0, *arguments)), [*strings, *numbers]),
        }
        write_saved_model(filepath, self, endpoints)

    def _sizes(self):
        names = ("max_length", "batch_size", "width", "n", "options")
        return {"name": self.name, **{name: getattr(self, name) for name in names}}

    @classmethod
    def from_config(cls, config):
        return cls(**{name: keras.saving.deserialize_keras_object(value) for name, value in config.items()})
