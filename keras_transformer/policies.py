"""Dtype policies of layers that are made of others."""

import keras


def saved_policy(layer):
    """What a layer's configuration says of dtypes: its policy and those that `quantize` gave layers inside it.

    Args:
        layer: Keras layer that gives its `dtype_policy` to the layers inside it.

    Returns:
        The serialized policy; if needed a `keras.dtype_policies.DTypePolicyMap`, from which layers take theirs by path.
    """
    quantized = {x.path: _policy(x) for x in layer._flatten_layers() if x.quantization_mode is not None}
    own = layer.dtype_policy
    own = getattr(own, "default_policy", own)
    return keras.dtype_policies.serialize(keras.dtype_policies.DTypePolicyMap(own, quantized) if quantized else own)


def _policy(layer):
    policy = layer.dtype_policy
    return policy[layer.path] if hasattr(policy, "default_policy") else policy
