"""A model as generation uses it: what runs once for each source, and what runs for each token, with a cache.

Letters: `B` batch, `T` target tokens, `V` vocabulary.
"""

import keras
import numpy as np
from keras import ops
from keras.src.backend import get_keras_mask, set_keras_mask  # Keras has no public way to the masks of tensors
from keras.src.models.functional import Functional

from keras_transformer.scopes import DecodingScope


class WholeModel:
    """A subclassed model, of which nothing is known: it runs whole for each token."""

    def __init__(self, model, example=None):
        self.model = model
        self.name = model.name
        self.example = example

    def encode(self, sources):
        """dict of the other inputs -> what `decode` needs of them."""
        _check_names(sources, self.example)
        return {name: ops.convert_to_tensor(value) for name, value in (sources or {}).items()}

    def decode(self, tokens, context):
        """int `[B, T]` and what `encode` gave -> logits `[B, T, V]`."""
        return self.model({**context, "target": tokens} if context else tokens)

    def layers(self):
        """(name, function like `decode`, up to that layer) for each layer that can be looked at, in order."""
        return ()


class FunctionalModel:
    """A functional model, cut where the ids that it writes first matter."""

    def __init__(self, model):
        inputs = {tensor.name: tensor for tensor in model.inputs}
        written = next((name for name in ("target", "tokens") if name in inputs), None)
        if written is None and len(inputs) == 1:
            (written,) = inputs
        if written is None or len(model.outputs) != 1:
            raise ValueError(
                "Generation needs a model with an input named 'target' or 'tokens' (or just one input), and the logits "
                f"as its one output; got {model.name!r} with inputs {sorted(inputs)} and {len(model.outputs)} outputs."
            )
        self.name = model.name
        self._encode, self._decode = _cut(model, inputs.pop(written), inputs)
        self.example = {tensor.name: _example(tensor) for tensor in inputs.values()} or None

    def encode(self, sources):
        """dict of the other inputs -> tensors that depend on them alone, each with its Keras mask if it has one.

        The masks are apart, for a loop and most operations lose those that travel with tensors.
        """
        _check_names(sources, self.example)
        tensors = keras.tree.flatten(self._encode(sources)) if self._encode else []
        return [(t,) if get_keras_mask(t) is None else (t, get_keras_mask(t)) for t in tensors]

    def decode(self, tokens, context):
        """int `[B, T]` and what `encode` gave -> logits `[B, T, V]`."""
        return self._decode(_with_masks(tokens, context))

    def layers(self):
        """(name, function like `decode`, up to that layer) for each layer that depends on the tokens, in order."""
        for node in _nodes_in_order(self._decode):
            for tensor in node.outputs:
                probe = _takes_masks(keras.Model(self._decode.inputs, tensor))
                yield node.operation.name, lambda tokens, context, probe=probe: probe(_with_masks(tokens, context))


def _check_names(sources, example):
    if set(sources or {}) != set(example or {}):
        raise ValueError(f"The model's other inputs are {sorted(example or {})}; got {sorted(sources or {})}.")


def _with_masks(tokens, context):
    """The inputs of the second part of a model, with the masks that `encode` took from them."""
    inputs = [ops.convert_to_tensor(tokens)]
    for tensor, *mask in context:
        tensor = ops.copy(tensor) if mask else tensor
        if mask:
            set_keras_mask(tensor, mask[0])
        inputs.append(tensor)
    return inputs


def parts_of(model, example=None, start_id=2, pad_id=0):
    """The model as generation uses it, for targets that begin with `start_id` and are padded with `pad_id`.

    Raises:
        ValueError: if it cannot be used so, or gives other logits token by token than for all tokens at once.
    """
    model = getattr(model, "_functional", None) or model  # a Sequential model's
    parts = FunctionalModel(model) if isinstance(model, Functional) else WholeModel(model, example)
    check_cache(parts, start_id, pad_id)
    return parts


