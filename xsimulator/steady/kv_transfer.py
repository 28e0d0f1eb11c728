"""WAA's KV transfer from the encoding to the decoding side, through host memory (paper section 3)."""

from exegpt.model import activation_bytes
from exegpt.profile import Table
from xsimulator.steady.scenario import Scenario


def kv_transfer_seconds(scenario: Scenario, tokens: float) -> float:
    """Seconds from the end of a batch's encoding until the decoding side has the keys and values of its `tokens`
    tokens.

    A decoder-only model's keys and values go from every device over its own link to pinned host memory and on to the
    decoding side. All stages but the last have sent theirs while the next one computed, so the busiest stage's transfer
    decides. An encoder-decoder transfers the encoder's output, from which the decoders compute theirs.
    """
    each, table = scenario.once(("kv transfer", scenario.encode, scenario.decode), lambda: transfer_link(scenario))
    return 2.0 * table.at(tokens * each)


def transfer_link(scenario: Scenario) -> tuple[float, Table]:
    """Bytes per token that the busiest device sends, and the seconds of one of its two copies by bytes."""
    model, profile = scenario.model, scenario.profile
    sent = model.hidden * activation_bytes(profile.dtype)
    if not scenario.encoder_decoder:
        layers = ((s, stop - start) for s in scenario.encode.stages for start, stop in [s.decoder_layers or (0, 0)])
        sent = max(count * model.kv_bytes(s.tp, scenario.kv_dtype) for s, count in layers)
    per_node = scenario.cluster.devices_per_node
    nodes = {rank // per_node for side in (scenario.encode, scenario.decode) for s in side.stages for rank in s.devices}
    return sent, profile.host_copy or (profile.send if len(nodes) == 1 else profile.send_between_nodes)
