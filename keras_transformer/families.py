"""Families of published models: each as a functional model of this package's blocks, and which weight is which.

Letters: `B` batch, `T` tokens, `D` width, `V` vocabulary.
"""

import math

import keras
import numpy as np

from keras_transformer.embeddings import TokenEmbedding
from keras_transformer.models import build_language_model
from keras_transformer.noise import Dropout
from keras_transformer.positions import LearnedPositions
from keras_transformer.stacks import decoder, encoder, rows_of

ACTIVATIONS = {  # Hugging Face's names and ours
    **{name: name for name in ("gelu", "relu", "silu", "tanh")},
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu_tanh"),
    "swish": "silu",
}
LLAMA = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "head_dim": None, "num_key_value_heads": None}
LLAMA.update(tie_word_embeddings=False, attention_bias=False, mlp_bias=False, attention_dropout=0.0, layer_types=None)
DEFAULTS = {  # what a config.json need not say, by `transformers`
    "bert": {"hidden_act": "gelu", "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    | {"layer_norm_eps": 1e-12, "max_position_embeddings": 512},
    "gpt2": {"activation_function": "gelu_new", "resid_pdrop": 0.1, "attn_pdrop": 0.1, "layer_norm_epsilon": 1e-5}
    | {"n_inner": None, "n_positions": 1024},
    "llama": LLAMA,
    "mistral": {**LLAMA, "num_key_value_heads": 8, "sliding_window": 4096},
}


def _need(config, **wanted):
    """Refuses a config whose options are not those that are built here."""
    wrong = {name: config[name] for name, value in wanted.items() if config.get(name, value) != value}
    if wrong:
        raise ValueError(f"These options of a {config['model_type']} model must be {wanted}; got {wrong}.")


def _activation(name):
    if name not in ACTIVATIONS:
        raise ValueError(f"The activation must be one of {sorted(ACTIVATIONS)}; got {name!r}.")
    return ACTIVATIONS[name]


def _bert_model(config, dtype):
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
    return keras.Model(tokens, x, name="bert")


def _bert(config, tensors, dtype):
    model, width = _bert_model(config, dtype), config["hidden_size"]
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
    tensors.tied("lm_head.weight", f"{start}wte.weight")
    return model, weights, r".*\.attn\.(masked_)?bias"


def _llama_model(config, dtype):
    width, heads = config["hidden_size"], config["num_attention_heads"]
    if len(set(config["layer_types"] or "1")) > 1:
        raise ValueError(f"All layers must be of one of the `layer_types`; got {config['layer_types']}.")
    attention = {
        "key_dim": config["head_dim"] or width // heads,
        "num_kv_heads": config["num_key_value_heads"] or heads,
        "position": {"type": "rotary", **_rope(config)},
        "window": config["sliding_window"] if config["model_type"] == "mistral" else None,
        "dropout": config["attention_dropout"] or 0.0,
        "use_bias": bool(config["attention_bias"]),
    }
    return build_language_model(
        config["vocab_size"],
        width,
        config["num_hidden_layers"],
        heads,
        config["intermediate_size"],
        dropout=0.0,
        tie_embeddings=bool(config["tie_word_embeddings"]),
        pad_id=None,
        dtype=dtype,
        name=config["model_type"],
        activation=_activation(config["hidden_act"]),
        norm_first=True,
        use_bias=bool(config["mlp_bias"]),
        epsilon=config["rms_norm_eps"],
        normalization="rms",
        attention=attention,
        feed_forward={"gated": True},
    )


def _llama(config, tensors, dtype):
    model, width = _llama_model(config, dtype), config["hidden_size"]
    tied, bias, inner_bias = (bool(config[name]) for name in ("tie_word_embeddings", "attention_bias", "mlp_bias"))
    start = "model." if any(name.startswith("model.") for name in tensors) else ""
    table = f"{start}embed_tokens.weight"
    weights = {"embedding/embeddings": tensors.table(table, width)}
    weights.update(tensors.rms_norm(f"{start}norm", "decoder_norm", times=math.sqrt(width) if tied else 1.0))
    if tied:
        tensors.tied("lm_head.weight", table)
    else:
        head = tensors.take("lm_head.weight")
        weights["embedding/reverse_embeddings"] = None if head is None else head.T
    parts = ("query", "key", "value", "output")
    names = {f"self_attention/{part}": (f"self_attn.{part[0]}_proj", bias) for part in parts}
    for part, name in (("inner", "gate"), ("gate", "up"), ("output", "down")):
        names[f"feed_forward/{part}"] = f"mlp.{name}_proj", inner_bias
    for i in range(config["num_hidden_layers"]):
        theirs, ours = f"{start}layers.{i}", f"decoder_block_{i + 1}"
        for mine, (name, has_bias) in names.items():
            weights.update(tensors.dense(f"{theirs}.{name}", f"{ours}/{mine}", has_bias))
        weights.update(tensors.rms_norm(f"{theirs}.input_layernorm", f"{ours}/self_attention_norm"))
        weights.update(tensors.rms_norm(f"{theirs}.post_attention_layernorm", f"{ours}/feed_forward_norm"))
    return model, weights, r".*rotary_emb\.inv_freq"


def _rope(config):
    """Options of `RotaryPositions`."""
    rope = {"partial_rotary_factor": config.get("partial_rotary_factor", 1.0)}
    rope.update({**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})})
    kinds = [kind for kind in (rope.pop("rope_type", None), rope.pop("type", None)) if kind]
    kind = kinds[0] if kinds else "default"
    options = {"max_wavelength": rope.pop("rope_theta", None) or config.get("rope_theta") or 10000.0}
    fixed = {"partial_rotary_factor": 1.0}  # what may be said, with the only value that is built here
    if kind in ("linear", "yarn", "llama3"):
        options.update(scaling=kind, factor=rope.pop("factor", None))
    if kind in ("yarn", "llama3"):
        length = rope.pop("original_max_position_embeddings", None)
        options["original_length"] = length or config.get("max_position_embeddings")
    if kind == "yarn":
        fixed.update(beta_fast=32, beta_slow=1, attention_factor=None, mscale=None, mscale_all_dim=None, truncate=True)
    if kind == "llama3":
        fixed.update(low_freq_factor=1, high_freq_factor=4)
    wrong = {name: value for name, value in rope.items() if name not in fixed or fixed[name] != value}
    if kind not in ("default", "linear", "yarn", "llama3") or wrong:
        raise ValueError(
            "Rotary positions must be of the type 'default', 'linear', 'yarn' or 'llama3', with the options of "
            f"`RotaryPositions`; got {kind!r} with {wrong}."
        )
    return options


