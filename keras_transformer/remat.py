"""Gradient checkpointing: what a block keeps for its gradients is computed again instead (Chen et al. 2016,
https://arxiv.org/abs/1604.06174), where the block was made in a `keras.RematScope`.

Keras's own way would draw another dropout the second time, lose the masks that travel with tensors, and pass keyword
arguments on, which TensorFlow refuses in graphs. So a block calls this around its work, once its masks are read.
"""

import keras
from keras.src.backend.common.symbolic_scope import in_symbolic_scope

from keras_transformer.scopes import AttentionMaps, DecodingScope


def rematerialized(layer, run, *vectors):
    """`run(*vectors)`, of which gradients keep the vectors alone if `layer`'s `RematScope` says so.

    Args:
        layer: a built layer that was made in a `keras.RematScope`, or in none.
        run: function of float tensors to one float tensor; it may use the layer's variables and any other tensors that
            need no gradient.
        vectors: what gradients flow through.
    """
    # nobody trains in these; `RematScope(mode="larger_than")` asks in a symbolic call how large the layer's output is
    if AttentionMaps.current() is not None or DecodingScope.current() is not None or in_symbolic_scope():
        return run(*vectors)
    variables = layer.variables
    states = layer.non_trainable_variables  # the seeds of dropout

    def pure(values, *vectors):
        with keras.StatelessScope(state_mapping=zip(variables, values)) as scope:
            output = run(*vectors)
        return output, [scope.get_current_value(state) for state in states]

    # the layer's base class decides by the scope's mode
    checkpointed = keras.layers.Layer.rematerialized_call(layer, pure, *vectors)
    if checkpointed is pure:
        return run(*vectors)
    output, new_states = checkpointed([variable.value for variable in variables], *vectors)
    for state, value in zip(states, new_states):
        state.assign(value)
    return output
