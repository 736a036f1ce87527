"""Writing token by token with a key/value cache, for any functional model of this package's blocks.

A search knows a model only as `step(tokens, index, cache) -> (logits, cache)`; `Generator` makes such a step out of a
`{source, target} -> logits` model that nobody wrote for it. Works in eager mode, graphs, XLA and JAX.

Letters: `B` batch, `P` tokens of a prompt, `L` longest output, `V` vocabulary.
"""

import keras
import numpy as np
from keras import ops
from keras.src.models.functional import Functional

from keras_transformer.checks import check_count
from keras_transformer.scopes import DecodingScope


def greedy(step, prompt, max_length, end_id=3, pad_id=0):
    """The most likely next token, over and over, in one `while_loop` that ends when every row has ended.

    Args:
        step: function `(tokens int32 [B, P or 1], index int32 [B], cache) -> (logits [B, P or 1, V], cache)`: the
            logits behind new tokens that stand in their rows at `index` and after. The first call gets the prompt and
            no cache (None).
        prompt: int32 tensor `[B, P]`, what each output continues; not part of the output.
        max_length: int, `L`, the most tokens to write, the end among them.
        end_id: int, the token that ends a row.
        pad_id: int, what stands behind the end. It is never chosen before, being no token.

    Returns:
        A dict of `ids` int32 `[B, L]`, `score` float32 `[B]` (the sum of the log-probabilities of the tokens written,
        in nats) and `length` int32 `[B]` (how many, the end among them).

    Example:
    ```python
    import keras
    import numpy as np
    import keras_transformer as kt
    def count_up(tokens, index, cache):  # after id i comes i + 1
        return 20.0 * keras.ops.one_hot(tokens + 1, 8), cache
    found = kt.greedy(count_up, prompt=np.array([[4], [5]]), max_length=4, end_id=7)
    assert np.array(found["ids"]).tolist() == [[5, 6, 7, 0], [6, 7, 0, 0]]
    ```
    """
    max_length = check_count("max_length", max_length)
    prompt = ops.convert_to_tensor(prompt, "int32")
    batch, prompt_length = ops.shape(prompt)
    index = ops.zeros((batch,), "int32")

    def run(tokens, index, cache):
        logits, cache = step(tokens, index, cache)
        return logits, () if cache is None else cache  # TensorFlow's loop carries no None

    def write(i, logits, done, ids, score):
        """Token `i` of every row that is not done."""
        log_probs = ops.log_softmax(ops.cast(logits[:, -1], "float32"))  # [B, V]
        is_pad = ops.arange(ops.shape(log_probs)[-1]) == pad_id
        token = ops.cast(ops.argmax(ops.where(is_pad, -np.inf, log_probs), axis=-1), "int32")  # [B]
        token_score = ops.take_along_axis(log_probs, token[:, None], axis=-1)[:, 0]
        score = score + ops.where(done, 0.0, token_score)
        token = ops.where(done, pad_id, token)
        ids = ops.where(ops.arange(max_length) == i, token[:, None], ids)
        return token, ops.logical_or(done, token == end_id), ids, score

    def unfinished(i, token, done, ids, score, cache):
        return ops.logical_and(i < max_length, ops.logical_not(ops.all(done)))

    def body(i, token, done, ids, score, cache):
        logits, cache = run(token[:, None], index + (prompt_length + i - 1), cache)
        return i + 1, *write(i, logits, done, ids, score), cache

    logits, cache = run(prompt, index, None)
    ids = ops.full((batch, max_length), pad_id, dtype="int32")
    state = write(0, logits, ops.zeros((batch,), "bool"), ids, ops.zeros((batch,), "float32"))
    _, _, _, ids, score, _ = ops.while_loop(unfinished, body, (ops.convert_to_tensor(1, "int32"), *state, cache))
    return {"ids": ids, "score": score, "length": ops.sum(ops.cast(ids != pad_id, "int32"), axis=-1)}


class Generator:
    """Writes target ids for source inputs with a functional model of this package's blocks.

    The model is cut where `target` first matters: what depends on the other inputs alone (an encoder) runs once a
    batch, the rest runs a token at a time in a `DecodingScope`. Any functional model does whose layers either treat
    positions one by one or know the scope; when a `Generator` is made, it runs the model on a few tokens both ways and
    compares.

    Args:
        model: functional `keras.Model` from a dict of inputs, one of them `"target"` (int ids `[B, T]`), to logits
            `[B, T, V]`: `build_transformer`'s, or composed by hand.
        max_length: int, the most tokens to write, the end among them.
        start_id: int, the token that a target starts with.
        end_id: int, the token that it ends with.
        pad_id: int, padding.

    Call arguments:
        sources: dict of the model's other inputs, by name.

    Returns:
        What `greedy` returns.

    Raises:
        ValueError: if the model is not functional or has no input `"target"`; if the model's logits with and without
            cache differ, naming the layer where they first do (one that mixes positions without knowing the scope).

    Example:
    ```python
    import numpy as np
    import keras_transformer as kt
    model = kt.build_transformer(vocab_size=20, **kt.PRESETS["tiny"])
    generate = kt.Generator(model, max_length=5)
    found = generate({"source": np.array([[4, 5, 3], [6, 3, 0]])})
    assert found["ids"].shape == (2, 5)
    ```
    """

    def __init__(self, model, max_length, start_id=2, end_id=3, pad_id=0):
        self.max_length = check_count("max_length", max_length)
        self.start_id, self.end_id, self.pad_id = start_id, end_id, pad_id
        self.encode, self.decode = split_at_target(model)
        check_cache(self.encode, self.decode)

    def __call__(self, sources):
        context = keras.tree.flatten(self.encode(sources))
        prompt = ops.full((ops.shape(context[0])[0], 1), self.start_id, dtype="int32")
        step = cached_step(self.decode, context, length=self.max_length)
        return greedy(step, prompt, self.max_length, self.end_id, self.pad_id)


