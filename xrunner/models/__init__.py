"""The layers of the supported architectures, their KV storage and weight loading."""

from xrunner.models.attention_planning import Dealing, Planning
from xrunner.models.batch import AttentionArrays, AttentionBatch, Batch, computed_rows
from xrunner.models.cache import KVCache
from xrunner.models.decoder import Between, Model
from xrunner.models.encoder_decoder import EncoderDecoder
from xrunner.models.model_loading import load_model, random_model
from xrunner.models.shard import Shard

__all__ = [
    "AttentionArrays",
    "AttentionBatch",
    "Batch",
    "Between",
    "Dealing",
    "EncoderDecoder",
    "KVCache",
    "Model",
    "Planning",
    "Shard",
    "computed_rows",
    "load_model",
    "random_model",
]
