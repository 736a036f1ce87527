"""What goes into a call of `Translator` or `TextGenerator` beside text, and what comes out."""

from typing import Any, NamedTuple

import keras
import numpy as np

from keras_transformer.checks import check_count, check_range, concrete


class Option(NamedTuple):
    """A number: its dtype, default, range, and whether it must be above `least`."""

    dtype: str
    default: Any
    least: float = 0
    most: float = 1e6
    above: bool = False


OPTIONS = {
    "max_length": Option("int32", None, 1),
    "min_length": Option("int32", 0),
    "length_penalty": Option("float32", 0.6),
    "repetition_penalty": Option("float32", 1.0, above=True),
    "temperature": Option("float32", 0.0),
    "top_k": Option("int32", 0),
    "top_p": Option("float32", 1.0, most=1, above=True),
    "min_p": Option("float32", 0.0, most=1),
    "seed": Option("int32", 0, least=-(2**31), most=2**31 - 1),
}
"""What every search takes; see `Generator.searches`. The default and the most of `max_length` are the object's own."""


def check_call(numbers: dict, options: dict) -> dict:
    """Python numbers that are options, in range and of their type; a ValueError otherwise."""
    unknown = sorted(set(numbers) - set(options))
    if unknown:
        raise ValueError(f"The options of a call are {sorted(options)}; got {unknown}.")
    checked = {}
    for name, value in numbers.items():
        option, known = options[name], concrete(value)
        if known is not None:  # in a graph it is asserted
            check_range(name, value, option.least, option.most, option.above)
            value = known.item()
            value = check_count(name, value, option.least) if option.dtype == "int32" else float(value)
        checked[name] = value
    return checked


def check_model(name: str, model, tokenizer, reads: list) -> None:
    """Raises a ValueError if a model does not fit: what it reads beside what it writes, how many tokens it knows."""
    if keras.backend.backend() != "tensorflow":
        raise ValueError(f"A {name} needs the TensorFlow backend, a graph of text; got {keras.backend.backend()!r}.")
    inputs = sorted({tensor.name for tensor in model.inputs})
    if len(inputs) != 1 + len(reads) or not set(reads) <= set(inputs):
        raise ValueError(f"The model of a {name} must have the inputs {reads} and what it writes; got {inputs}.")
    if model.output.shape[-1] < tokenizer.vocab_size:
        raise ValueError(
            "The model must have a logit for each token of the tokenizer of what it writes; "
            f"got {model.output.shape[-1]} for {tokenizer.vocab_size}."
        )


def check_fixed(options: dict, model) -> dict:
    """Options that only a constructor takes, as plain values."""
    checked = {}
    for name, value in options.items():
        if name == "alignment":
            if not isinstance(value, bool):
                raise ValueError(f"`alignment` must be True or False; got {value!r}.")
            checked[name] = value
        elif name == "forbidden_ids":
            checked[name] = [check_count("forbidden_ids", i, least=0) for i in np.atleast_1d(value).tolist()]
            if max(checked[name], default=0) >= model.output.shape[-1]:
                raise ValueError(f"`forbidden_ids` must be below {model.output.shape[-1]}; got {checked[name]}.")
        else:
            checked[name] = check_count(name, value, least=0)
    return checked


def assert_options(numbers: dict, options: dict) -> None:
    """Scalar tensors in range; in a graph an `InvalidArgumentError` otherwise."""
    import tensorflow as tf

    for name, value in numbers.items():
        option, number = options[name], tf.cast(value, tf.float32)
        is_high = number > option.least if option.above else number >= option.least
        tf.debugging.Assert(is_high & (number <= option.most), [f"`{name}` is out of range; got", value])


class Output(NamedTuple):
    """What was written for a text.

    Attributes:
        text: str.
        score: float, its log-probability, in nats; -inf for a text that was refused.
        tokens: list of strings, its tokens as the vocabulary writes them, the end among them.
        alignment: list of ints, where in the source's tokens the model looked most as it wrote each; or None.
    """

    text: str
    score: float
    tokens: list[str]
    alignment: list[int] | None


class Scored(NamedTuple):
    """How likely a given text is.

    Attributes:
        score: float, its log-probability, in nats; -inf for a text that was refused.
        tokens: list of strings, its tokens as the vocabulary writes them, the end among them.
        token_scores: list of floats, the log-probability of each.
    """

    score: float
    tokens: list[str]
    token_scores: list[float]