def cached_step(decode, context, length):
    """A `step` for the searches: `decode([tokens, *context])` with a cache of `length` slots."""

    def step(tokens, index, cache):
        with DecodingScope(cache, index, length) as scope:
            logits = decode([ops.convert_to_tensor(tokens), *context])
        return logits, scope.cache

    return step


def split_at_target(model):
    """Cuts a functional model in two that share its layers, where `target` first matters.

    Returns:
        (`encode`: dict of the other inputs -> list of tensors that do not depend on the target, or the only one,
        `decode`: `[target, *those tensors]` -> logits).
    """
    inputs = {tensor.name: tensor for tensor in model.inputs} if isinstance(model, Functional) else {}
    if "target" not in inputs or len(inputs) < 2 or len(model.outputs) != 1:
        raise ValueError(
            "Generation needs a functional keras.Model with an input named 'target', other inputs, and the logits as "
            f"its one output; got {type(model).__name__} with inputs {sorted(inputs)}."
        )
    target = inputs.pop("target")
    dependent, boundary, nodes = {id(target)}, {}, []
    for node in _nodes_in_order(model):
        if dependent.intersection(map(id, node.input_tensors)):
            nodes.append(node)
            dependent.update(map(id, node.outputs))
            boundary.update({id(t): t for t in node.input_tensors})
    context = [tensor for key, tensor in boundary.items() if key not in dependent]
    if not context or id(model.outputs[0]) not in dependent:
        raise ValueError(f"The logits must depend on 'target' and on another input; those of {model.name!r} do not.")

    # The rest is called anew on inputs of its own: a keras.Model that starts at tensors within another one's graph
    # changes that one, which could not be saved any more (Keras 3.15).
    own = {id(t): keras.Input(batch_shape=t.shape, dtype=t.dtype) for t in (target, *context)}
    own_inputs = list(own.values())
    for node in nodes:
        args, kwargs = keras.tree.map_structure(
            lambda t: own.get(id(t), t), (node.arguments.args, node.arguments.kwargs)
        )
        outputs = keras.tree.flatten(node.operation(*args, **kwargs))
        own.update(zip(map(id, node.outputs), outputs))
    decode = _takes_masks(keras.Model(own_inputs, own[id(model.outputs[0])], name="decode"))
    return keras.Model(inputs, context, name="encode"), decode


def _takes_masks(model):
    """`model`, whose inputs carry masks, which Keras warns that a functional model ends."""
    model.supports_masking = True
    return model


def _nodes_in_order(model):
    """The nodes of a functional model's graph, each after those that it needs."""
    depths = sorted(model._nodes_by_depth, reverse=True)
    return [node for depth in depths for node in model._nodes_by_depth[depth] if not node.is_input]


def check_cache(encode, decode):
    """Raises a ValueError if `decode` gives other logits token by token with a cache than for all tokens at once."""
    sources = {tensor.name: _example(tensor, ids=[[1, 2, 3, 1], [3, 2, 0, 0]]) for tensor in encode.inputs}
    context = keras.tree.flatten(encode(sources))
    tokens = np.array([[2, 1, 3, 1, 2, 2], [3, 1, 1, 2, 3, 1]], dtype="int32")
    if _cache_differs(decode, tokens, context):
        graph = [t for node in _nodes_in_order(decode) for t in node.outputs]
        names = [t._keras_history.operation.name for t in graph]
        probes = (_takes_masks(keras.Model(decode.inputs, t)) for t in graph)
        culprit = next((n for n, probe in zip(names, probes) if _cache_differs(probe, tokens, context)), decode.name)
        raise ValueError(
            "A model that generates must give the same logits token by token with a cache as for all tokens at once: "
            "its layers treat target positions one by one or look back through this package's causal attention; "
            f"got other values from layer {culprit!r}."
        )


def _cache_differs(decode, tokens, context):
    """Whether rows of 3 and 2 tokens, continued one at a time, miss what `decode` says of all at once."""
    full = np.asarray(ops.cast(decode([ops.convert_to_tensor(tokens), *context]), "float32"))
    step = cached_step(decode, context, length=tokens.shape[1])
    index = np.array([3, 2], dtype="int32")
    out, cache = step(tokens[:, :3], np.zeros_like(index), None)
    if full.shape[:2] != tokens.shape:  # not by position: a weight, which does not change, or a mean over tokens
        return full.shape != out.shape or not np.allclose(full, np.asarray(ops.cast(out, "float32")))
    pairs = [(full[:, :2], out[:, :2])]
    rows = np.arange(len(tokens))
    while index.max() < tokens.shape[1]:
        out, cache = step(tokens[rows, index][:, None], index, cache)
        pairs.append((full[rows, index], out[:, 0]))
        index = index + 1
    worst = max(np.max(np.abs(a - np.asarray(ops.cast(b, "float32")))) for a, b in pairs)
    exact = keras.backend.standardize_dtype(out.dtype) in ("float32", "float64", "int32", "int64", "bool")
    return not worst <= (1e-3 if exact else 0.1) * max(1.0, np.max(np.abs(full)))


def _example(tensor, ids):
    """A small input for `tensor`: ids that every vocabulary has, or noise."""
    if keras.backend.is_float_dtype(tensor.dtype):
        return np.random.default_rng(0).normal(size=[s or 4 for s in (2, *tensor.shape[1:])]).astype(tensor.dtype)
    return np.array(ids)[:, : tensor.shape[1]].astype(tensor.dtype)
