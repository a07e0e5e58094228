"""What `bench.convergence` compares: each algorithm as it is by default, and what its options change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bagua_kernels import algorithms
from bagua_kernels.algorithms.adam.momentum import MomentumAllReduce
from bagua_kernels.algorithms.exchanges.exchange import Exchange
from bagua_kernels.algorithms.exchanges.low_rank import LowRankExchange
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator, Work
from bench.convergence import gossip, local_steps
from bench.convergence.row import ALL, BASELINE, CHARACTERS, DIGITS, FASHION, IMAGES, RING, TEXT, Row

MOMENTUM = 0.9
ADAM_RATE = 3e-3  # on images; at 1e-3 longer steps than Adam's, for whatever reason, would look like a merit
WITH_MOMENTUM, WITH_ADAM = "all-reduce, momentum", "all-reduce, Adam"


class ForgetfulPowerSGD(algorithms.PowerSGD):
    """PowerSGD whose residuals are dropped, to see what they are good for."""

    name = "forgetful_powersgd"

    def exchange_for(self, bucket: Bucket, communicator: Communicator) -> Exchange:
        """See `GradientAlgorithm.exchange_for`."""
        return Forgetful(bucket, communicator, self.policy, self.config)


class Forgetful(LowRankExchange):
    """Drops its residuals."""

    def run(self, step: int) -> Iterator[Work]:
        """See `Exchange.run`."""
        yield from super().run(step)
        kept = self._factors.state_dict()
        for residual in kept["residuals"].values():
            residual.zero_()
        self._factors.load_state_dict(kept)


class FrozenAllReduce(MomentumAllReduce):
    """Adam whose second moment freezes and whose gradients are never compressed, to see what the freeze costs alone."""

    name = "frozen_adam"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "codec": None})


FORGET = {"error_feedback": False}
# Algorithms that freeze the second moment of Adam.
FREEZING = {"frozen Adam": FrozenAllReduce, "QAdam": algorithms.QAdam, "1-bit Adam": algorithms.OneBitAdam}
# Adam's bias correction at a freeze, by the text in a row's name.
CORRECTIONS = {"": {}, ", v uncorrected": {"v_correction": "none"}, ", v corrected": {"v_correction": "frozen"}}
ROWS = [
    Row(BASELINE, algorithms.GradientAllReduce, tasks=(*ALL, *RING, *TEXT)),
    Row(WITH_MOMENTUM, algorithms.GradientAllReduce, momentum=MOMENTUM, baseline=WITH_MOMENTUM),
    Row("sign", algorithms.SignSGD, bar="near", tasks=ALL),
    Row("sign, no feedback", algorithms.SignSGD, FORGET, bar="worse", tasks=(*DIGITS, *CHARACTERS)),
    Row("sign, majority vote", algorithms.SignSGD, {"majority_vote": True}, rate=1e-3, tasks=DIGITS),
    Row("1-bit", algorithms.OneBitSGD, tasks=ALL),
    Row("double squeeze", algorithms.DoubleSqueeze, bar="near", tasks=ALL),
    Row(
        "double squeeze, owners forget",
        algorithms.CompressedAllReduce,
        {"codec": "sign", "error_feedback": True, "owner_feedback": False},
        bar="worse",
        tasks=DIGITS,
    ),
    Row("top 1 %", algorithms.TopK, tasks=ALL),
    Row("top 1 %, no feedback", algorithms.TopK, FORGET, tasks=DIGITS),
    Row("top 0.1 %", algorithms.TopK, {"ratio": 0.001}, bar="near", tasks=DIGITS),
    Row("top 0.1 %, no feedback", algorithms.TopK, {"ratio": 0.001, **FORGET}, bar="worse", tasks=DIGITS),
    Row("random 5 %", algorithms.RandomK, tasks=ALL),
    Row("random 5 %, no feedback", algorithms.RandomK, FORGET, tasks=DIGITS),
    Row("DGC 1 %", algorithms.DGC, momentum=MOMENTUM, baseline=WITH_MOMENTUM),
    Row(
        "DGC 0.1 %, masking",
        algorithms.DGC,
        {"ratio": 0.001, "masking": True},
        momentum=MOMENTUM,
        baseline=WITH_MOMENTUM,
    ),
    Row("PowerSGD rank 1", algorithms.PowerSGD, bar="near", tasks=ALL),
    Row("PowerSGD rank 1, in turn", algorithms.PowerSGD, {"rank": 1, "alternate": True}, bar="near"),
    *(
        Row(
            f"PowerSGD rank {rank}{sides}",
            algorithms.PowerSGD,
            {"rank": rank, "alternate": bool(sides)},
            bar="near",
            tasks=IMAGES if sides else ALL,
        )
        for rank in (2, 4)
        for sides in ("", ", in turn")
    ),
    Row("PowerSGD rank 1, no feedback", ForgetfulPowerSGD, {"rank": 1}, bar="worse", tasks=DIGITS),
    Row("ByteGrad", algorithms.ByteGrad, tasks=ALL),
    Row("QSGD", algorithms.QSGD, tasks=ALL),
    Row("TernGrad", algorithms.TernGrad, tasks=ALL),
    Row("natural", algorithms.NaturalCompression, tasks=ALL),
    Row("FP8", algorithms.FP8AllReduce, tasks=ALL),
    Row("compressed, 4 bits", algorithms.CompressedAllReduce, {"codec": "absmax_int4"}, tasks=ALL),
    # What the optimizer's momentum makes of error feedback.
    Row("sign, momentum", algorithms.SignSGD, bar="none", momentum=MOMENTUM, baseline=WITH_MOMENTUM, tasks=FASHION),
    # Adam: its second moment frozen after a fifth of the steps, alone and with momentum in few bits.
    Row(
        WITH_ADAM,
        algorithms.GradientAllReduce,
        rate=ADAM_RATE,
        optimizer="adam",
        baseline=WITH_ADAM,
        tasks=IMAGES,
        bar="none",
    ),
    *(
        Row(
            label + suffix,
            kind,
            options,
            rate=ADAM_RATE,
            optimizer="adam",
            baseline=WITH_ADAM,
            tasks=DIGITS if suffix else IMAGES,
            begins=0.2,
            bar="none",
        )
        for label, kind in FREEZING.items()
        for suffix, options in CORRECTIONS.items()
    ),
    # AdamW on characters: what sends more, and what begins later.
    Row("QSGD, 8 bits", algorithms.QSGD, {"bits": 8}, tasks=CHARACTERS),
    *(
        Row(f"{label}{suffix}, freeze at {begins * 100:.0f} %", kind, options, tasks=CHARACTERS, begins=begins)
        for label, kind in FREEZING.items()
        for begins in (0.2, 0.5)
        for suffix, options in CORRECTIONS.items()
    ),
    *(Row(f"PowerSGD rank {rank}", algorithms.PowerSGD, {"rank": rank}, tasks=CHARACTERS) for rank in (8, 16)),
    *(Row(f"top {ratio * 100:.0f} %", algorithms.TopK, {"ratio": ratio}, tasks=CHARACTERS) for ratio in (0.1, 0.3)),
    Row("random 30 %", algorithms.RandomK, {"ratio": 0.3}, tasks=CHARACTERS),
    *(
        Row(f"{label}, warm-up {begins * 100:.0f} %", kind, options, tasks=CHARACTERS, begins=begins)
        for label, kind, options in (
            ("sign", algorithms.SignSGD, {}),
            ("top 1 %", algorithms.TopK, {}),
            ("PowerSGD rank 2", algorithms.PowerSGD, {"rank": 2}),
            ("PowerSGD rank 8", algorithms.PowerSGD, {"rank": 8}),
            ("top 10 %", algorithms.TopK, {"ratio": 0.1}),
        )
        for begins in (0.2, 0.5)
    ),
    Row("DGC 1 %, AdamW", algorithms.DGC, tasks=CHARACTERS),
    *gossip.ROWS,
    *local_steps.ROWS,
]
