"""The load generator on this server: all outputs of the asked lengths, and the same counts on both sides."""

import asyncio
import json

from exegpt.loadtest.endpoint import find_endpoint, http_request
from exegpt.loadtest.measurements import RequestBounds, measure
from exegpt.loadtest.open_loop import LoadRequest, SendLimits, send_all


def test_streams_of_this_server_are_read_whole(server):
    endpoint = find_endpoint(server.url, None)
    assert endpoint.model == "tiny" and endpoint.context == 128
    requests = []
    for index in range(12):
        body = {"model": "tiny", "prompt": [5 + index] * (10 + index), "max_tokens": 4 + 2 * index, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
        data = http_request(endpoint.address, "/completions", body)
        requests.append(LoadRequest(index, data, 10 + index, 4 + 2 * index, 0.02 * index, None))
    sent = asyncio.run(send_all(endpoint.address, requests, SendLimits(30.0, 0, None)))
    run = measure(sent, 50.0, RequestBounds(latency_s=30.0))
    assert run.completed == 12 and run.other_lengths == 0 and run.finish_reasons == {"length": 12}
    for request, outcome in zip(requests, sent.outcomes, strict=True):
        assert (outcome.prompt_tokens, outcome.output_tokens) == (request.prompt_tokens, request.output_tokens)
        assert outcome.scheduled_s <= outcome.sent_s < outcome.first_token_s <= outcome.finish_s
    assert run.within_bounds == 1.0 and sent.connections <= 12


def test_a_client_that_leaves_early_leaves_the_server_well(server):
    endpoint = find_endpoint(server.url, "tiny")
    body = {"prompt": [7] * 8, "max_tokens": 100, "ignore_eos": True, "stream": True, "temperature": 0}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    data = http_request(endpoint.address, "/completions", body)
    requests = [LoadRequest(index, data, 8, 5, 0.0, 5) for index in range(3)]
    sent = asyncio.run(send_all(endpoint.address, requests, SendLimits(30.0, 0, None)))
    assert [outcome.finish_reason for outcome in sent.outcomes] == ["cut"] * 3
    assert (
        json.loads(server.post("/v1/completions", {"prompt": [7], "max_tokens": 2})[2])["usage"]["completion_tokens"]
        > 0
    )