def torch_transformer(side, tensors, block):
    """The `"encoder"` or the `"decoder"` of a `torch.nn.Transformer`, and its weights."""
    number = len({name.split(".")[2] for name in tensors if name.startswith(f"{side}.layers.")})
    inner = tensors.get(f"{side}.layers.0.linear1.weight")
    if inner is None:
        raise ValueError(f"There must be weights {side}.layers.0.linear1.weight; got {sorted(tensors)[:5]}.")
    has_bias = f"{side}.layers.0.linear1.bias" in tensors
    block = {**block, "intermediate_dim": inner.shape[0], "use_bias": has_bias, "final_norm": True}
    model = {"encoder": encoder, "decoder": decoder}[side](inner.shape[1], number, **block)
    weights = tensors.norm(f"{side}.norm", f"{side}_norm", has_bias)
    sublayers = {"self_attention": "self_attn", "cross_attention": "multihead_attn"}
    if side == "encoder":
        del sublayers["cross_attention"]
    for i in range(number):
        theirs, ours = f"{side}.layers.{i}", f"{side}_block_{i + 1}"
        for mine, name in sublayers.items():
            for kind, weight in (("weight", "kernel"), ("bias", "bias"))[: 1 + has_bias]:
                joined = tensors.take(f"{theirs}.{name}.in_proj_{kind}")
                parts = [None] * 3 if joined is None else np.split(joined.T, 3, axis=-1)
                paths = (f"{ours}/{mine}/{part}/{weight}" for part in ("query", "key", "value"))
                weights.update(zip(paths, parts))
            weights.update(tensors.dense(f"{theirs}.{name}.out_proj", f"{ours}/{mine}/output", has_bias))
        for mine, name in (("inner", "linear1"), ("output", "linear2")):
            weights.update(tensors.dense(f"{theirs}.{name}", f"{ours}/feed_forward/{mine}", has_bias))
        for place, mine in enumerate([*sublayers, "feed_forward"], 1):
            weights.update(tensors.norm(f"{theirs}.norm{place}", f"{ours}/{mine}_norm", has_bias))
    return model, weights


FAMILIES = {"bert": _bert, "gpt2": _gpt2, "llama": _llama, "mistral": _llama}
