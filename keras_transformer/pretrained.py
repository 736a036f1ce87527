"""Published weights, from files on disk, in functional models of this package's blocks.

Letters: `B` batch, `T` tokens, `D` width, `V` vocabulary.
"""

import json
import math
import pathlib
import re

import keras
import numpy as np

from keras_transformer.embeddings import TokenEmbedding
from keras_transformer.models import build_language_model
from keras_transformer.noise import Dropout
from keras_transformer.positions import LearnedPositions
from keras_transformer.stacks import encoder, rows_of
from keras_transformer.transfer import assign_weights

ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}  # Hugging Face's names; others are Keras's


def load_pretrained(folder, dtype=None) -> keras.Model:
    """A model with the weights of a folder in Hugging Face's form: `config.json` beside `*.safetensors` or `*.bin`.

    The families are BERT (Devlin et al. 2018, https://arxiv.org/abs/1810.04805), GPT-2 (Radford et al. 2019) and Llama
    (Touvron et al. 2023, https://arxiv.org/abs/2302.13971), with Mistral. Nothing is downloaded. Reading safetensors
    needs the package of that name, reading `.bin` files PyTorch.

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
    families = {"bert": _bert, "gpt2": _gpt2, "llama": _llama, "mistral": _llama}
    family = config.get("model_type")
    if family not in families:
        raise ValueError(f"The model must be of one of the families {sorted(families)}; got {family!r}.")
    tensors = _Tensors(_read(folder))
    model, weights, unused = families[family](config, tensors, dtype)
    left = [name for name in tensors if name not in tensors.taken and not re.fullmatch(unused, name)]
    wrong = [f"{name}: not in the files" for name in tensors.missing] + [f"{name}: of no use here" for name in left]
    assign_weights(model, weights, wrong)
    return model


class _Tensors(dict):
    """Arrays of files by their names, and which of them were asked for."""

    def __init__(self, arrays):
        super().__init__(arrays)
        self.taken, self.missing = set(), []

    def take(self, name):
        if name not in self:
            self.missing.append(name)
            return None
        self.taken.add(name)
        return self[name]

    def dense(self, theirs, ours, has_bias=True):
        """A PyTorch `Linear`, whose weight is `[out, in]`, as a Keras `Dense`."""
        weight = self.take(f"{theirs}.weight")
        found = {f"{ours}/kernel": None if weight is None else weight.T}
        return {**found, f"{ours}/bias": self.take(f"{theirs}.bias")} if has_bias else found

    def norm(self, theirs, ours, times=1.0):
        """A layer normalization's weight and bias."""
        found = {f"{ours}/gamma": self.take(f"{theirs}.weight"), f"{ours}/beta": self.take(f"{theirs}.bias")}
        return {path: None if value is None else value * times for path, value in found.items()}

    def rms_norm(self, theirs, ours, times=1.0):
        """An RMS norm's weight."""
        scale = self.take(f"{theirs}.weight")
        return {f"{ours}/scale": None if scale is None else scale * times}

    def table(self, name, width):
        """A table of vectors for a `TokenEmbedding`, which scales them by the root of their width."""
        table = self.take(name)
        return None if table is None else table / math.sqrt(width)


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


def _need(config, **wanted):
    """Refuses a config whose options are not those that are built here."""
    wrong = {name: config[name] for name, value in wanted.items() if config.get(name, value) != value}
    if wrong:
        raise ValueError(f"These options of a {config['model_type']} model must be {wanted}; got {wrong}.")


def _activation(name):
    return ACTIVATIONS.get(name, name)