def _cut(model, target, others):
    """Two models that share the layers of `model`: dict of the other inputs -> list of tensors that do not depend on
    the target (or the only one), or None where there are no other inputs; and `[target, *those tensors]` -> logits.
    """
    dependent, boundary, nodes = {id(target)}, {}, []
    for node in _nodes_in_order(model):
        if dependent.intersection(map(id, node.input_tensors)):
            nodes.append(node)
            dependent.update(map(id, node.outputs))
            boundary.update({id(t): t for t in node.input_tensors})
    context = [tensor for key, tensor in boundary.items() if key not in dependent]
    if id(model.outputs[0]) not in dependent or bool(context) != bool(others):
        raise ValueError(
            f"The logits must depend on {target.name!r} and on the other inputs, if there are any; those of "
            f"{model.name!r}, with inputs {[target.name, *others]}, do not."
        )

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
    return (keras.Model(others, context, name="encode") if context else None), decode


def _takes_masks(model):
    """`model`, whose inputs carry masks, which Keras warns that a functional model ends."""
    model.supports_masking = True
    return model


def _nodes_in_order(model):
    """The nodes of a functional model's graph, each after those that it needs."""
    depths = sorted(model._nodes_by_depth, reverse=True)
    return [node for depth in depths for node in model._nodes_by_depth[depth] if not node.is_input]


def _example(tensor):
    """A small input for `tensor`: ids below 4, or noise."""
    shape = [size or 4 for size in (2, *tensor.shape[1:])]
    if keras.backend.is_float_dtype(tensor.dtype):
        return np.random.default_rng(0).normal(size=shape).astype(tensor.dtype)
    return np.resize([1, 2, 3, 1, 3, 2, 0, 0], shape).astype(tensor.dtype)


def check_cache(parts, start_id=2, pad_id=0):
    """Raises a ValueError if the logits differ, token by token with a cache, from those for all tokens at once."""
    context = parts.encode(parts.example)
    # the start comes first only, as it may begin a new segment, and padding nowhere, as it is hidden
    a, b = [i for i in (1, 2, 3, 4) if i not in (start_id, pad_id)][:2]
    tokens = np.array([[start_id, a, b, a, a, b], [start_id, b, a, a, b, b]], dtype="int32")
    if _cache_differs(parts.decode, tokens, context):
        probes = ((name, probe) for name, probe in parts.layers() if _cache_differs(probe, tokens, context))
        culprit, _ = next(probes, (parts.name, None))
        raise ValueError(
            "A model that generates must give the same logits token by token with a cache as for all tokens at once: "
            "its layers treat target positions one by one or look back through this package's causal attention; "
            f"got other values from layer {culprit!r}."
        )


def _cache_differs(decode, tokens, context):
    """Whether rows of 3 and 2 tokens, continued one at a time, miss what `decode` says of all at once."""

    def run(new, index, cache):
        with DecodingScope(cache, index, length=tokens.shape[1], num_tokens=[3, 2]) as scope:
            out = decode(ops.convert_to_tensor(new), context)
        return np.asarray(ops.cast(out, "float32")), scope.cache

    out = decode(ops.convert_to_tensor(tokens), context)
    exact = keras.backend.standardize_dtype(out.dtype) in ("float32", "float64", "int32", "int64", "bool")
    full = np.asarray(ops.cast(out, "float32"))
    index = np.array([3, 2], dtype="int32")
    out, cache = run(tokens[:, :3], np.zeros_like(index), None)
    if full.shape[:2] != tokens.shape:  # not by position: a weight, which does not change, or a mean over tokens
        return full.shape != out.shape or not np.allclose(full, out)
    pairs = [(full[:, :2], out[:, :2])]
    rows = np.arange(len(tokens))
    while index.max() < tokens.shape[1]:
        out, cache = run(tokens[rows, index][:, None], index, cache)
        pairs.append((full[rows, index], out[:, 0]))
        index = index + 1
    worst = max(np.max(np.abs(a - b)) for a, b in pairs)
    return not worst <= (1e-3 if exact else 0.1) * max(1.0, np.max(np.abs(full)))
