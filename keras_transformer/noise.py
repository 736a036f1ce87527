"""Random numbers that are functions of integers: the same in eager mode, graphs, XLA, SavedModels and every backend.

Keras's generators draw for a whole tensor, so that a row's numbers depend on where it stands, and take no tensor as a
seed.
"""

from keras import ops


def random_bits(seed, *counters):
    """A hash of integers: uint32, of the shape to which the arguments broadcast.

    Each round takes in one counter by a bijection of 32 bits with little bias (Wellons 2018, "lowbias32",
    https://nullprogram.com/blog/2018/07/31/).

    Args:
        seed: int32 tensor.
        *counters: int32 tensors, for example row and step.
    """
    bits = _uint32(0)
    for number in (seed, *counters):  # the constant is there because 0 mixes to 0
        number = ops.cast(ops.convert_to_tensor(number, dtype="int32"), "uint32")
        bits = _mixed(bits + number * _uint32(0x9E3779B9) + _uint32(0x85EBCA6B))
    return bits


def uniform(seed, *counters):
    """float32 in [0, 1), one of 2**24 equally likely values, from `random_bits`."""
    high = ops.right_shift(random_bits(seed, *counters), _uint32(8))
    return ops.cast(ops.cast(high, "int32"), "float32") * 2.0**-24


def _mixed(bits):
    bits = (bits ^ ops.right_shift(bits, _uint32(16))) * _uint32(0x7FEB352D)
    bits = (bits ^ ops.right_shift(bits, _uint32(15))) * _uint32(0x846CA68B)
    return bits ^ ops.right_shift(bits, _uint32(16))


def _uint32(number):
    return ops.convert_to_tensor(number, dtype="uint32")
