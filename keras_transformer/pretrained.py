"""Published weights, from files on disk, in functional models of this package's blocks.

Letters: `B` batch, `T` tokens, `D` width, `V` vocabulary.
"""

import json
import pathlib

import keras

from keras_transformer.families import FAMILIES, Tensors, torch_transformer
from keras_transformer.transfer import assign_weights


def load_pretrained(folder, dtype=None) -> keras.Model:
    """A model with the weights of a folder in Hugging Face's form: `config.json` beside `*.safetensors` or `*.bin`.

    The families are BERT (Devlin et al. 2018, https://arxiv.org/abs/1810.04805), GPT-2 (Radford et al. 2019) and Llama
    (Touvron et al. 2023, https://arxiv.org/abs/2302.13971), with Mistral. Nothing is downloaded. Reading
    `.bin` files, and safetensors that hold bfloat16, needs PyTorch.

    Args:
        folder: str or path.
        dtype: str or `keras.DTypePolicy` of all layers; None for Keras's global policy.

    Returns:
        An uncompiled functional `keras.Model` from `tokens` ids [B, T]. BERT's gives vectors [B, T, D], of which
        `Pooling` makes one; all tokens are of segment 0, id 0 is padding. Those of GPT-2 and Llama give logits
        [B, T, V]; they have no padding, and a `Generator` with their ids writes with them.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: on another family, or on options of it that are not here; and, naming all of them, on weights that
            are missing, have another shape or are left over.

    Example:
    ```python
    import keras_transformer as kt
    try:
        model = kt.load_pretrained("all-MiniLM-L6-v2")
    except FileNotFoundError:
        pass  # it has to be there
    ```
    """
    folder = pathlib.Path(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"The model must be of one of the families {sorted(FAMILIES)}; got {family!r}.")
    tensors = Tensors(_read(folder))
    model, weights, unused = FAMILIES[family](config, tensors, dtype)
    assign_weights(model, weights, tensors.wrong(unused))
    return model


def load_torch_transformer(state, num_heads, norm_first=False, activation="relu", epsilon=1e-5, dtype=None):
    """An encoder and a decoder with the weights of a `torch.nn.Transformer`.

    They are as those of `build_transformer`, for models composed by hand: embeddings, positions and logits are no part
    of PyTorch's. Sizes and biases are those of the weights.

    Args:
        state: dict from names (`"encoder.layers.0.self_attn.in_proj_weight"`) to arrays or PyTorch tensors, the
            `state_dict()` of a `torch.nn.Transformer`.
        num_heads: int, its `nhead`.
        norm_first, activation: its arguments of that name.
        epsilon: float, its `layer_norm_eps`.
        dtype: str or `keras.DTypePolicy` of all layers; None for Keras's global policy.

    Returns:
        (encoder, decoder): `keras.Model`s without dropout, of `[vectors [B, S, D], padding_mask [B, S]]` to memory
        `[B, S, D]`, and of `[vectors [B, T, D], padding_mask [B, T], memory, padding mask of the memory]` to vectors
        `[B, T, D]`. Masks are bool, True for real tokens (PyTorch's are True for padding).

    Raises:
        ValueError: naming all of them, on weights that are missing, have another shape or are left over.

    Example:
    ```python
    import keras
    import keras_transformer as kt
    try:
        import torch
        theirs = torch.nn.Transformer(16, nhead=2, num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=32)
        encoder, decoder = kt.load_torch_transformer(theirs.state_dict(), num_heads=2)
        assert encoder([keras.ops.ones((1, 3, 16)), keras.ops.ones((1, 3), "bool")]).shape == (1, 3, 16)
    except ImportError:
        pass  # it is not needed for arrays
    ```
    """
    arrays = {
        name: array.detach().float().cpu().numpy() if hasattr(array, "cpu") else array for name, array in state.items()
    }
    tensors = Tensors(arrays)
    block = {"num_heads": num_heads, "norm_first": norm_first, "activation": activation, "epsilon": epsilon}
    models = []
    for side in ("encoder", "decoder"):
        model, weights = torch_transformer(side, tensors, {**block, "dropout": 0.0, "dtype": dtype})
        assign_weights(model, weights, tensors.wrong() if side == "decoder" else ())
        models.append(model)
    return tuple(models)


def _read(folder):
    """Name -> float32 array, of all files of weights in a folder."""
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    if not files:
        raise FileNotFoundError(f"There must be *.safetensors or *.bin files of weights in {folder}.")
    arrays = {}
    for path in files:
        arrays.update(_read_safetensors(path) if path.suffix == ".safetensors" else _read_bin(path))
    return arrays


def _read_safetensors(path):
    from safetensors import safe_open

    try:
        with safe_open(path, "numpy") as file:
            return {name: file.get_tensor(name).astype("float32") for name in file.keys()}  # noqa: SIM118, it is no dict
    except TypeError:  # NumPy has no bfloat16
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name).float().numpy() for name in file.keys()}  # noqa: SIM118, it is no dict


def _read_bin(path):
    import torch

    tensors = torch.load(path, map_location="cpu", weights_only=True)
    return {name: tensor.float().numpy() for name, tensor in tensors.items()}
