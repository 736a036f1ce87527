"""Published weights, from files on disk, in functional models of this package's blocks.

Letters: `B` batch, `T` tokens, `D` width, `V` vocabulary.
"""

import json
import pathlib

import keras

from keras_transformer.checks import check_names
from keras_transformer.families import DEFAULTS, FAMILIES, torch_transformer
from keras_transformer.tensors import Tensors
from keras_transformer.transfer import assign_weights, misfits


def load_pretrained(folder, unused=(), dtype=None) -> keras.Model:
    """A model with the weights of a folder in Hugging Face's form: `config.json` beside `model.safetensors`.

    The families are BERT (Devlin et al. 2018, https://arxiv.org/abs/1810.04805), GPT-2 (Radford et al. 2019) and Llama
    (Touvron et al. 2023, https://arxiv.org/abs/2302.13971) to 3.2, with Mistral. Nothing is downloaded. Of weights in
    parts `model.safetensors.index.json` names the files; `pytorch_model.bin` is read too, which needs PyTorch.

    Args:
        folder: str or path.
        unused: beginnings of names of weights that are left out, as of a head: `("classifier.",)`.
        dtype: str or `keras.DTypePolicy` of all layers; None for Keras's global policy.

    Returns:
        An uncompiled functional `keras.Model` from `tokens` ids [B, T]. BERT's gives vectors [B, T, D], of which
        `Pooling` makes one; all tokens are of segment 0, id 0 is padding. Those of GPT-2 and Llama give logits
        [B, T, V]; they have no padding, and a `Generator` with their ids writes with them. Where logits share the table
        of tokens, the vectors of `get_layer("decoder")` are `sqrt(D)` times the published ones.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: on another family, on a config that lacks a size or has options that are not here; and, naming all
            of them, on weights that are missing, have another shape or are left over.

    Example:
    ```python
    import keras_transformer as kt
    try:
        model = kt.load_pretrained("all-MiniLM-L6-v2")
    except FileNotFoundError:
        pass  # it has to be there
    ```
    """
    folder, unused = pathlib.Path(folder), check_names("unused", unused)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"The model must be of one of the families {sorted(FAMILIES)}; got {family!r}.")
    tensors = Tensors(_read(folder))
    try:
        model, weights, known = FAMILIES[family]({**DEFAULTS[family], **config}, tensors, dtype)
    except KeyError as error:
        raise ValueError(f"The config.json of a {family} model must have {error}; it has not.") from error
    assign_weights(model, weights, tensors.wrong(known, unused))
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
    block.update(dropout=0.0, dtype=dtype)
    encoder, decoder = (torch_transformer(side, tensors, block) for side in ("encoder", "decoder"))
    assign_weights(*encoder, [*tensors.wrong(), *misfits(*decoder)])
    assign_weights(*decoder)
    return encoder[0], decoder[0]


def _read(folder):
    """Name -> float32 array, of the weights in a folder: as `transformers` does, from one of these files or sets."""
    for name, read in {"model.safetensors": _read_safetensors, "pytorch_model.bin": _read_bin}.items():
        index = folder / f"{name}.index.json"
        if index.exists():
            parts = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            return {key: array for part in sorted(parts) for key, array in read(folder / part).items()}
        if (folder / name).exists():
            return read(folder / name)
    raise FileNotFoundError(f"There must be model.safetensors or pytorch_model.bin, or an index of parts, in {folder}.")


def _read_safetensors(path):
    from safetensors.numpy import load_file

    return {name: array.astype("float32") for name, array in load_file(path).items()}


def _read_bin(path):
    import torch

    tensors = torch.load(path, map_location="cpu", weights_only=True)
    return {name: tensor.float().numpy() for name, tensor in tensors.items()}
