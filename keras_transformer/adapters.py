"""LoRA: fine-tuning by small matrices beside frozen ones, over Keras's own `enable_lora`."""

import math

import keras

from keras_transformer.checks import check_count, check_names, check_range


def add_lora(
    model: keras.Model, rank: int, targets=("query", "value"), alpha: float | None = None, trainable=()
) -> int:
    """Freezes a model but for small products of two matrices that are added to the kernels of some projections.

    Hu et al. 2021, "LoRA", https://arxiv.org/abs/2106.09685: a kernel `W` becomes `W + (alpha / rank) A B`, and since
    `B` starts at 0, the model's outputs stay what they were. The model must be compiled after this. A `.keras` file
    holds the kernels with the products merged into them: load it with `compile=False`, or merge before.

    Args:
        model: built `keras.Model`, of layers of this package or of other `keras.layers.Dense`.
        rank: int, the columns of `A` and the rows of `B`.
        targets: names of dense layers, or ends of their paths where a name alone says too little: `"query"`, `"key"`,
            `"value"`, `"self_attention/output"`, `"feed_forward/inner"`, `"decoder_block_4/cross_attention/value"`.
        alpha: float above 0; None for `rank`.
        trainable: names of the model's top layers that are trained whole (a new `"logits"`, say).

    Returns:
        int, how many numbers are trained now.

    Raises:
        ValueError: on a rank below 1, on targets that name no dense layer, one that is not `trainable` or one that has
            such a product already, on layers that are not there.

    Example:
    ```python
    import keras_transformer as kt
    model = kt.build_language_model(vocab_size=100, **kt.PRESETS["tiny"])
    assert kt.add_lora(model, rank=4, targets=("query", "value")) == 2 * 2 * 4 * (128 + 128)
    model.compile("adam", kt.TokenCrossentropy(), jit_compile=False)
    kt.merge_lora(model)
    ```
    """
    rank = check_count("rank", rank)
    alpha = None if alpha is None else check_range("alpha", alpha, 0, above=True)
    targets, trainable = check_names("targets", targets), check_names("trainable", trainable)
    layers = _dense_layers(model)
    chosen = {target: [x for x in layers if f"/{x.path}".endswith(f"/{target}")] for target in targets}
    nothing = [target for target, found in chosen.items() if not found]
    if nothing or not targets:
        raise ValueError(f"`targets` must name dense layers, as {sorted({x.name for x in layers})}; got {nothing}.")
    chosen = list({id(layer): layer for found in chosen.values() for layer in found}.values())
    if again := [layer.path for layer in chosen if layer.lora_enabled]:
        raise ValueError(f"A layer can have one LoRA product; got {again} again.")
    if frozen := [layer.path for layer in chosen if not layer.trainable]:
        raise ValueError(f"`targets` must be layers that are trained; got {frozen}, which are not `trainable`.")
    whole = {id(weight) for name in trainable for weight in model.get_layer(name).weights}
    for weight in model.weights:
        weight.trainable = id(weight) in whole and weight.trainable
    for layer in chosen:
        layer.enable_lora(rank, lora_alpha=alpha)
    _uncompile(model)
    return sum(math.prod(weight.shape) for weight in model.trainable_variables)


def merge_lora(model: keras.Model) -> None:
    """Puts the products of `add_lora` into the kernels that they were added to: the same outputs, at full speed.

    All weights can be trained again afterwards, once the model is compiled.

    Args:
        model: `keras.Model` with such products.

    Raises:
        ValueError: if there are none, and where a kernel is quantized.

    Example: see `add_lora`.
    ```python
    import keras_transformer as kt
    model = kt.build_language_model(vocab_size=100, **kt.PRESETS["tiny"])
    weights = len(model.weights)
    kt.add_lora(model, rank=2)
    kt.merge_lora(model)
    assert len(model.weights) == weights
    ```
    """
    layers = [layer for layer in _dense_layers(model) if layer.lora_enabled]
    if not layers or any(layer.quantization_mode for layer in layers):
        raise ValueError(f"Layers with LoRA products, not quantized, must be there; got {[x.path for x in layers]}.")
    for layer in layers:
        layer._kernel.assign(layer.kernel)
        layer.lora_kernel_b.assign(keras.ops.zeros(layer.lora_kernel_b.shape))  # for functions that were traced before
        layer.lora_enabled, layer.lora_rank = False, None
        for name in ("lora_kernel_a", "lora_kernel_b"):
            delattr(layer, name)
    for layer in model._flatten_layers():
        for variable in layer._trainable_variables:
            variable.trainable = layer.trainable
    _uncompile(model)


def _uncompile(model):
    """An optimizer knows the weights that it was made for, and a file with another's could not be loaded."""
    model.compiled, model.optimizer = False, None


def _dense_layers(model):
    return [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.Dense)]