def _bert(config, tensors, dtype):
    _need(config, position_embedding_type="absolute", is_decoder=False, add_cross_attention=False, pad_token_id=0)
    width, epsilon = config["hidden_size"], config["layer_norm_eps"]
    dropout = config["hidden_dropout_prob"]
    block = {
        "num_heads": config["num_attention_heads"],
        "intermediate_dim": config["intermediate_size"],
        "dropout": dropout,
        "activation": _activation(config["hidden_act"]),
        "epsilon": epsilon,
        "attention": {"dropout": config["attention_probs_dropout_prob"]},
        "dtype": dtype,
    }
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    x = TokenEmbedding(config["vocab_size"], width, mask_zero=False, dtype=dtype, name="embedding")(tokens)
    x = LearnedPositions(config["max_position_embeddings"], dtype=dtype, name="positions")(x)
    x = keras.layers.LayerNormalization(epsilon=epsilon, dtype=dtype, name="embedding_norm")(x)
    x = Dropout(dropout, dtype=dtype, name="embedding_dropout")(x)
    x = encoder(width, config["num_hidden_layers"], **block)([x, *rows_of(tokens)])
    model = keras.Model(tokens, x, name="bert")

    start = "bert." if any(name.startswith("bert.") for name in tensors) else ""
    embeddings = f"{start}embeddings"
    positions, segments = (
        tensors.take(f"{embeddings}.{kind}_embeddings.weight") for kind in ("position", "token_type")
    )
    weights = {
        "embedding/embeddings": tensors.table(f"{embeddings}.word_embeddings.weight", width),
        "positions/table": None if positions is None or segments is None else positions + segments[0],
        **tensors.norm(f"{embeddings}.LayerNorm", "embedding_norm"),
    }
    names = {
        "self_attention/query": "attention.self.query",
        "self_attention/key": "attention.self.key",
        "self_attention/value": "attention.self.value",
        "self_attention/output": "attention.output.dense",
        "feed_forward/inner": "intermediate.dense",
        "feed_forward/output": "output.dense",
    }
    for i in range(config["num_hidden_layers"]):
        theirs, ours = f"{start}encoder.layer.{i}", f"encoder_block_{i + 1}"
        for mine, name in names.items():
            weights.update(tensors.dense(f"{theirs}.{name}", f"{ours}/{mine}"))
        weights.update(tensors.norm(f"{theirs}.attention.output.LayerNorm", f"{ours}/self_attention_norm"))
        weights.update(tensors.norm(f"{theirs}.output.LayerNorm", f"{ours}/feed_forward_norm"))
    return model, weights, r"(bert\.)?(embeddings\.position_ids|pooler\..*)|cls\..*"


