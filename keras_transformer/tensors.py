"""Arrays from files, and which of them were used: what reading published weights keeps account of."""

import math
import re

import numpy as np


class Tensors(dict):
    """Arrays of files by their names, and which of them were asked for."""

    def __init__(self, arrays):
        old, ending = {"gamma": "weight", "beta": "bias"}, re.compile(r"(?<=LayerNorm\.)(gamma|beta)$")
        super().__init__((ending.sub(lambda found: old[found[0]], name), x) for name, x in dict(arrays).items())
        self.taken, self.lines = set(), []

    def take(self, name):
        if name not in self:
            self.lines.append(f"{name}: not there")
            return None
        self.taken.add(name)
        return self[name]

    def tied(self, name, to):
        """Logits may be there again, if they are the table of tokens."""
        if name in self and not np.array_equal(self.take(name), self.get(to)):
            self.lines.append(f"{name}: not equal to {to}, which the config says it is")

    def wrong(self, known="", unused=()):
        """Lines of text: what was asked for in vain, and what nobody asked for.

        Apart from names that match the pattern `known`, and those that begin as one of `unused`.
        """
        left = [name for name in self if name not in self.taken and not re.fullmatch(known, name)]
        return self.lines + [f"{name}: of no use here" for name in left if not name.startswith(unused)]

    def dense(self, theirs, ours, has_bias=True):
        """A PyTorch `Linear`, whose weight is `[out, in]`, as a Keras `Dense`."""
        weight = self.take(f"{theirs}.weight")
        found = {f"{ours}/kernel": None if weight is None else weight.T}
        return {**found, f"{ours}/bias": self.take(f"{theirs}.bias")} if has_bias else found

    def norm(self, theirs, ours, has_bias=True, times=1.0):
        """A layer normalization's weight and bias; ours always has one."""
        weight = self.take(f"{theirs}.weight")
        bias = self.take(f"{theirs}.bias") if has_bias or weight is None else np.zeros_like(weight)
        return {f"{ours}/{x}": None if y is None else y * times for x, y in (("gamma", weight), ("beta", bias))}

    def rms_norm(self, theirs, ours, times=1.0):
        """An RMS norm's weight."""
        scale = self.take(f"{theirs}.weight")
        return {f"{ours}/scale": None if scale is None else scale * times}

    def table(self, name, width):
        """A table of vectors for a `TokenEmbedding`, which scales them by the root of their width."""
        table = self.take(name)
        return None if table is None else table / math.sqrt(width)
