"""Cells of the runner's matrix: every policy on layouts of one to four ranks. Run as a program, the ranks of a job."""

import dataclasses
import json
import sys
from pathlib import Path

import torch

from tests.xcore.small_specs import split
from xcore.batching import Order
from xcore.document import fingerprint
from xcore.orders import fcfs
from xcore.requests.request import Request
from xcore.specs.cluster import local_cluster
from xcore.specs.schedule import ModelReference, ProfileReference, Schedule, Stage, ranks_needed
from xcore.specs.workload import Workload

SIZES = {"layers": 5, "hidden": 64, "heads": 4, "ffn": 96, "vocab": 300, "context": 96}
POLICIES = {
    "static": {"encode_batch": 5},
    "hybrid": {"encode_batch": 7, "micro_batches": 2, "encode_micro_batches": 3},
    "orca": {"max_num_seqs": 5, "prefills_per_step": 1},
    "chunked": {"max_num_seqs": 6, "max_num_batched_tokens": 13},
    "rra": {"encode_batch": 3, "decode_batch": 6, "decode_iterations": 4},
}
WAA = {"encode_batch": 3, "decode_batch": 6, "micro_batches": 1}
SIDES = {  # the degrees of the encoding and of the decoding side's stages, and replicas
    2: [((1,), (1,), 1)],
    3: [((1, 1), (1,), 1), ((1,), (1, 1), 1), ((2,), (1,), 1), ((1,), (2,), 1)],
    4: [
        ((1, 1), (1, 1), 1),
        ((2,), (2,), 1),
        ((2,), (1, 1), 1),
        ((1, 1), (2,), 1),
        ((1,), (1, 2), 1),
        ((2, 1), (1,), 1),
        ((1,), (1,), 2),
    ],
}
LAYOUTS = {  # the degree of every stage, and replicas
    2: [((1, 1), 1), ((2,), 1), ((1,), 2)],
    4: [((1, 1, 1, 1), 1), ((2, 2), 1), ((2, 1, 1), 1), ((1, 2, 1), 1), ((4,), 1), ((1, 1), 2), ((2,), 2)],
}
LENGTHS = [
    (1, 9),
    (17, 1),
    (40, 20),
    (5, 33),
    (64, 12),
    (16, 16),
    (33, 2),
    (2, 40),
    (50, 25),
    (9, 7),
    (31, 30),
    (80, 16),
]


def stages(degrees, spec, phase="both", first=0):
    """Stages of these degrees, the first device being `first`, with the layers that work in the phase as even as can
    be.
    """
    layout, device = [], first
    encoder = spec.encoder_layers * (phase != "decode")
    decoder = spec.layers * (phase != "encode" or not spec.encoder_layers)
    for i, tp in enumerate(degrees):
        held = [tuple(round(n * j / len(degrees)) for j in (i, i + 1)) if n else None for n in (encoder, decoder)]
        layout.append(Stage(tuple(range(device, device + tp)), tp, phase, *held))
        device += tp
    return tuple(layout)


def schedule(spec, policy="rra", degrees=(1,), kv_blocks=40, **variables):
    """A schedule of a policy on stages of these degrees."""
    fields = {
        "version": Schedule.VERSION,
        "policy": policy,
        "model": ModelReference(spec, fingerprint(spec)),
        "cluster": local_cluster(),
        "workload": Workload.fixed(16, 8),
        "profile": ProfileReference("roofline", "0"),
        "stages": stages(degrees, spec),
        "kv_blocks": kv_blocks,
        "block_size": 16,
        "dtype": "fp32",
        "kv_dtype": "fp32",
    }
    plan = Schedule(**split(policy, fields | POLICIES.get(policy, {}) | variables))
    return dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, devices_per_node=ranks_needed(plan)))


def disaggregated(spec, encode, decode, **variables):
    """A WAA schedule whose sides have stages of these degrees."""
    layers = stages(encode, spec, "encode") + stages(decode, spec, "decode", sum(encode))
    return schedule(spec, "waa-m", **(WAA | {"stages": layers} | variables))


def requests(lengths=LENGTHS, seed=0, **options):
    """Requests of these lengths with random prompts."""
    g = torch.Generator().manual_seed(seed)
    return [
        Request(str(i), tuple(torch.randint(0, 300, (n,), generator=g).tolist()), m, **({"ignore_eos": True} | options))
        for i, (n, m) in enumerate(lengths)
    ]


def generate(model, request, **options):
    """transformers' greedy tokens and, for each, how far the two largest logits lie apart in their deviations."""
    out = model.generate(
        torch.tensor([request.prompt_ids]),
        attention_mask=torch.ones(1, len(request.prompt_ids), dtype=torch.long),
        max_new_tokens=request.max_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        pad_token_id=0,
        **options,
    )
    gaps = [float(row.topk(2).values.diff().abs() / row.std()) for (row,) in out.logits]
    return out.sequences[0, len(request.prompt_ids) :].tolist(), gaps


def run_cells(directory: Path, order: Order = fcfs, **how) -> None:
    """Run every cell of `cells.json` on this rank; the leader writes what came of each. `how` as in `Engine.run`."""
    from xcore import document
    from xrunner.comm.ranks import job
    from xrunner.core.engine import Engine

    torch.set_num_threads(1)
    with job() as ranks:
        for name, case in json.loads((directory / "cells.json").read_text()).items():
            plan = document.from_dict(Schedule, case["schedule"], name)
            todo = [document.from_dict(Request, request, name) for request in case["requests"]]
            engine = Engine.load(case["model"], plan, ranks)
            if "eos" in case:
                engine.worker.model = dataclasses.replace(engine.model, eos=frozenset(case["eos"]))
            received = []

            def receive(result, engine=engine, received=received, case=case):
                received.append(result)
                if len(received) == 2:
                    for index in case.get("cancelled", ()):
                        engine.abort(str(index))

            report = engine.run(todo if ranks.rank == 0 else [], receive, order=order, **how)
            ranks.all(None)  # all that was sent has come
            assert not ranks.world.Iprobe(), f"{name} leaves a message on its way"
            if engine.leads:
                assert received == list(report.results)
                results = [document.to_dict(result) for result in report.results]
                served = [document.to_dict(request) for request in report.served]
                spans = [document.to_dict(span) for span in report.timeline.spans]
                facts = {
                    "results": results,
                    "served": served,
                    "spans": spans,
                    "seconds": report.seconds,
                    "preemptions": report.preemptions,
                }
                (directory / f"{name}.json").write_text(json.dumps(facts))
            engine.close()


if __name__ == "__main__":
    run_cells(Path(sys.argv[1]))