def _gpt2(config, tensors, dtype):
    _need(config, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    _need(config, tie_word_embeddings=True)
    width = config["n_embd"]
    model = build_language_model(
        config["vocab_size"],
        width,
        config["n_layer"],
        config["n_head"],
        config.get("n_inner") or 4 * width,
        config["resid_pdrop"],
        pad_id=None,
        positions="learned",
        max_length=config["n_positions"],
        dtype=dtype,
        name="gpt2",
        activation=_activation(config["activation_function"]),
        norm_first=True,
        epsilon=config["layer_norm_epsilon"],
        attention={"dropout": config["attn_pdrop"]},
    )
    start = "transformer." if any(name.startswith("transformer.") for name in tensors) else ""
    root = math.sqrt(width)  # the table is divided by it; the logits, which share the table, get it by the last norm
    weights = {
        "embedding/embeddings": tensors.table(f"{start}wte.weight", width),
        "positions/table": tensors.take(f"{start}wpe.weight"),
        **tensors.norm(f"{start}ln_f", "decoder_norm", times=root),
    }
    for i in range(config["n_layer"]):
        theirs, ours = f"{start}h.{i}", f"decoder_block_{i + 1}"
        weights.update(tensors.norm(f"{theirs}.ln_1", f"{ours}/self_attention_norm"))
        weights.update(tensors.norm(f"{theirs}.ln_2", f"{ours}/feed_forward_norm"))
        for kind, mine in (("weight", "kernel"), ("bias", "bias")):  # these weights are [in, out], as Keras's
            joined = tensors.take(f"{theirs}.attn.c_attn.{kind}")
            parts = [None] * 3 if joined is None else np.split(joined, 3, axis=-1)
            weights.update(
                (f"{ours}/self_attention/{part}/{mine}", x) for part, x in zip(("query", "key", "value"), parts)
            )
            weights[f"{ours}/self_attention/output/{mine}"] = tensors.take(f"{theirs}.attn.c_proj.{kind}")
            weights[f"{ours}/feed_forward/inner/{mine}"] = tensors.take(f"{theirs}.mlp.c_fc.{kind}")
            weights[f"{ours}/feed_forward/output/{mine}"] = tensors.take(f"{theirs}.mlp.c_proj.{kind}")
    return model, weights, r".*\.attn\.(masked_)?bias|lm_head\.weight"


def _llama(config, tensors, dtype):
    width, heads = config["hidden_size"], config["num_attention_heads"]
    tied, bias = bool(config.get("tie_word_embeddings")), bool(config.get("attention_bias"))
    attention = {
        "key_dim": config.get("head_dim") or width // heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "position": {"type": "rotary", **_rope(config)},
        "window": config.get("sliding_window"),
        "dropout": config.get("attention_dropout", 0.0),
        "use_bias": bias,
    }
    model = build_language_model(
        config["vocab_size"],
        width,
        config["num_hidden_layers"],
        heads,
        config["intermediate_size"],
        dropout=0.0,
        tie_embeddings=tied,
        pad_id=None,
        dtype=dtype,
        name=config["model_type"],
        activation=_activation(config["hidden_act"]),
        norm_first=True,
        use_bias=bool(config.get("mlp_bias")),
        epsilon=config["rms_norm_eps"],
        normalization="rms",
        attention=attention,
        feed_forward={"gated": True},
    )
    weights = {"embedding/embeddings": tensors.table("model.embed_tokens.weight", width)}
    weights.update(tensors.rms_norm("model.norm", "decoder_norm", times=math.sqrt(width) if tied else 1.0))
    if not tied:
        weights["embedding/reverse_embeddings"] = tensors.dense("lm_head", "", False)["/kernel"]
    names = {
        **{
            f"self_attention/{kind}": (f"self_attn.{kind[0]}_proj", bias)
            for kind in ("query", "key", "value", "output")
        },
        **{
            f"feed_forward/{mine}": (f"mlp.{name}_proj", bool(config.get("mlp_bias")))
            for mine, name in (("inner", "gate"), ("gate", "up"), ("output", "down"))
        },
    }
    for i in range(config["num_hidden_layers"]):
        theirs, ours = f"model.layers.{i}", f"decoder_block_{i + 1}"
        for mine, (name, has_bias) in names.items():
            weights.update(tensors.dense(f"{theirs}.{name}", f"{ours}/{mine}", has_bias))
        weights.update(tensors.rms_norm(f"{theirs}.input_layernorm", f"{ours}/self_attention_norm"))
        weights.update(tensors.rms_norm(f"{theirs}.post_attention_layernorm", f"{ours}/feed_forward_norm"))
    return model, weights, r"lm_head\.weight|.*rotary_emb\.inv_freq" if tied else r".*rotary_emb\.inv_freq"


def _rope(config):
    """Options of `RotaryPositions`."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    options = {"max_wavelength": rope.get("rope_theta", config.get("rope_theta", 10000.0))}
    if kind in ("linear", "yarn"):
        options.update(scaling=kind, factor=rope["factor"])
    if kind == "yarn":
        _need({"model_type": "yarn", **rope}, beta_fast=32, beta_slow=1, attention_factor=None, mscale=None)
        options["original_length"] = rope["original_max_position_embeddings"]
    if kind not in ("default", "linear", "yarn"):
        raise ValueError(f"Rotary positions must be of the type 'default', 'linear' or 'yarn'; got {kind!r}.")
    return options
