"""The layers of the supported architectures, their KV storage and weight loading."""

from exegpt.models.batch import AttentionBatch, Batch, computed_rows
from exegpt.models.cache import KVCache
from exegpt.models.dealing import Dealing
from exegpt.models.decoder import Between, Model
from exegpt.models.encoder_decoder import EncoderDecoder
from exegpt.models.load import load_model, random_model
from exegpt.models.planning import Planning
from exegpt.models.shard import Shard

__all__ = [
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
