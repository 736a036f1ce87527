"""Transformer layers for Keras 3: compose them with the functional API, train with `fit`, ship as a SavedModel."""

from keras_transformer.attention import MultiHeadCrossAttention, MultiHeadSelfAttention, dot_product_attention
from keras_transformer.blocks import DecoderBlock, EncoderBlock, FeedForward
from keras_transformer.data import pair_batches
from keras_transformer.decoding import beam, greedy, sample
from keras_transformer.embeddings import TokenEmbedding
from keras_transformer.generator import Generator
from keras_transformer.masks import lower_triangular_mask
from keras_transformer.models import PRESETS, build_language_model, build_transformer
from keras_transformer.positions import PositionalEncoding
from keras_transformer.scopes import AttentionMaps, DecodingScope
from keras_transformer.text import TextGenerator, Translator
from keras_transformer.tokenizer import Tokenizer
from keras_transformer.training import Perplexity, TokenAccuracy, TokenCrossentropy, TokenLoss, WarmupInverseSqrt

__all__ = [
    "AttentionMaps",
    "DecoderBlock",
    "DecodingScope",
    "EncoderBlock",
    "FeedForward",
    "Generator",
    "MultiHeadCrossAttention",
    "MultiHeadSelfAttention",
    "PRESETS",
    "Perplexity",
    "PositionalEncoding",
    "TokenAccuracy",
    "TokenCrossentropy",
    "TokenEmbedding",
    "TokenLoss",
    "TextGenerator",
    "Tokenizer",
    "Translator",
    "WarmupInverseSqrt",
    "beam",
    "build_language_model",
    "build_transformer",
    "dot_product_attention",
    "greedy",
    "lower_triangular_mask",
    "pair_batches",
    "sample",
]
