"""Models that people train, with the rows that are compared on each.

Processor seconds per step of all four ranks, evaluation included, by one seed beside other work on two cores: resnet 0.17 to
0.21, vgg 0.09, bert 0.18, flights 0.02 to 0.04, speech 0.10 to 0.15. No run may last longer than the 600 s of `run_ranks`.
"""

from __future__ import annotations

from bagua_kernels import algorithms
from bench.convergence.local_steps import muon
from bench.convergence.row import BASELINE, Row
from bench.convergence.tasks import Task, up_and_down
from bench.models import bert, flights, resnet, speech, vgg

IMAGES, ADAM, TABLES = ("resnet", "vgg"), ("bert", "speech"), ("flights",)
ALL = (*IMAGES, *ADAM, *TABLES)
AUC = "AUC"

MODELS = {
    "resnet": Task("resnet", resnet.data, resnet.network, 16, 700, 0.5, 0.9, up_and_down, validates=True, seeds=3),
    "vgg": Task("vgg", vgg.data, vgg.network, 16, 1200, 0.5, 0.9, up_and_down, validates=True, seeds=3),
    "bert": Task(
        "bert", bert.data, bert.network, 8, 1000, 2e-3, 0.0, up_and_down, optimizer="adamw", validates=True, seeds=3
    ),
    "flights": Task(
        "flights",
        flights.data,
        flights.network,
        128,
        1500,
        0.1,
        0.0,
        up_and_down,
        optimizer="adagrad",
        validates=True,
        seeds=3,
        loss=flights.loss,
        metric=flights.metric,
        metric_name=AUC,
    ),
    "speech": Task(
        "speech",
        speech.data,
        speech.network,
        8,
        450,
        2e-3,
        0.0,
        up_and_down,
        optimizer="adamw",
        validates=True,
        seeds=3,
    ),
}

# Chunks of 512 elements, for most parameters of these models are smaller than the default of 4,096.
SPARSE = "chunked_topk:k=64,chunk=512"
ROWS = [
    Row(BASELINE, algorithms.GradientAllReduce, tasks=ALL),
    Row("ByteGrad", algorithms.ByteGrad, tasks=ALL),
    Row("QSGD, 4 bits", algorithms.QSGD, {"bits": 4}, tasks=ALL),
    Row("PowerSGD rank 4", algorithms.PowerSGD, {"rank": 4}, tasks=ALL),
    Row("Decentralized", algorithms.Decentralized, tasks=ALL),
    Row("DiLoCo", algorithms.DiLoCo, tasks=ALL),
    Row("SparseLoCo", algorithms.SparseLoCo, {"codec": SPARSE}, tasks=ALL),
    Row("Wagma", algorithms.Wagma, tasks=ALL),
    Row("MuLoCo", algorithms.MuLoCo, optimizer=muon, tasks=ADAM),
    # Expected to lose, as PowerSGD with AdamW: signs beside momentum, and few elements beside Adam's second moment.
    Row("sign, momentum", algorithms.SignSGD, tasks=IMAGES),
    Row("top 1 %, AdamW", algorithms.TopK, tasks=ADAM),
    # Tables whose gradients are dense: all bytes of the first table are sent, and encoded.
    Row("all-reduce, dense", algorithms.GradientAllReduce, tasks=TABLES, dense=True),
    Row("ByteGrad, dense", algorithms.ByteGrad, tasks=TABLES, dense=True),
    Row("PowerSGD rank 4, dense", algorithms.PowerSGD, {"rank": 4}, tasks=TABLES, dense=True),
    Row("sign, dense", algorithms.SignSGD, tasks=TABLES, dense=True),
    # Expected to lose: signs alone.
    Row("sign, dense, no feedback", algorithms.SignSGD, {"error_feedback": False}, tasks=TABLES, dense=True),
]
